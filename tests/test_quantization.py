"""The engine's `quantization`: what a model and its answers lose by it, what it saves, and who is affected by whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ragged import RaggedRunner
from test_kv_quantization import perplexity
from test_models_oracle import CPU, make_checkpoint, sequences

from ifb_handler.cli.bench_perplexity import TEXT
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import ConfigError
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.models.linear import QUANTIZATIONS
from ifb_handler.models.loading import load_model
from ifb_handler.models.source import resolve
from ifb_handler.models.tokenizer import load_tokenizer
from ifb_kernels.backend import select_backend


@pytest.fixture(scope="module")
def text() -> list[int]:
    return load_tokenizer(resolve("smollm2-135m")).encode(" ".join(TEXT.read_text().split()))


@pytest.fixture(scope="module")
def exact(text: list[int]) -> float:
    return perplexity(executor(None), text, torch.float32)


def executor(quantization: str | None, **options: object) -> ModelExecutor:
    config = EngineConfig(dtype="float32", quantization=quantization, cpu_kv_cache_gib=0.05, **options)
    return ModelExecutor(config, resolve(config.model))


@pytest.mark.parametrize("quantization", ["int8", "int4_weight_only"])
def test_the_perplexity_of_smollm2_stays_within_a_percent(quantization: str, text: list[int], exact: float) -> None:
    quantized = executor(quantization)
    # The file is of 4 bits, and of 8 for the embedding: those are kept.
    loss = 0.01 if quantization == "int8" else 1e-5
    assert perplexity(quantized, text, torch.float32) == pytest.approx(exact, rel=loss)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_engine_answers_alike_alone_and_in_any_company(quantization: str, text: list[int]) -> None:
    prompts = [text[:50] + text[start : start + 30] for start in range(100, 700, 100)]

    def answers(**options: object) -> list[list[int]]:
        with Engine("smollm2-135m", dtype="float32", quantization=quantization, **options) as engine:
            outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
            return [output.token_ids for output in outputs]

    alone = answers(max_num_seqs=1, enable_prefix_caching=False)
    assert answers(num_gpu_blocks_override=20, max_num_batched_tokens=48) == alone


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_any_checkpoint_can_be_quantized(tmp_path: Path, architecture: str, dtype: str, quantization: str) -> None:
    make_checkpoint(tmp_path, architecture, {"tie_word_embeddings": architecture == "llama"})
    prompts = sequences([40, 7])

    def logits(quantization: str | None) -> torch.Tensor:
        model = load_model(
            resolve(str(tmp_path)), dtype=dtype, device=CPU, backend=select_backend(CPU), quantization=quantization
        )
        return torch.cat(RaggedRunner(model, prompts).run([16, 3]))

    exact, quantized = logits(None), logits(quantization)
    assert (quantized - exact).norm() < (0.5 if quantization == "int4_weight_only" else 0.05) * exact.norm()


def test_what_is_no_quantization_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"quantization: 'int3' is not one of null, int8, int8_weight_only, int4_weight_only"
    ):
        EngineConfig(quantization="int3")


def test_a_gpu_is_told_that_quantization_is_for_cpus() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    with pytest.raises(ConfigError, match="quantization: 'int8' needs device: cpu"):
        executor("int8", device="cuda")

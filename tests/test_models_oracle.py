"""The decoder against transformers' own models: tiny random checkpoints of every architecture."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import RaggedRunner

from ifb_handler.models.loading import LoadedModel, load_model
from ifb_handler.models.source import resolve
from ifb_kernels.backend import select_backend

CPU = torch.device("cpu")
VOCAB = 131

TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_without_gqa": ("llama", {"num_key_value_heads": 6}),
    "llama_every_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_explicit_head_dim": ("llama", {"head_dim": 16}),
    "llama_llama3_rope": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window_under_the_prompt": ("mistral", {"sliding_window": 21, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window_on_late_layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_with_bias": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_checkpoint(folder: Path, model_type: str, options: dict[str, Any], **saving: Any) -> Any:
    """A random model of that type, saved in `folder`; every weight, norms and biases too, is drawn."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(folder, **saving)
    return model


def load(folder: Path | str, dtype: str = "float32") -> LoadedModel:
    return load_model(resolve(str(folder)), dtype=dtype, device=CPU, backend=select_backend(CPU))


def sequences(lengths: list[int], vocab: int = VOCAB, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def oracle_logits(model: Any, sequence: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([sequence])).logits[0].float()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_ragged_batches_agree_with_transformers(name: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, *CHECKPOINTS[name])
    prompts = sequences([70, 33, 5, 49, 1])
    # Side by side: chunks of 17, a whole prompt, single tokens (decode rows), chunks that end at page borders.
    results = RaggedRunner(load(tmp_path), prompts).run([17, 64, 1, 16, 3])
    for prompt, logits in zip(prompts, results, strict=True):
        assert logits.dtype == torch.float32
        assert (logits - oracle_logits(reference, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_layers_in_one_native_call_give_the_same_bits_as_one_operation_at_a_time(
    name: str, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, *CHECKPOINTS[name])
    prompts = sequences([70, 33, 5, 49, 1])
    model = load(tmp_path)
    together = RaggedRunner(model, prompts, kv_dtype=kv_dtype).run([17, 64, 1, 16, 3])
    assert model.decoder.native_layers is not None
    model.decoder.native_layers = None
    for one, other in zip(
        RaggedRunner(model, prompts, kv_dtype=kv_dtype).run([17, 64, 1, 16, 3]), together, strict=True
    ):
        assert torch.equal(one, other)


# Flat indices into chunks of 17, 30, 1 and 20 tokens: none; each row's last; a row whole, and single ones anywhere.
WANTED = [[], [16, 46, 47, 67], [0, 5, 6, *range(17, 47), 60], list(range(68))]
CHUNKS = {0: 17, 1: 30, 2: 1, 3: 20}


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral_window_under_the_prompt", "qwen2_window_on_late_layers", "qwen3"])
def test_hidden_states_of_some_tokens_are_the_same_bits_as_of_all(
    name: str, native: bool, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, *CHECKPOINTS[name])
    prompts = sequences([60, 40, 9, 50])
    model = load(tmp_path)
    if not native:
        model.decoder.native_layers = None
    everything = RaggedRunner(model, prompts, kv_dtype=kv_dtype)
    everything.forward({0: 40, 2: 8})
    hidden = everything.forward(CHUNKS)
    after = everything.forward({0: 3, 1: 10, 3: 30})
    for wanted in WANTED:
        some = RaggedRunner(model, prompts, kv_dtype=kv_dtype)
        nothing = some.forward({0: 40, 2: 8}, torch.tensor([], dtype=torch.int64))
        assert nothing.shape == (0, model.config.hidden_size)
        assert torch.equal(some.forward(CHUNKS, torch.tensor(wanted, dtype=torch.int64)), hidden[wanted])
        assert torch.equal(some.forward({0: 3, 1: 10, 3: 30}), after), "their keys and values were written"


@pytest.mark.parametrize("name", ["llama", "mistral_window_under_the_prompt"])
def test_hidden_states_of_some_tokens_are_those_of_all_by_plain_torch(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *CHECKPOINTS[name])
    prompts = sequences([60, 40, 9, 50])
    model = load_model(resolve(str(tmp_path)), dtype="float32", device=CPU, backend=select_backend(CPU, "torch"))
    hidden = RaggedRunner(model, prompts).forward(CHUNKS)
    for wanted in WANTED:
        some = RaggedRunner(model, prompts).forward(CHUNKS, torch.tensor(wanted, dtype=torch.int64))
        assert torch.allclose(some, hidden[wanted], atol=1e-5)


def test_sharded_safetensors_load_as_one(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama", {}, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompts = sequences([20])
    (logits,) = RaggedRunner(load(tmp_path), prompts).run([20])
    assert (logits - oracle_logits(reference, prompts[0])).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "mistral_window_under_the_prompt", "qwen2", "qwen3_tied_with_bias"])
def test_narrow_dtypes_stay_near_the_float32_logits(name: str, dtype: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, *CHECKPOINTS[name])
    prompts = sequences([30, 7])
    model = load(tmp_path, dtype)
    assert model.config.dtype == getattr(torch, dtype)
    for prompt, logits in zip(prompts, RaggedRunner(model, prompts).run([11, 1]), strict=True):
        expected = oracle_logits(reference, prompt)
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().mean() < 0.02 * expected.std()


def test_a_context_longer_than_the_first_rotary_table_is_rotated_as_transformers_does(tmp_path: Path) -> None:
    options = {"max_position_embeddings": 4096, "num_hidden_layers": 1}
    reference = make_checkpoint(tmp_path, "llama", options)
    prompts = sequences([2600])
    (logits,) = RaggedRunner(load(tmp_path), prompts).run([700])
    assert (logits - oracle_logits(reference, prompts[0])).abs().max() < 1e-4


def test_the_stopwatch_tells_products_from_attention(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    model = load(tmp_path)
    RaggedRunner(model, sequences([9])).run([9])
    seconds = model.decoder.stopwatch.take()
    assert set(seconds) == {"gemm", "attention"}
    assert min(seconds.values()) > 0
    assert model.decoder.stopwatch.take() == {}

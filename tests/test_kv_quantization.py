"""Pages of 8-bit codes: what they hold, what attention makes of it on CPU, what a model and the engine lose by it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import RaggedRunner
from test_kv_cache_write import as_reference
from test_paged_attention import ROWS, TOLERANCE, assert_rows_keep_their_bits

from ifb_handler.cli.bench_perplexity import TEXT
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.models.source import resolve
from ifb_handler.models.tokenizer import load_tokenizer
from ifb_kernels.backend import select_backend
from ifb_kernels.kv_quantization import dequantize, page_bytes, quantize
from ifb_kernels.layout import LayerKV
from ifb_kernels.synthetic import SyntheticBatch, of_every_magnitude, synthetic_batch

CPU = torch.device("cpu")
QUANTIZED = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("codes_dtype", [torch.int8, torch.uint8])
def test_a_code_is_the_nearest_to_its_value(codes_dtype: torch.dtype) -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 500).unsqueeze(1)
    codes, scales = quantize(x, codes_dtype)
    step = scales.float().unsqueeze(1)
    if codes_dtype == torch.uint8:  # three bits of mantissa, down to the subnormals' 2^-9
        step = torch.maximum(x.abs() / 8, step / 512)
    assert ((dequantize(codes, scales) - x).abs() <= step * (0.5 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_dtype", QUANTIZED)
@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_pages_hold_the_codes_of_the_definition(
    name: str, page_dtype: torch.dtype, dtype: torch.dtype, head_dim: int
) -> None:
    for batch in (
        of_every_magnitude(head_dim, dtype),
        synthetic_batch(ROWS, num_heads=3, num_kv_heads=3, head_dim=head_dim, block_size=4, dtype=dtype),
    ):
        pages = batch.fill(select_backend(CPU, name), page_dtype)
        expected = batch.fill(select_backend(CPU, "reference"), page_dtype)
        scales = (pages.key_scales, pages.value_scales)
        if name == "cpu":
            scales = tuple(scale.transpose(1, 2) for scale in scales)
        plain = as_reference(LayerKV(pages.keys, pages.values), name)
        for actual, wanted in zip((plain.keys, plain.values, *scales), expected.tensors(), strict=True):
            assert torch.equal(actual.contiguous().view(torch.uint8), wanted.view(torch.uint8))


def assert_agrees(name: str, batch: SyntheticBatch, page_dtype: torch.dtype, window: int | None = None) -> None:
    reference, backend = select_backend(CPU, "reference"), select_backend(CPU, name)
    expected = batch.attend(reference, batch.fill(reference, page_dtype), window)
    actual = batch.attend(backend, batch.fill(backend, page_dtype), window)
    assert actual.dtype == batch.queries.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[batch.queries.dtype])


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("page_dtype", QUANTIZED)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (80, 1), (128, 4), (256, 2), (40, 5), (8, 7)])
def test_attention_agrees_with_its_definition(name: str, page_dtype: torch.dtype, head_dim: int, group: int) -> None:
    batch = synthetic_batch(ROWS, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    assert_agrees(name, batch, page_dtype, window=100 if group == 4 else None)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("page_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_pages_of_any_size_and_queries_in_half_precision_serve(
    name: str, page_dtype: torch.dtype, dtype: torch.dtype, block_size: int
) -> None:
    rows = [(1, 1), (1, 70), (20, 45), (1, 300)]
    batch = synthetic_batch(rows, num_heads=4, num_kv_heads=2, head_dim=32, block_size=block_size, dtype=dtype)
    assert_agrees(name, batch, page_dtype)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 560)), min_size=1, max_size=4),
    head_dim=st.sampled_from([16, 24, 64]),
    group=st.integers(1, 8),
    window=st.none() | st.integers(1, 600),
    page_dtype=st.sampled_from(QUANTIZED),
)
def test_any_ragged_batch_agrees_with_the_definition(
    lengths: list[tuple[int, int]], head_dim: int, group: int, window: int | None, page_dtype: torch.dtype
) -> None:
    rows = [(query, query + before) for query, before in lengths]
    batch = synthetic_batch(rows, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    assert_agrees("cpu", batch, page_dtype, window)


@pytest.mark.parametrize("page_dtype", QUANTIZED)
def test_a_rows_bits_do_not_depend_on_its_neighbours_its_chunks_or_the_threads(page_dtype: torch.dtype) -> None:
    batch = synthetic_batch([(40, 900), (1, 333), (1, 1200), (17, 17)], num_heads=6, num_kv_heads=2, head_dim=64)
    backend = select_backend(CPU, "cpu")
    assert_rows_keep_their_bits(batch, batch.fill(backend, page_dtype), backend)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("page_dtype", QUANTIZED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_does_not_come_back_as_one_and_hurts_no_other_row(
    name: str, page_dtype: torch.dtype, bad: float
) -> None:
    batch = synthetic_batch([(1, 40), (1, 40)], num_heads=1, num_kv_heads=1, head_dim=32)
    batch.values[7, 0, 3] = bad
    backend = select_backend(CPU, name)
    output = batch.attend(backend, batch.fill(backend, page_dtype))
    assert not output[0].isfinite().any()
    assert output[1].isfinite().all()


@pytest.fixture(scope="module")
def smollm2() -> ModelExecutor:
    config = EngineConfig(dtype="float32", kv_cache_dtype="int8", cpu_kv_cache_gib=0.05)
    return ModelExecutor(config, resolve(config.model))


@pytest.fixture(scope="module")
def text() -> list[int]:
    files = resolve("smollm2-135m")
    return load_tokenizer(files).encode(" ".join(TEXT.read_text().split()))


def test_a_page_costs_a_quarter_of_float32_and_the_pool_has_as_many_more(smollm2: ModelExecutor) -> None:
    held = sum(tensor.nbytes for layer in smollm2.target.pages for tensor in layer.tensors())
    assert held == smollm2.pool_bytes
    shape = smollm2.model.config
    sizes = (shape.num_layers, 16, shape.num_kv_heads, shape.head_dim)
    page = page_bytes(*sizes, torch.int8)
    assert page == page_bytes(*sizes, torch.float8_e4m3fn)
    assert page < 0.26 * page_bytes(*sizes, torch.float32)
    assert page < 0.52 * page_bytes(*sizes, torch.bfloat16)
    assert smollm2.num_blocks == int(0.05 * 2**30) // page


def test_a_copied_page_takes_its_scales_along(smollm2: ModelExecutor) -> None:
    for layer in smollm2.target.pages:
        for tensor in layer.tensors():
            tensor[1].view(torch.uint8).random_(0, 100)
            tensor[2:4] = 0
    smollm2.copy_pages([(1, 3)])
    for layer in smollm2.target.pages:
        for tensor in layer.tensors():
            assert torch.equal(tensor[3], tensor[1])
            assert not tensor[2].any()


def perplexity(executor: ModelExecutor, token_ids: list[int], kv_dtype: torch.dtype) -> float:
    runner = RaggedRunner(executor.model, [token_ids], kv_dtype=kv_dtype)
    lost = 0.0
    for start in range(0, len(token_ids), 256):
        following = torch.tensor(token_ids[start + 1 : start + 257])
        logits = runner.step({0: min(256, len(token_ids) - start)})[0]
        lost += torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum").item()
    return math.exp(lost / (len(token_ids) - 1))


def test_the_perplexity_of_smollm2_stays_within_a_percent(smollm2: ModelExecutor, text: list[int]) -> None:
    assert len(text) > 1000
    exact = perplexity(smollm2, text, torch.float32)
    assert 15 < exact < 30, "the model reads this text"
    for kv_dtype in QUANTIZED:
        assert perplexity(smollm2, text, kv_dtype) == pytest.approx(exact, rel=0.01), kv_dtype


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_the_engine_answers_alike_alone_and_when_prefixes_are_shared_and_requests_preempted(
    text: list[int], kv_cache_dtype: str
) -> None:
    prompts = [text[:90] + text[start : start + 30] for start in range(100, 700, 100)]

    def answers(**options: object) -> tuple[list[RequestOutput], Engine]:
        engine = Engine("smollm2-135m", dtype="float32", kv_cache_dtype=kv_cache_dtype, **options)
        with engine:
            return engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)), engine

    alone, _ = answers(max_num_seqs=1, enable_prefix_caching=False)
    for options in ({}, {"swap_space": 0.05, "preemption_mode": "swap"}):
        crowded, engine = answers(num_gpu_blocks_override=20, max_num_batched_tokens=48, **options)
        assert [output.token_ids for output in crowded] == [output.token_ids for output in alone]
        assert engine.stats().num_preemptions > 0
        assert engine.stats().prefix_cache_hits > 0

"""The Triton kernels, run by Triton's interpreter on CPU, against the definition of paged attention.

Not collected by name: TRITON_INTERPRET must be set before triton is first imported, so test_triton_kernels.py runs this
file in a process of its own. By hand: `TRITON_INTERPRET=1 python -m pytest tests/triton_interpreter_cases.py`.
"""

from __future__ import annotations

import pytest
import torch

from ifb_kernels import triton_paged_attention
from ifb_kernels.backend import select_backend
from ifb_kernels.layout import LayerKV, RaggedLayout
from ifb_kernels.synthetic import SyntheticBatch, of_every_magnitude, synthetic_batch

CPU = torch.device("cpu")
TRITON, REFERENCE = select_backend(CPU, "triton"), select_backend(CPU, "reference")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# (query tokens, context tokens): decode rows and prefill chunks that start anywhere, around the borders of pages.
ROWS = [(1, 1), (1, 16), (7, 7), (1, 17), (16, 31), (3, 33), (1, 65), (37, 70)]


def assert_agrees(batch: SyntheticBatch, window: int | None = None) -> None:
    expected = batch.attend(REFERENCE, batch.fill(REFERENCE), window)
    actual = batch.attend(TRITON, batch.fill(TRITON), window)
    assert actual.dtype == batch.queries.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[batch.queries.dtype])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_decode_rows_and_prefill_chunks_share_a_launch_for_every_head_shape(head_dim: int, group: int) -> None:
    assert_agrees(synthetic_batch(ROWS, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize("group", [2, 4, 5, 6, 7])
def test_every_count_of_query_heads_to_a_key_head_is_packed(group: int) -> None:
    assert_agrees(synthetic_batch(ROWS, num_heads=group, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize("context", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("query", [1, 5])
def test_contexts_end_anywhere_around_the_borders_of_pages(context: int, query: int) -> None:
    rows = [(min(query, context), context), (1, 40)]
    assert_agrees(synthetic_batch(rows, num_heads=4, num_kv_heads=2, head_dim=32, seed=context))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_half_precision_pages_are_attended_with_float32_sums(dtype: torch.dtype, head_dim: int) -> None:
    assert_agrees(synthetic_batch(ROWS, num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("window", [1, 15, 16, 33, 1000])
@pytest.mark.parametrize("rows", [ROWS, [(1, 70), (1, 5), (1, 33)]], ids=["mixed", "decode"])
def test_attention_sees_no_further_back_than_the_window(window: int, rows: list[tuple[int, int]]) -> None:
    assert_agrees(synthetic_batch(rows, num_heads=4, num_kv_heads=2, head_dim=32), window)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [1, 9, 40])
def test_pages_before_the_window_may_be_somebody_elses(
    monkeypatch: pytest.MonkeyPatch, window: int, block_size: int
) -> None:
    monkeypatch.setattr(triton_paged_attention, "SPLIT_TOKENS", 64)
    batch = synthetic_batch(
        [(1, 150), (37, 70), (1, 33)], num_heads=2, num_kv_heads=1, head_dim=32, block_size=block_size
    )
    for page_dtype in (torch.float32, torch.int8):
        pages = batch.fill(TRITON, page_dtype)
        expected = batch.attend(TRITON, pages, window)
        batch.give_back(pages, window)
        assert torch.equal(batch.attend(TRITON, pages, window), expected)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_pages_of_any_size_serve(block_size: int) -> None:
    assert_agrees(synthetic_batch(ROWS, num_heads=2, num_kv_heads=1, head_dim=32, block_size=block_size))


@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize(
    "rows", [[(1, 64), (1, 65), (1, 300), (1, 1)], [(1, 257), (9, 200), (1, 128), (1, 40)]], ids=["decode", "mixed"]
)
def test_long_decode_rows_are_split_and_merged(
    monkeypatch: pytest.MonkeyPatch, window: int | None, rows: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(triton_paged_attention, "SPLIT_TOKENS", 64)
    assert_agrees(synthetic_batch(rows, num_heads=3, num_kv_heads=1, head_dim=32), window)


def test_a_rows_bits_do_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged_attention, "SPLIT_TOKENS", 64)
    batch = synthetic_batch([(1, 150), (1, 40), (1, 300)], num_heads=3, num_kv_heads=1, head_dim=32)
    pages = batch.fill(TRITON)
    together = batch.attend(TRITON, pages)
    for row in range(3):
        context_len = batch.step.context_lens[row : row + 1]
        alone = RaggedLayout(
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=context_len,
            block_tables=batch.step.block_tables[row : row + 1],
            slot_mapping=batch.step.slot_mapping[row : row + 1],
            max_query_len=1,
            max_context_len=int(context_len),
        )
        output = TRITON.attend(batch.queries[row : row + 1], pages, alone, 32**-0.5)
        assert torch.equal(output, together[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.float16])
def test_tokens_lie_where_the_slots_say(dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    batch = synthetic_batch(ROWS, num_heads=3, num_kv_heads=3, head_dim=20, dtype=dtype)
    written, expected = batch.fill(TRITON, page_dtype), batch.fill(REFERENCE, page_dtype)
    for actual, wanted in zip(written.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(actual.transpose(1, 2), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_pages_hold_the_codes_of_the_definition(page_dtype: torch.dtype, dtype: torch.dtype) -> None:
    batch = of_every_magnitude(20, dtype)
    pages, expected = batch.fill(TRITON, page_dtype), batch.fill(REFERENCE, page_dtype)
    for actual, wanted in zip(pages.tensors(), expected.tensors(), strict=True):
        assert torch.equal(actual.transpose(1, 2).contiguous().view(torch.uint8), wanted.view(torch.uint8))


def assert_attends_quantized(batch: SyntheticBatch, page_dtype: torch.dtype, window: int | None = None) -> None:
    expected_pages = batch.fill(REFERENCE, page_dtype)
    # Written by the definition: the interpreter takes seconds for it.
    pages = LayerKV(*(tensor.transpose(1, 2).contiguous() for tensor in expected_pages.tensors()))
    actual, expected = batch.attend(TRITON, pages, window), batch.attend(REFERENCE, expected_pages, window)
    assert actual.dtype == batch.queries.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[actual.dtype])


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (20, 8)])
def test_quantized_pages_are_attended(page_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, group: int) -> None:
    batch = synthetic_batch(ROWS, num_heads=group, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    assert_attends_quantized(batch, page_dtype)


@pytest.mark.parametrize("page_dtype", [torch.int8, torch.float8_e4m3fn])
def test_long_decode_rows_over_quantized_pages_are_split_and_merged(
    monkeypatch: pytest.MonkeyPatch, page_dtype: torch.dtype
) -> None:
    monkeypatch.setattr(triton_paged_attention, "SPLIT_TOKENS", 64)
    batch = synthetic_batch([(1, 257), (9, 200), (1, 128)], num_heads=3, num_kv_heads=1, head_dim=32)
    assert_attends_quantized(batch, page_dtype, window=100)


def test_keys_values_and_queries_may_be_views_of_a_fused_projection() -> None:
    batch = synthetic_batch(ROWS, num_heads=4, num_kv_heads=2, head_dim=32)
    expected_pages = batch.fill(TRITON)
    expected = batch.attend(TRITON, expected_pages)
    fused = torch.full((batch.keys.shape[0], 8 * 32), float("nan"))
    queries, keys, values = (fused[:, a * 32 : b * 32].view(-1, b - a, 32) for a, b in ((0, 4), (4, 6), (6, 8)))
    keys.copy_(batch.keys)
    values.copy_(batch.values)
    queries[: len(batch.queries)].copy_(batch.queries)
    pages = LayerKV(torch.zeros_like(expected_pages.keys), torch.zeros_like(expected_pages.values))
    TRITON.write(keys, values, pages, batch.history)
    actual = TRITON.attend(queries[: len(batch.queries)], pages, batch.step, 32**-0.5)
    assert torch.equal(actual, expected)

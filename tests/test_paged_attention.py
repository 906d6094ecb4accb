"""Paged attention on CPU (the native kernel and its plain torch stand-in) against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_bits import threads

from ifb_kernels.backend import AttentionBackend, select_backend
from ifb_kernels.layout import LayerKV, RaggedLayout
from ifb_kernels.synthetic import SyntheticBatch, synthetic_batch

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# (query tokens, context tokens): decode rows and prefill chunks, around the borders of pages, of the kernel's spans of
# 256 keys and of its tiles of rows.
ROWS = [(1, 1), (1, 16), (7, 7), (1, 17), (16, 31), (3, 33), (1, 255), (5, 256), (2, 257), (1, 530), (37, 300)]


def backend_named(name: str) -> AttentionBackend:
    return select_backend(CPU, name)


def assert_agrees(name: str, batch: SyntheticBatch, window: int | None = None) -> None:
    reference, backend = backend_named("reference"), backend_named(name)
    expected = batch.attend(reference, batch.fill(reference), window)
    actual = batch.attend(backend, batch.fill(backend), window)
    assert actual.dtype == batch.queries.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[batch.queries.dtype])


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 3), (80, 1), (96, 8), (128, 4), (256, 2), (40, 5), (8, 7), (64, 6)]
)
def test_attention_agrees_with_its_definition_for_every_head_shape(name: str, head_dim: int, group: int) -> None:
    assert_agrees(name, synthetic_batch(ROWS, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("window", [1, 15, 16, 100, 256, 1000])
def test_attention_sees_no_further_back_than_the_window(name: str, window: int) -> None:
    assert_agrees(name, synthetic_batch(ROWS, num_heads=4, num_kv_heads=2, head_dim=32), window)


@pytest.mark.parametrize("name", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("window", [1, 9, 40, 300])
def test_pages_before_the_window_may_be_somebody_elses(
    name: str, page_dtype: torch.dtype, block_size: int, window: int
) -> None:
    rows = [(1, 530), (37, 300), (1, 33), (5, 5)]
    batch = synthetic_batch(rows, num_heads=6, num_kv_heads=2, head_dim=32, block_size=block_size)
    backend = backend_named(name)
    pages = batch.fill(backend, page_dtype)
    expected = batch.attend(backend, pages, window)
    batch.give_back(pages, window)
    assert torch.equal(batch.attend(backend, pages, window), expected)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_half_precision_pages_are_attended_in_float32(name: str, dtype: torch.dtype, head_dim: int) -> None:
    assert_agrees(name, synthetic_batch(ROWS, num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("block_size", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_any_size_serve(name: str, block_size: int, dtype: torch.dtype) -> None:
    rows = [(1, 1), (1, 70), (20, 45), (1, 300)]
    batch = synthetic_batch(rows, num_heads=4, num_kv_heads=2, head_dim=32, block_size=block_size, dtype=dtype)
    assert_agrees(name, batch)


def test_pages_may_be_narrower_than_queries() -> None:
    batch = synthetic_batch(ROWS, num_heads=6, num_kv_heads=2, head_dim=64)
    reference, backend = backend_named("reference"), backend_named("cpu")
    expected = batch.attend(reference, batch.fill(reference, torch.bfloat16))
    actual = batch.attend(backend, batch.fill(backend, torch.bfloat16))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 560)), min_size=1, max_size=5),
    head_dim=st.sampled_from([16, 24, 64, 80]),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    window=st.none() | st.integers(1, 600),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch_agrees_with_the_definition(
    lengths: list[tuple[int, int]], head_dim: int, group: int, num_kv_heads: int, window: int | None, seed: int
) -> None:
    rows = [(query, query + before) for query, before in lengths]
    batch = synthetic_batch(
        rows, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, seed=seed
    )
    assert_agrees("cpu", batch, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 200])
def test_a_rows_bits_do_not_depend_on_its_neighbours_its_chunks_or_the_threads(
    dtype: torch.dtype, window: int | None
) -> None:
    rows = [(40, 900), (1, 333), (1, 1200), (17, 17)]
    batch = synthetic_batch(rows, num_heads=6, num_kv_heads=2, head_dim=64, dtype=dtype)
    backend = backend_named("cpu")
    pages = batch.fill(backend)
    assert_rows_keep_their_bits(batch, pages, backend, window)


def assert_rows_keep_their_bits(
    batch: SyntheticBatch, pages: LayerKV, backend: AttentionBackend, window: int | None = None
) -> None:
    """Each row alone, in chunks of any size, at any number of threads, is as in the whole batch."""
    together = batch.attend(backend, pages, window)
    for count in (1, 2, 5):
        with threads(count):
            assert torch.equal(batch.attend(backend, pages, window), together)
            for row, chunk in ((0, 1), (0, 7), (0, 40), (1, 1), (2, 1), (3, 4)):
                alone = attend_in_chunks(batch, row, chunk, pages, backend, window)
                start, end = batch.step.query_starts[row : row + 2].tolist()
                assert torch.equal(alone, together[start:end]), f"row {row} in chunks of {chunk}, {count} threads"


def attend_in_chunks(
    batch: SyntheticBatch, row: int, chunk: int, pages: LayerKV, backend: AttentionBackend, window: int | None
) -> torch.Tensor:
    """The queries of one row alone, `chunk` of them a call."""
    start, end = batch.step.query_starts[row : row + 2].tolist()
    outputs = []
    for first in range(start, end, chunk):
        last = min(first + chunk, end)
        context_len = int(batch.step.context_lens[row]) - (end - last)
        layout = RaggedLayout(
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
            context_lens=torch.tensor([context_len], dtype=torch.int32),
            block_tables=batch.step.block_tables[row : row + 1],
            slot_mapping=batch.step.slot_mapping[first:last],
            max_query_len=last - first,
            max_context_len=context_len,
        )
        outputs.append(backend.attend(batch.queries[first:last], pages, layout, 64**-0.5, window))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_queries_and_tables_may_be_views_of_larger_tensors(name: str) -> None:
    batch = synthetic_batch(ROWS, num_heads=6, num_kv_heads=2, head_dim=64)
    backend = backend_named(name)
    pages = batch.fill(backend)
    expected = batch.attend(backend, pages)
    fused = torch.full((batch.queries.shape[0], 10 * 64), float("nan"))
    view = fused[:, : 6 * 64].view(-1, 6, 64)
    view.copy_(batch.queries)
    wide_tables = torch.nn.functional.pad(batch.step.block_tables, (0, 9))[:, :-9]
    layout = RaggedLayout(**{**vars(batch.step), "block_tables": wide_tables})
    torch.testing.assert_close(backend.attend(view, pages, layout, 64**-0.5), expected, rtol=0, atol=0)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'fast' is not one of triton, cpu, torch, reference"):
        select_backend(CPU, "fast")


def test_the_cpu_backend_refuses_pages_it_cannot_hold() -> None:
    backend = backend_named("cpu")
    with pytest.raises(ValueError, match=r"dtype: torch\.int16 pages are not supported"):
        backend.allocate(1, 4, 16, 1, 64, torch.int16, CPU)
    with pytest.raises(ValueError, match="device: the cpu attention backend"):
        backend.allocate(1, 4, 16, 1, 64, torch.float32, torch.device("meta"))

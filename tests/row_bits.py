"""The promise of every kernel that takes rows: a row's numbers are its own business."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch, and the kernels with it, run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_rows_keep_their_bits(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """`product` of any of the 64 rows of `x` [64, N] is the same, whoever is beside them, on any number of threads."""
    whole = product(x)
    for count in (1, 2, 3, 11):
        with threads(count):
            for first, last in ((0, 64), (0, 1), (5, 6), (5, 7), (3, 6), (3, 7), (3, 8), (3, 40), (63, 64)):
                assert torch.equal(product(x[first:last]), whole[first:last]), f"rows {first} to {last}"

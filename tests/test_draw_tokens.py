"""The native draw against the sampler in plain torch, which `test_sampler.py` holds against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_filters import FILTERS

from ifb_handler.engine.sampler import INVALID_TOKEN, Sampler
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no native library")

NUMBERS = np.random.default_rng(0).random(500)


def draws(row: torch.Tensor, params: dict[str, float], uniforms: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """-> what the native kernel draws from the logits `row` for each of the uniforms, and what plain torch does"""
    sampler = Sampler(1)
    sampler.state.set(0, SamplingParams(**params), 1)
    logits, count = row.expand(len(uniforms), -1).contiguous(), len(uniforms)
    found, expected = (torch.full((count,), int(row.argmax())) for _ in range(2))
    rows, slots = np.arange(count), np.zeros(count, dtype=np.int64)
    assert sampler._draw_natively(found, logits, rows, slots, uniforms)
    sampler._draw_all(expected, logits, rows, slots, uniforms)
    return found, expected


@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_number_draws_the_same_token(params: dict[str, float], spread: float) -> None:
    row = torch.randn(5000) * spread
    found, expected = draws(row, params, NUMBERS[:400])
    # The last bits of a weight differ: a number that falls between two tokens may go to either.
    assert (found != expected).sum() <= 2


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 64, 65, 1000])
def test_the_least_and_the_greatest_number_draw_tokens_that_are_kept(params: dict[str, float], size: int) -> None:
    row = torch.randn(size) * 4
    row[size // 2] = -torch.inf if size > 1 else 0.0
    found, expected = draws(row, params, np.array([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]))
    assert found[0] == expected[0]
    assert torch.isfinite(row[found]).all()
    # The very least likely tokens weigh nothing to the one or to the other: so much or more must have been kept.
    assert row[found].min() >= row[expected].min() - 1e-3


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_equally_likely_tokens_are_kept_and_drawn_alike(params: dict[str, float]) -> None:
    for row in (torch.zeros(1000), (torch.randn(1000) * 2).round() / 2):
        found, expected = draws(row, params, NUMBERS[:500])
        assert (found != expected).sum() <= 2


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_where_only_few_tokens_are_possible_no_other_is_drawn(params: dict[str, float]) -> None:
    row = torch.full((5000,), -torch.inf)
    row[[3, 77, 4000]] = torch.tensor([1.0, 1.0, 0.9])
    found, expected = draws(row, params, NUMBERS[:100])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e4, 1e30])
def test_logits_of_any_size_are_taken(scale: float) -> None:
    for params in FILTERS:
        found, expected = draws(torch.randn(300) * scale, params, NUMBERS[:50])
        assert (found != expected).sum() <= 1


def test_a_row_draws_the_same_among_any_neighbours_and_rows_that_cannot_be_sampled_are_left() -> None:
    logits = torch.randn(40, 3000) * 3
    logits[7, 5] = torch.nan
    logits[8] = -torch.inf
    sampler = Sampler(40)
    for slot in range(40):
        sampler.state.set(slot, SamplingParams(**FILTERS[slot % len(FILTERS)]), slot)
    together = sampler.sample(logits, range(40), range(40))
    alone = torch.cat([sampler.sample(logits[i : i + 1], [i], [i]) for i in range(40)])
    assert torch.equal(together, alone)
    assert (together == INVALID_TOKEN).nonzero().flatten().tolist() == [7, 8]


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(6, 200)
    sampler = Sampler(1)
    sampler.state.set(0, SamplingParams(top_p=0.9), 5)
    slots, positions = np.zeros(6, dtype=int), np.arange(6)
    expected = sampler.sample(wide[:, 50:120].contiguous(), slots, positions)
    assert torch.equal(sampler.sample(wide[:, 50:120], slots, positions), expected)

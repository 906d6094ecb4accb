"""The sampler against transformers' logits warpers, exact distributions, and itself in other batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_filters import FILTERS
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ifb_handler.engine.sampler import INVALID_TOKEN, Sampler, _invert, _mix, kept_weights, uniform
from ifb_handler.engine.sampling_params import SamplingParams

# Beyond both candidate widths of the sampler, so that every way through it is taken.
VOCAB_SIZE = 5000


def _sampler(*params: SamplingParams, eos: tuple[int, ...] = (), seed: int = 1000) -> Sampler:
    sampler = Sampler(max(64, len(params)), eos)
    for slot, one in enumerate(params):
        sampler.state.set(slot, one, seed + slot)
    return sampler


def _logits(rows: int, vocab_size: int = VOCAB_SIZE, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def _probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    sampler = _sampler(*[params] * len(logits))
    result = torch.full(logits.shape, torch.nan, dtype=torch.float64)
    for rows, ids, weights in kept_weights(logits, sampler.state, np.arange(len(logits))):
        probs = weights.double() / weights.sum(-1, keepdim=True)
        if ids is None:
            result[rows] = probs
        else:
            result[rows] = torch.zeros(len(rows), logits.shape[1], dtype=torch.float64).scatter_(1, ids, probs)
    return result


def _oracle(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits.double()).softmax(-1)


@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_what_is_kept_and_how_likely_it_is_agrees_with_transformers(params: dict, spread: float) -> None:
    logits, params = _logits(12, spread=spread), SamplingParams(**params)
    found, expected = _probabilities(logits, params), _oracle(logits, params)
    # A weight counts in units of 2**-60: less likely tokens are as good as dropped.
    assert (found[expected > 1e-17] > 0).all()
    assert (found[expected == 0] == 0).all()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_tokens_as_likely_as_the_kth_stay_as_in_transformers() -> None:
    logits = (_logits(8) * 2).round() / 2
    for top_k in (3, 200, 300, 4500):
        params = SamplingParams(top_k=top_k)
        torch.testing.assert_close(_probabilities(logits, params), _oracle(logits, params), atol=1e-6, rtol=0)


def test_top_p_takes_equally_likely_tokens_in_the_order_of_their_ids() -> None:
    probs = _probabilities(torch.zeros(2, VOCAB_SIZE), SamplingParams(top_p=0.5))
    assert (probs > 0).sum(-1).tolist() == [2500, 2500]
    assert (probs[:, :2500] > 0).all()


def test_an_all_greedy_batch_is_argmax() -> None:
    logits = _logits(32)
    sampler = _sampler(*[SamplingParams(temperature=0.0)] * 32)
    assert torch.equal(sampler.sample(logits, range(32), [0] * 32), logits.argmax(-1))


def _mixed_params(count: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 2.0, "top_p": 0.99},
        {"temperature": 0.7, "top_k": 300, "top_p": 0.9, "min_p": 0.01},
    ]
    return [SamplingParams(**kinds[i % len(kinds)]) for i in range(count)]


def test_greedy_rows_of_a_mixed_batch_are_argmax() -> None:
    logits = _logits(64)
    chosen = _sampler(*_mixed_params(64)).sample(logits, range(64), range(64))
    assert torch.equal(chosen[::7], logits.argmax(-1)[::7])


def test_a_row_draws_the_same_token_alone_and_among_any_neighbours() -> None:
    logits, positions = _logits(64), np.arange(64) * 3
    sampler = _sampler(*_mixed_params(64))
    together = sampler.sample(logits, np.arange(64), positions)
    alone = torch.cat([sampler.sample(logits[i : i + 1], [i], positions[i : i + 1]) for i in range(64)])
    assert torch.equal(together, alone)
    order = np.random.default_rng(0).permutation(64)[:37]
    assert torch.equal(sampler.sample(logits[order], order, positions[order]), together[order])


def test_a_draw_depends_on_seed_and_position_only_not_on_the_slot_or_what_it_held() -> None:
    logits, params = _logits(1).expand(40, -1), SamplingParams(top_k=1000)
    sampler = Sampler(8, eos_token_ids=(1,))
    sampler.state.set(5, SamplingParams(min_tokens=9, max_tokens=9, stop_token_ids=[3, 4], min_p=0.5), 1)
    sampler.state.set(5, params, 77)
    sampler.state.set(2, params, 77)
    sampler.state.set(3, params, 78)
    first, second, other = (sampler.sample(logits, [slot] * 40, range(40)) for slot in (5, 2, 3))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert len(set(first.tolist())) > 10


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.3}, {"temperature": 1.2, "top_k": 12, "top_p": 0.97}, {"min_p": 0.02}],
    ids=str,
)
def test_seeded_draws_follow_the_exact_distribution(params: dict) -> None:
    draws, params = 20_000, SamplingParams(**params)
    logits = _logits(1, vocab_size=40, spread=1.5)
    sampler = Sampler(1)
    sampler.state.set(0, params, 12345)
    chosen = sampler.sample(logits.expand(draws, -1), np.zeros(draws, int), np.arange(draws))
    expected = _oracle(logits, params)[0]
    counts = torch.bincount(chosen, minlength=40).double()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0] * draws
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 1e-3


def test_many_seeds_give_independent_uniform_first_numbers() -> None:
    numbers = uniform(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.int64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(numbers[lag:], numbers[:-lag])[0, 1]) < 0.03


def test_the_hash_is_splitmix64() -> None:
    golden = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    with np.errstate(over="ignore"):
        # The generator's first outputs from state 0, as published with it.
        assert _mix(golden)[0] == 0xE220A8397B1DCDAF
        assert _mix(golden * np.uint64(2))[0] == 0x6E789E6AA1B965F4


def test_every_seed_up_to_2_to_the_64_is_taken() -> None:
    numbers = uniform(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64), np.array([0, 1, 2]))
    assert ((numbers >= 0) & (numbers < 1)).all()
    sampler = Sampler(1)
    sampler.state.set(0, SamplingParams(), 2**64 - 1)
    assert 0 <= sampler.sample(_logits(1), [0], [0]).item() < VOCAB_SIZE


def test_a_token_of_no_weight_is_never_drawn_at_either_end() -> None:
    weights = torch.tensor([[0, 0, 5, 0, 7, 0, 0], [0, 1, 0, 0, 0, 0, 0], [2**60, 0, 0, 0, 0, 0, 0]])
    least, most = torch.zeros(3, dtype=torch.float64), torch.full((3,), 1 - 2.0**-53, dtype=torch.float64)
    assert _invert(weights, least).tolist() == [2, 1, 0]
    assert _invert(weights, most).tolist() == [4, 1, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-5, 1e-4])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = _logits(20, spread=30.0)
    logits[0, :100] = 1e30
    logits[0, 7] = 2e30
    sampler = _sampler(*[SamplingParams(temperature=temperature, top_k=k, top_p=0.9) for k in (0, 50)] * 10)
    assert torch.equal(sampler.sample(logits, range(20), range(20)), logits.argmax(-1))


@pytest.mark.parametrize("params", [{}, {"top_k": 300}, {"top_p": 0.9}, {"top_p": 0.99999, "min_p": 0.001}], ids=str)
def test_a_token_at_minus_infinity_is_never_drawn(params: dict) -> None:
    logits = torch.full((64, VOCAB_SIZE), -torch.inf)
    logits[:, [3, 4000]] = torch.tensor([1.0, 1.5])
    chosen = _sampler(*[SamplingParams(**params)] * 64).sample(logits, range(64), range(64))
    assert set(chosen.tolist()) == {3, 4000}


def test_a_row_that_can_not_be_sampled_is_marked_and_the_others_are_as_ever() -> None:
    logits = _logits(42)
    params = _mixed_params(42)
    good = _sampler(*params).sample(logits, range(42), range(42)).clone()
    bad = logits.clone()
    bad[7:14, 11] = torch.nan
    bad[21:28] = -torch.inf
    bad[35:42, 2] = torch.inf
    good[7:14] = good[21:28] = good[35:42] = INVALID_TOKEN
    assert torch.equal(_sampler(*params).sample(bad, range(42), range(42)), good)


def test_no_stop_token_is_drawn_before_min_tokens() -> None:
    logits = torch.full((6, 50), -20.0)
    logits[:, [1, 2, 9, 30]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    greedy = {"temperature": 0.0, "min_tokens": 4}
    sampler = _sampler(
        SamplingParams(**greedy),
        SamplingParams(**greedy, stop_token_ids=[9, 4711]),
        SamplingParams(**greedy, stop_token_ids=[1, 9], ignore_eos=True),
        SamplingParams(temperature=0.0),
        SamplingParams(min_tokens=4, top_k=2),
        SamplingParams(**greedy, stop_token_ids=[9, 30]),
        eos=(1, 2),
    )
    before, after = (sampler.sample(logits.clone(), range(6), [position] * 6).tolist() for position in (3, 4))
    assert before[:4] == [9, 30, 2, 1]
    assert before[4] in (9, 30)
    assert before[5] not in (1, 2, 9, 30)
    assert after[:4] == [1, 1, 1, 1]
    assert after[5] == 1


def test_a_request_that_may_draw_nothing_but_stop_tokens_is_marked() -> None:
    sampler = _sampler(SamplingParams(min_tokens=1), SamplingParams(), eos=(0, 1))
    chosen = sampler.sample(torch.zeros(2, 2), [0, 1], [0, 0]).tolist()
    assert chosen[0] == INVALID_TOKEN
    assert chosen[1] in (0, 1)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 4096])
def test_any_size_of_vocabulary_is_taken(vocab_size: int) -> None:
    logits, params = _logits(14, vocab_size), _mixed_params(14)
    chosen = _sampler(*params).sample(logits, range(14), range(14))
    assert ((chosen >= 0) & (chosen < vocab_size)).all()
    for one in params[1:7]:
        torch.testing.assert_close(_probabilities(logits, one), _oracle(logits, one), atol=1e-6, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_tokens() -> None:
    logits, sampler = _logits(64), _sampler(*_mixed_params(64))
    chosen = sampler.sample(logits, range(64), range(64))
    assert torch.equal(sampler.sample(logits.cuda(), range(64), range(64)).cpu(), chosen)

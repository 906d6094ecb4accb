"""What requests ask to have changed in their logits, against transformers' logits processors, alone and combined."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import write_tokenizer
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ifb_handler.engine.bad_words import tokenize
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.sampler import INVALID_TOKEN, Sampler, kept_weights
from ifb_handler.engine.sampling_params import MAX_BAD_WORD_LENGTH, SamplingParams

VOCAB_SIZE = 300
EOS = (7, 8)


def logits_of(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@dataclass
class Case:
    """A request somewhere in its answer, and its row as it comes from the model."""

    params: SamplingParams
    tokens: array
    num_prompt_tokens: int
    logits: torch.Tensor

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


def oracle(case: Case) -> torch.Tensor:
    """The edited row, float64 [V], by transformers' processors in the order in which `generate` applies them."""
    params, generated = case.params, case.tokens[case.num_prompt_tokens :]
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    if params.min_tokens:
        stops = [*params.stop_token_ids, *EOS]
        processors.append(MinNewTokensLengthLogitsProcessor(case.num_prompt_tokens, params.min_tokens, stops))
    scores = processors(torch.tensor([case.tokens.tolist()]), case.logits.double()[None])
    if params.bad_words:  # in the answer only, as in vLLM
        ids = torch.tensor([generated.tolist()], dtype=torch.int64)
        scores = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, scores)
    counts = torch.bincount(torch.tensor(generated.tolist(), dtype=torch.int64), minlength=VOCAB_SIZE)
    return (scores - counts * params.frequency_penalty - (counts > 0).double() * params.presence_penalty)[0]


def edited(cases: list[Case]) -> tuple[torch.Tensor, torch.Tensor, Sampler]:
    """-> (logits as edited [S, V], chosen [S], the sampler), of one batch."""
    sampler = Sampler(len(cases), EOS)
    for slot, case in enumerate(cases):
        sampler.state.set(slot, case.params, slot, case.tokens, case.num_prompt_tokens)
    logits = torch.stack([case.logits for case in cases])
    chosen = sampler.sample(logits, range(len(cases)), [case.num_generated for case in cases])
    return logits, chosen, sampler


EACH: list[dict[str, Any]] = [
    {"logit_bias": {5: 100, 6: -100, 299: 1.5, 0: -0.25}},
    {"logit_bias": {"5": 3, "17": -3}},
    {"allowed_token_ids": [3, 100, 299, 3]},
    {"allowed_token_ids": range(200)},
    {"min_tokens": 10, "stop_token_ids": [20, 21]},
    {"bad_words": [[5], [6], [299]]},
    {"bad_words": [[1, 2], [2, 1], [1, 1, 2], [0, 1, 2, 1], [3]]},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2},
    {
        "logit_bias": {1: 9, 2: 9.5, 7: 50, 4: -3},
        "allowed_token_ids": range(60),
        "min_tokens": 10,
        "stop_token_ids": [20],
        "bad_words": [[1, 2], [2, 2], [5]],
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
    },
]


def case_of(settings: dict[str, Any], seed: int, **more: Any) -> Case:
    source = random.Random(seed)
    settings = {**settings, **more, "max_tokens": 50}
    if "allowed_token_ids" in settings:
        settings["allowed_token_ids"] = list(settings["allowed_token_ids"])
    tokens = array("q", (source.randrange(4) for _ in range(30)))
    return Case(SamplingParams(**settings), tokens, source.randint(1, 30), logits_of(1, seed=seed)[0])


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_each_edit_alone_and_all_together_agree_with_transformers(settings: dict) -> None:
    cases = [case_of(settings, seed, temperature=0.0) for seed in range(12)]
    logits, chosen, _ = edited(cases)
    for row, case in enumerate(cases):
        torch.testing.assert_close(logits[row].double(), oracle(case), atol=1e-5, rtol=1e-6)
        assert chosen[row] == oracle(case).argmax()


def test_in_one_batch_every_row_is_edited_as_alone_and_plain_neighbours_do_not_change_by_a_bit() -> None:
    kinds = [{}, {"temperature": 0.0}, *EACH]
    cases = [case_of(kinds[i % len(kinds)], seed=i) for i in range(4 * len(kinds))]
    logits, chosen, _ = edited(cases)
    for row, case in enumerate(cases):
        if row % len(kinds) < 2:
            assert torch.equal(logits[row], case.logits)
        sampler = Sampler(1, EOS)
        sampler.state.set(0, case.params, row, case.tokens, case.num_prompt_tokens)
        alone = case.logits[None].clone()
        assert sampler.sample(alone, [0], [case.num_generated]).item() == chosen[row]
        assert torch.equal(alone[0], logits[row])


def test_greedy_output_does_not_depend_on_who_else_is_in_the_batch() -> None:
    greedy = [case_of({"temperature": 0.0}, seed=i) for i in range(8)]
    others = [case_of(settings, seed=50 + i) for i, settings in enumerate(EACH)]
    _, chosen, _ = edited([*greedy, *others])
    assert chosen[:8].tolist() == [case.logits.argmax().item() for case in greedy]


def test_a_slot_keeps_nothing_of_its_last_holder() -> None:
    sampler = Sampler(1, EOS)
    for settings in EACH:
        case = case_of(settings, seed=0)
        sampler.state.set(0, case.params, 0, case.tokens, case.num_prompt_tokens)
        sampler.sample(case.logits[None].clone(), [0], [0])
    sampler.state.set(0, SamplingParams(), 0, array("q", [1, 1, 1]), 1)
    logits = logits_of(1)
    sampler.sample(logits, [0], [2])
    assert torch.equal(logits, logits_of(1))


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 1.3}, {"temperature": 1.2, "top_k": 12, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize(
    "edits",
    [
        {"logit_bias": {5: 4, 6: -100, 17: 2.5}, "bad_words": [[9]]},
        {"allowed_token_ids": range(40), "presence_penalty": 0.8, "frequency_penalty": 0.1},
        {"logit_bias": {1: 3, 2: 2.5, 7: 5, 4: -3}, "repetition_penalty": 1.2, "min_tokens": 10, "bad_words": [[3, 3]]},
    ],
    ids=str,
)
def test_seeded_draws_under_edits_and_filters_follow_the_exact_distribution(edits: dict, filters: dict) -> None:
    draws = 20_000
    case = case_of(edits, seed=3, **filters)
    params = case.params
    sampler = Sampler(1, EOS)
    sampler.state.set(0, params, 777, case.tokens, case.num_prompt_tokens)
    # The draw's number differs from row to row, the context does not: positions only feed the hash and min_tokens.
    logits = case.logits.repeat(draws, 1)
    positions = np.arange(draws) + 10
    chosen = sampler.sample(logits, np.zeros(draws, int), positions)
    case.params = SamplingParams(**{**vars(params), "min_tokens": 0})
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(None, oracle(case)[None]).softmax(-1)[0]
    counts = torch.bincount(chosen, minlength=VOCAB_SIZE).double()
    assert counts[expected == 0].sum() == 0
    # Rare tokens together, so that each class is expected five times at least.
    rare = expected * draws < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]) * draws
    keep = expected > 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = torch.tensor((keep.sum().item() - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 1e-3


def mask_of(allowed: torch.Tensor) -> torch.Tensor:
    """bool [M, V] as bits: int32 [M, ceil(V / 32)]."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("vocab_size", [32, 89, 256, 300])
def test_a_bit_mask_forbids_what_it_does_not_name_in_its_rows_and_in_no_other(vocab_size: int) -> None:
    logits = logits_of(9, vocab_size)
    allowed = torch.rand(9, vocab_size, generator=torch.Generator().manual_seed(1)) < 0.3
    sampler = Sampler(9)
    for rows in ([0], [8, 2, 3], list(range(9)), list(range(8, -1, -1))):
        result = logits.clone()
        sampler.sample(result, range(9), [0] * 9, (np.array(rows), mask_of(allowed[rows])))
        right = logits.clone()
        right[rows] = right[rows].masked_fill(~allowed[rows], -torch.inf)
        assert torch.equal(result, right)


def test_a_constrained_request_never_draws_a_forbidden_token_whatever_its_other_settings() -> None:
    cases = [case_of(EACH[i % len(EACH)], seed=i) for i in range(40)]
    allowed = torch.rand(40, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) < 0.5
    sampler = Sampler(40, EOS)
    for slot, case in enumerate(cases):
        sampler.state.set(slot, case.params, slot, case.tokens, case.num_prompt_tokens)
    logits = torch.stack([case.logits for case in cases])
    chosen = sampler.sample(logits, range(40), [0] * 40, (np.arange(40), mask_of(allowed)))
    drawn = chosen != INVALID_TOKEN
    assert drawn.sum() > 30
    assert allowed[torch.arange(40)[drawn], chosen[drawn]].all()


def test_a_request_left_with_no_token_is_marked_and_its_neighbours_go_on() -> None:
    none = case_of({"allowed_token_ids": [5], "bad_words": [[5]]}, seed=0)
    plain = case_of({"temperature": 0.0}, seed=1)
    _, chosen, _ = edited([plain, none, plain])
    assert chosen.tolist() == [plain.logits.argmax(), INVALID_TOKEN, plain.logits.argmax()]


def test_ids_outside_the_vocabulary_hurt_nobody() -> None:
    cases = [
        case_of({"logit_bias": {10**12: 5, VOCAB_SIZE: 5, 3: 100}, "temperature": 0.0}, seed=0),
        case_of({"allowed_token_ids": [10**12, 4], "temperature": 0.0}, seed=1),
        case_of({"bad_words": [[10**12], [VOCAB_SIZE]], "temperature": 0.0}, seed=2),
    ]
    _, chosen, _ = edited(cases)
    assert chosen.tolist() == [3, 4, cases[2].logits.argmax()]


def test_a_bad_word_is_found_with_and_without_a_space_before_it_and_over_several_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert tokenize(["page", " page", [5, 6]], tokenizer) == (ids("page"), ids(" page"), (5, 6))
    assert len(ids("zebra")) > 1
    sampler = Sampler(1)
    sampler.state.set(0, SamplingParams(bad_words=tokenize(["zebra"], tokenizer)), 0, array("q", (0, *ids("zebr"))), 1)
    logits = torch.zeros(1, len(tokenizer))
    sampler.sample(logits, [0], [0])
    assert (logits == -torch.inf).nonzero().tolist() == [[0, ids("zebra")[-1]]]


def test_a_bad_word_begun_in_the_prompt_may_be_ended() -> None:
    for num_prompt_tokens, forbidden in ((3, False), (2, False), (1, True)):
        case = case_of({"bad_words": [[11, 12, 13]], "logit_bias": {13: 100}, "temperature": 0.0}, seed=0)
        case.tokens, case.num_prompt_tokens = array("q", [10, 11, 12]), num_prompt_tokens
        _, chosen, _ = edited([case])
        assert (chosen.item() != 13) == forbidden


def test_a_bad_word_that_makes_no_tokens_or_has_no_tokenizer_is_refused() -> None:
    class Silent:
        def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
            return {"input_ids": [[] for _ in texts]}

    for tokenizer, message in ((Silent(), "bad_words: 'x' makes no tokens"), (None, "bad_words: this engine has no")):
        with pytest.raises(RequestError, match=message) as refused:
            tokenize(["x"], tokenizer)
        assert refused.value.param == "bad_words"


def test_a_bad_word_that_makes_too_many_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=r"bad_words: .* makes more than 256 tokens") as refused:
        tokenize(["\U0001f9a5" * MAX_BAD_WORD_LENGTH], tokenizer)
    assert refused.value.param == "bad_words"


def test_penalised_probabilities_are_what_the_filters_see() -> None:
    case = case_of({"allowed_token_ids": [1, 2, 3], "top_p": 0.999, "logit_bias": {1: 20}}, seed=0)
    logits, _, sampler = edited([case])
    ((_, ids, weights),) = kept_weights(logits, sampler.state, np.array([0]))
    assert ids[0, weights[0] > 0].tolist() == [1]

"""A request's settings: defaults, ranges, and errors that name the field and its value."""

from __future__ import annotations

import math

import pytest

from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.sampling_params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORDS_LENGTH,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", None),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("n", 0),
        ("n", 1.0),
        ("best_of", 0),
        ("best_of", True),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("logit_bias", [1, 2]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", ["5"]),
        ("allowed_token_ids", [-1]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", [5]),
        ("bad_words", [[]]),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [1.0]),
        ("include_stop_str_in_output", 1),
        ("ignore_eos", None),
        ("skip_special_tokens", "false"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert error.value.message.startswith(f"{field}: {value!r} is not ")


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"x": 1}, "'x' is not a token id"),
        ({"-1": 1}, "'-1' is not a token id"),
        ({-1: 1}, "-1 is not a token id"),
        ({1.0: 1}, "1.0 is not a token id"),
        ({"1" * 5000: 1}, "is not a token id"),
        ({"3": 101}, r"101, for token 3, is not in \[-100, 100\]"),
        ({3: math.nan}, "nan, for token 3"),
        ({3: None}, "None, for token 3"),
        ({3: True}, "True, for token 3"),
    ],
)
def test_a_bad_logit_bias_is_refused_by_its_token(bias: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"logit_bias: .*{message}") as error:
        SamplingParams(logit_bias=bias)
    assert error.value.param == "logit_bias"


def test_the_keys_of_logit_bias_may_be_text_as_json_has_them() -> None:
    assert SamplingParams(logit_bias={"7": -100, 8: 0.5}).logit_bias == {7: -100.0, 8: 0.5}


def test_best_of_below_n_and_an_empty_choice_of_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="best_of: 2 is below n, 3"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match="leaves no token to generate"):
        SamplingParams(allowed_token_ids=[])
    assert SamplingParams(n=3).num_sequences == 3
    assert not SamplingParams(n=3, best_of=3).ranked
    assert SamplingParams(n=3, best_of=4).ranked


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens: 5 is above max_tokens, 4") as error:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert error.value.param == "min_tokens"
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", 10**9),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 1e-9),
        ("logprobs", 0),
        ("prompt_logprobs", MAX_LOGPROBS),
        ("seed", None),
        ("seed", MAX_SEED),
    ],
)
def test_the_ends_of_each_range_are_allowed(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_one_stop_string_several_or_none_all_become_a_tuple() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_temperatures_too_small_to_tell_from_greedy_are_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    ("field", "most", "too_much"),
    [
        ("bad_words", [f"w{i}" for i in range(256)], [f"w{i}" for i in range(257)]),
        ("bad_words", [[i] for i in range(MAX_BAD_WORD_SEQUENCES)], [[i] for i in range(MAX_BAD_WORD_SEQUENCES + 1)]),
        ("bad_words", ["w" * MAX_BAD_WORD_LENGTH], ["w" * (MAX_BAD_WORD_LENGTH + 1)]),
        ("bad_words", [[1] * MAX_BAD_WORD_LENGTH], [[1] * (MAX_BAD_WORD_LENGTH + 1)]),
        (
            "bad_words",
            [f"{i:>64}" for i in range(MAX_BAD_WORDS_LENGTH // 64)],
            [f"{i:>64}" for i in range(MAX_BAD_WORDS_LENGTH // 64 + 1)],
        ),
        ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS)), list(range(MAX_STOP_TOKEN_IDS + 1))),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES), 1), dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1)),
    ],
)
def test_more_than_a_field_may_hold_is_refused_in_few_words(field: str, most: object, too_much: object) -> None:
    assert len(getattr(SamplingParams(**{field: most}), field)) == len(most)
    with pytest.raises(RequestError, match=rf"^{field}: \d+ .* are more than \d+$") as refused:
        SamplingParams(**{field: too_much})
    assert refused.value.param == field
    assert len(refused.value.message) < 100


def test_repeats_are_dropped_before_they_are_counted() -> None:
    params = SamplingParams(bad_words=["a", [1, 2]] * 1000, stop_token_ids=[3, 4] * 1000, allowed_token_ids=[5] * 9)
    assert params.bad_words == ("a", (1, 2))
    assert params.stop_token_ids == (3, 4)
    assert params.allowed_token_ids == (5,)


@pytest.mark.parametrize("field", ["bad_words", "stop"])
def test_a_lone_surrogate_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(RequestError, match=rf"^{field}: .* has a lone surrogate at 1") as refused:
        SamplingParams(**{field: ["good", "x\ud800"]})
    assert refused.value.param == field

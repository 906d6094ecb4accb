"""The sampling set through a whole engine, against Hugging Face `generate`, and the faults that others' users met."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_oracle import load_folder
from tiny_llama import write_tiny_llama

from ifb_handler.engine import bad_words
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.sampling_params import SamplingParams

PROMPTS = [[(13 * i + 7 * j) % 300 + 2 for j in range(4 + 11 * i)] for i in range(6)]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_folder(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """With a pool so small that requests are preempted, and budgets that cut their prompts."""
    with Engine(str(folder), num_gpu_blocks_override=12, max_num_batched_tokens=24) as engine:
        yield engine
        assert engine.stats().num_preemptions > 0
        engine.check()
        assert engine.stats().used_blocks == 0


def generated(oracle: Any, prompt: list[int], **settings: Any) -> list[int]:
    ids = torch.tensor([prompt])
    answer = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, **settings
    )
    return answer[0, len(prompt) :].tolist()


BIAS = {7: 4.0, 100: 3.5, 250: -100.0, 31: 2.5}
BAD = [[60], [61], [7, 7], [100, 31], [31, 7, 100]]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"logit_bias": BIAS}, {"sequence_bias": {(i,): bias for i, bias in BIAS.items()}}),
        (
            {"logit_bias": BIAS, "bad_words": BAD, "repetition_penalty": 1.1},
            {"sequence_bias": {(i,): b for i, b in BIAS.items()}, "bad_words_ids": BAD, "repetition_penalty": 1.1},
        ),
        (
            {"allowed_token_ids": list(range(50, 130)), "repetition_penalty": 1.2},
            {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(50, 130)), "repetition_penalty": 1.2},
        ),
    ],
    ids=["repetition", "less than one", "bias", "bias, bad words, repetition", "allowed, repetition"],
)
def test_greedy_answers_equal_those_of_generate_among_plain_neighbours_and_when_preempted(
    engine: Engine, oracle: Any, ours: dict, theirs: dict
) -> None:
    edited = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **ours)
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([*PROMPTS, *PROMPTS], [edited] * 6 + [plain] * 6)
    # The words begin in no prompt: generate, unlike vLLM and us, would look for them there, too.
    assert [o.token_ids for o in outputs[:6]] == [generated(oracle, prompt, **theirs) for prompt in PROMPTS]
    assert [o.token_ids for o in outputs[6:]] == [generated(oracle, prompt) for prompt in PROMPTS]


def test_a_bad_word_given_as_text_is_never_generated(engine: Engine) -> None:
    usual = SamplingParams(seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=list(range(2, 260)))
    (before,) = engine.generate(["In-flight batching"], usual)
    word = next(char for char in before.text if char.isascii() and char.isalpha())
    (after,) = engine.generate(["In-flight batching"], dataclasses.replace(usual, bad_words=[word]))
    assert word in before.text
    assert word not in after.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 5.0),
        ("temperature", math.nan),
        ("repetition_penalty", math.nan),
        ("logit_bias", {400: 1.0}),
        ("logit_bias", {"400": 1.0}),
    ],
    ids=str,
)
def test_a_float_top_k_a_nan_or_a_token_out_of_the_vocabulary_is_refused_and_the_engine_goes_on(
    engine: Engine, field: str, value: object
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.generate([[5]], SamplingParams(**{field: value}))
    assert refused.value.param == field
    (output,) = engine.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.finish_reason is FinishReason.LENGTH


def test_a_temperature_of_1e_4_gives_the_greedy_answer(engine: Engine) -> None:
    asked = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 1e-4)]
    greedy, nearly = engine.generate([PROMPTS[3]] * 2, asked)
    assert nearly.token_ids == greedy.token_ids
    assert nearly.text == greedy.text != ""


def test_a_request_that_forbids_every_token_ends_alone_and_says_why(engine: Engine) -> None:
    nothing = SamplingParams(allowed_token_ids=[5], bad_words=[[5]], max_tokens=4)
    failed, fine = engine.generate([[5], [6]], [nothing, SamplingParams(max_tokens=4, ignore_eos=True)])
    assert failed.finish_reason is FinishReason.ERROR
    assert "no token" in failed.error
    assert fine.finish_reason is FinishReason.LENGTH


def test_bad_words_are_tokenized_once_for_all_prompts_that_come_with_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def counting(words: Any, tokenizer: Any) -> Any:
        calls.append(words)
        return bad_words.tokenize(words, tokenizer)

    monkeypatch.setattr("ifb_handler.engine.engine.tokenize", counting)
    with Engine(str(folder)) as engine:
        usual = SamplingParams(temperature=0.0, max_tokens=3, bad_words=["fox", "dog"])
        engine.generate(["the quick"] * 9, [dataclasses.replace(usual, max_tokens=1 + i) for i in range(9)])
        assert calls == [("fox", "dog")]
        engine.generate(["the quick"], dataclasses.replace(usual, bad_words=["cat"]))
        assert calls == [("fox", "dog"), ("cat",)]

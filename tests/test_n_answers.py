"""Several answers to one request: each as if it were alone, all of them ended together, the best of them found."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from recall_executor import VOCAB_SIZE, SpreadExecutor, expected_answer
from test_engine_thread import GatedExecutor

from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import QueueFullError, RequestError
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.request import GenerationRequest
from ifb_handler.engine.sampling_params import SamplingParams

PROMPT = [(5 * i) % VOCAB_SIZE for i in range(50)]
DRAWN = SamplingParams(seed=3, max_tokens=20, temperature=0.8)


def spread(executor: type[SpreadExecutor] = SpreadExecutor, num_blocks: int = 400, **options: Any) -> Engine:
    return Engine.with_executor(executor(num_blocks, 4), block_size=4, **options)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def several(n: int, **more: Any) -> SamplingParams:
    return dataclasses.replace(DRAWN, n=n, **more)


@pytest.fixture(scope="module")
def five() -> list[list[int]]:
    with spread() as engine:
        return ids(engine.generate([PROMPT], several(5)))


def test_the_answers_differ_and_the_first_is_the_one_that_a_single_request_gets(five: list[list[int]]) -> None:
    with spread() as engine:
        (alone,) = engine.generate([PROMPT], DRAWN)
    assert five[0] == alone.token_ids
    assert len({tuple(answer) for answer in five}) == 5


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 2, "max_num_batched_tokens": 7}, {"num_blocks": 32}], ids=str
)
def test_the_same_seed_gives_the_same_answers_whatever_happens_around_them(
    five: list[list[int]], options: dict
) -> None:
    prompts = [PROMPT[:20], PROMPT, PROMPT[3:9]]
    with spread(**options) as engine:
        outputs = engine.generate(prompts, [several(2), several(5), dataclasses.replace(DRAWN, seed=None)])
        assert [output.index for output in outputs] == [0, 1, 0, 1, 2, 3, 4, 0]
        assert ids(outputs[2:7]) == five
        assert (engine.stats().num_preemptions > 0) == ("num_blocks" in options)
        engine.check()
        assert engine.stats().used_blocks == 0


def test_the_prompts_pages_are_computed_once_for_all_answers() -> None:
    with spread() as engine:
        engine.generate([PROMPT], several(4))
        assert engine.stats().prefix_cache_hits >= 3 * 48
        prefilled = sum(tokens for record in engine.steps() for _, tokens in record.prefill)
        assert prefilled <= len(PROMPT) + 3 * 2


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 30}], ids=str)
def test_the_prompts_log_probabilities_are_computed_once_for_all_answers(
    five: list[list[int]], options: dict[str, Any]
) -> None:
    with spread(**options) as engine:
        (alone,) = engine.generate([PROMPT], several(1, prompt_logprobs=2))
        before = engine.stats().num_steps
        outputs = engine.generate([PROMPT], several(5, prompt_logprobs=2))
        assert ids(outputs) == five
        assert all(output.prompt_logprobs == alone.prompt_logprobs for output in outputs)
        if engine.stats().num_preemptions == 0:
            assert sum(n for record in engine.steps(before - 1) for _, n in record.prefill) <= len(PROMPT) + 4 * 2
        engine.check()


def test_without_a_prefix_cache_each_answer_computes_its_prompts_log_probabilities(five: list[list[int]]) -> None:
    with spread(enable_prefix_caching=False) as engine:
        outputs = engine.generate([PROMPT], several(5, prompt_logprobs=2))
        assert ids(outputs) == five
        assert all(output.prompt_logprobs == outputs[0].prompt_logprobs for output in outputs)


def test_streamed_answers_do_not_overwrite_each_other(five: list[list[int]]) -> None:
    answers: dict[int, list[int]] = defaultdict(list)
    ended = []
    with spread() as engine:
        for output in engine.stream(PROMPT, several(5)):
            assert output.index not in ended
            answers[output.index] += output.token_ids
            ended += [output.index] if output.finished else []
    assert sorted(ended) == [0, 1, 2, 3, 4]
    assert [answers[index] for index in range(5)] == five


def test_greedy_answers_are_all_alike() -> None:
    with spread() as engine:
        first, second, third = ids(engine.generate([PROMPT], SamplingParams(temperature=0.0, n=3, max_tokens=9)))
    assert first == second == third


@pytest.mark.parametrize("n", [1, 2, 4])
def test_best_of_gives_the_likeliest_answers_best_first_whole_and_at_the_end(n: int) -> None:
    with spread() as engine:
        drawn = engine.generate([PROMPT], several(6, logprobs=0))
        ranked = sorted(drawn, key=lambda output: -sum(token.logprob for token in output.logprobs))
        best = engine.generate([PROMPT], several(n, best_of=6))
        assert ids(best) == ids(ranked[:n])
        assert [output.index for output in best] == list(range(n))
        assert all(output.logprobs is None for output in best)
        told = engine.generate([PROMPT], several(n, best_of=6, logprobs=2, prompt_logprobs=1))
        assert [[t.logprob for t in o.logprobs] for o in told] == [[t.logprob for t in o.logprobs] for o in ranked[:n]]
        assert all(len(token.top) == 2 for output in told for token in output.logprobs)
        assert all(len(output.prompt_logprobs) == len(PROMPT) for output in told)
        mailbox = Mailbox()
        engine.submit(GenerationRequest("best", PROMPT, several(n, best_of=6)), mailbox)
        assert engine.drain(timeout=30)
        assert ids(mailbox.collect()) == ids(best)


def test_a_request_whose_answers_are_to_be_ranked_can_not_be_streamed() -> None:
    with spread() as engine, pytest.raises(RequestError, match="best_of: answers are not streamed") as refused:
        next(engine.stream(PROMPT, several(1, best_of=2)))
    assert refused.value.param == "best_of"


def collect_all(mailbox: Mailbox, n: int) -> dict[int, list[RequestOutput]]:
    by_index: dict[int, list[RequestOutput]] = defaultdict(list)
    while sum(news[-1].finished for news in by_index.values()) < n:
        news = mailbox.collect(timeout=30)
        assert news, "no news in 30 s"
        for output in news:
            by_index[output.index].append(output)
    return by_index


GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("best_of", [None, 7])
def test_cancelling_a_request_leaves_none_of_its_answers_running_or_waiting(best_of: int | None) -> None:
    executor = GatedExecutor(64)
    with Engine.with_executor(executor, max_num_seqs=3) as engine:
        mailbox, other = Mailbox(), Mailbox()
        params = dataclasses.replace(GREEDY, max_tokens=200, n=6, best_of=best_of)
        engine.submit(GenerationRequest("several", [1] * 20, params), mailbox)
        engine.submit(GenerationRequest("other", [2], GREEDY), other)
        executor.entered.acquire()
        engine.cancel("several")
        engine.cancel("several")
        executor.open_for_good()
        last = [news[-1] for news in collect_all(mailbox, 6).values()]
        assert {output.finish_reason for output in last} == {FinishReason.ABORT}
        assert {output.request_id for output in last} == {"several"}
        assert collect_all(other, 1)[0][-1].finish_reason is FinishReason.LENGTH
        engine.check()
        assert engine.stats().used_blocks == 0
        assert engine.stats().request_success["abort"] == (best_of or 6)
        assert not mailbox.collect(timeout=0)


def test_a_cancel_that_comes_too_late_does_not_hurt_the_next_request_of_that_id() -> None:
    executor = GatedExecutor(64)
    with Engine.with_executor(executor) as engine:
        second = Mailbox()

        class Again(Mailbox):
            """Uses the id again as soon as it is free, which is before the engine heeds the cancel."""

            def put(self, outputs: list[RequestOutput]) -> None:
                assert outputs[-1].finish_reason is FinishReason.LENGTH
                engine.submit(GenerationRequest("same", [2], GREEDY), second)

        engine.submit(GenerationRequest("same", [1], dataclasses.replace(GREEDY, max_tokens=1)), Again())
        executor.entered.acquire()
        engine.cancel("same")
        executor.open_for_good()
        assert [t for o in collect_all(second, 1)[0] for t in o.token_ids] == expected_answer([2], 8)


def test_the_waiting_queue_counts_every_answer() -> None:
    executor = GatedExecutor(64)
    with Engine.with_executor(executor, max_num_seqs=1, max_num_waiting=5) as engine:
        mailbox = Mailbox()
        engine.submit(GenerationRequest("running", [1], GREEDY), mailbox)
        executor.entered.acquire()
        engine.submit(GenerationRequest("three", [1], dataclasses.replace(GREEDY, n=3)), mailbox)
        assert engine.stats().num_requests_waiting == 3
        with pytest.raises(QueueFullError):
            engine.submit(GenerationRequest("three more", [1], dataclasses.replace(GREEDY, n=3)), mailbox)
        engine.submit(GenerationRequest("two", [1], dataclasses.replace(GREEDY, best_of=2)), mailbox)
        for params, field in (({"n": 6}, "n"), ({"n": 2, "best_of": 6}, "best_of")):
            with pytest.raises(RequestError, match=f"{field}: 6 answers are more than the waiting queue") as refused:
                engine.submit(GenerationRequest("six", [1], dataclasses.replace(GREEDY, **params)), mailbox)
            assert refused.value.param == field
        executor.open_for_good()
        assert len(engine.generate([[i] for i in range(9)], dataclasses.replace(GREEDY, n=4))) == 36


def test_ids_of_answers_never_clash_with_ids_of_requests() -> None:
    executor = GatedExecutor(200)
    with Engine.with_executor(executor, max_num_seqs=32) as engine:
        boxes: dict[str, tuple[int, list[int], Mailbox]] = {}

        def submit(request_id: str, n: int) -> None:
            prompt = [len(boxes), 7]
            boxes[request_id] = n, prompt, Mailbox()
            params = dataclasses.replace(GREEDY, n=n)
            engine.submit(GenerationRequest(request_id, prompt, params), boxes[request_id][2])

        for request_id, n in (("a#1", 1), ("a#1'", 2), ("a", 3), ("a#0", 2), ("a#2", 1), ("a#0#1", 1), ("a#1''", 1)):
            submit(request_id, n)
        with pytest.raises(RequestError, match="'a' is the id of a live request"):
            submit("a", 1)
        del boxes["a"]
        executor.open_for_good()
        for request_id, (n, prompt, mailbox) in boxes.items():
            for news in collect_all(mailbox, n).values():
                assert {output.request_id for output in news} == {request_id}
                assert [t for output in news for t in output.token_ids] == expected_answer(prompt, 8)


def test_an_answer_that_fails_ends_the_others_of_its_request_and_no_one_else(five: list[list[int]]) -> None:
    at = next(i for i in range(2, 20) if len({tuple(answer[:i]) for answer in five}) == 5)
    fatal = [*PROMPT, *five[2][:at]]

    class Fatal(SpreadExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            logits = super().logits_after(context)
            return logits.fill_(torch.nan) if context.tolist() == fatal else logits

    with spread(Fatal) as engine:
        outputs = engine.generate([PROMPT, PROMPT], [several(5), dataclasses.replace(DRAWN, max_tokens=30)])
        assert [output.finish_reason for output in outputs[:5]] == ["abort", "abort", "error", "abort", "abort"]
        assert "no usable logits" in outputs[2].error
        assert outputs[5].finish_reason is FinishReason.LENGTH
        (best,) = engine.generate([PROMPT], several(1, best_of=5))
        assert best.finish_reason is FinishReason.ERROR
        engine.check()
        assert engine.stats().used_blocks == 0


def test_shutdown_ends_every_answer() -> None:
    executor = GatedExecutor(64)
    engine = Engine.with_executor(executor, max_num_seqs=2)
    mailbox, ranked = Mailbox(), Mailbox()
    engine.submit(GenerationRequest("n", [1], dataclasses.replace(GREEDY, max_tokens=None, n=3)), mailbox)
    engine.submit(GenerationRequest("best", [1], dataclasses.replace(GREEDY, max_tokens=None, best_of=3)), ranked)
    executor.entered.acquire()
    executor.open_for_good()
    engine.shutdown()
    assert {news[-1].finish_reason for news in collect_all(mailbox, 3).values()} == {FinishReason.ABORT}
    assert [news[-1].finish_reason for news in collect_all(ranked, 1).values()] == [FinishReason.ABORT]

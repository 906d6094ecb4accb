"""The engine's thread and its door: nobody waits for a step, and nobody is left waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from recall_executor import RecallExecutor, expected_answer
from tokenizers import Tokenizer
from tokenizers.models import BPE

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.request import GenerationRequest
from ifb_handler.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class GatedExecutor(RecallExecutor):
    """Each step waits at a gate that the test opens."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def execute(self, batch: Batch) -> torch.Tensor:
        self.entered.release()
        self.gate.acquire()
        return super().execute(batch)

    def open_for_good(self) -> None:
        self.gate.release(1_000_000)


@pytest.fixture
def gated() -> Iterator[tuple[Engine, GatedExecutor]]:
    executor = GatedExecutor(64)
    engine = Engine.with_executor(executor, max_num_seqs=4, max_num_waiting=3)
    yield engine, executor
    executor.open_for_good()
    engine.shutdown()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.with_executor(RecallExecutor(64), max_num_seqs=4) as engine:
        yield engine
        engine.check()
        assert engine.stats().used_blocks == 0


def collect_until_finished(mailbox: Mailbox) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while not outputs or not outputs[-1].finished:
        news = mailbox.collect(timeout=30)
        assert news, "no news in 30 s"
        outputs += news
    return outputs


def test_generate_answers_in_the_order_of_its_prompts(engine: Engine) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [expected_answer(prompt, 8) for prompt in prompts]
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


def test_generate_takes_more_prompts_than_the_waiting_queue_holds() -> None:
    with Engine.with_executor(RecallExecutor(64), max_num_seqs=2, max_num_waiting=3) as engine:
        outputs = engine.generate([[i] for i in range(30)], GREEDY)
        assert [output.token_ids for output in outputs] == [expected_answer([i], 8) for i in range(30)]


def test_stream_yields_every_token_once_and_closing_it_cancels_the_request(engine: Engine) -> None:
    tokens = [token for output in engine.stream([5, 6], GREEDY) for token in output.token_ids]
    assert tokens == expected_answer([5, 6], 8)
    endless = engine.stream([5, 6], SamplingParams(temperature=0.0, max_tokens=None))
    next(endless)
    endless.close()
    assert engine.drain(timeout=30)
    assert engine.stats().request_success["abort"] == 1


def test_submit_returns_while_a_step_runs_and_the_request_is_counted_as_waiting(
    gated: tuple[Engine, GatedExecutor],
) -> None:
    engine, executor = gated
    mailbox = Mailbox()
    engine.submit(GenerationRequest("first", [1], GREEDY), mailbox)
    executor.entered.acquire()
    assert engine.stats().num_requests_waiting == 0
    engine.submit(GenerationRequest("second", [2], GREEDY), mailbox)
    assert engine.stats().num_requests_waiting == 1


def test_a_full_waiting_queue_refuses_one_more_and_takes_it_later(gated: tuple[Engine, GatedExecutor]) -> None:
    engine, executor = gated
    mailbox = Mailbox()
    engine.submit(GenerationRequest("running", [1], GREEDY), mailbox)
    executor.entered.acquire()
    for i in range(3 + 3):  # as many places are left in the batch, and in the queue
        engine.submit(GenerationRequest(f"waiting-{i}", [1], GREEDY), mailbox)
    with pytest.raises(QueueFullError, match="max_num_waiting is 3"):
        engine.submit(GenerationRequest("refused", [1], GREEDY), mailbox)
    executor.open_for_good()
    while engine.stats().num_requests_waiting:
        mailbox.collect(timeout=30)
    engine.submit(GenerationRequest("refused", [1], GREEDY), mailbox)


def test_the_next_opening_is_the_running_steps_end_and_none_when_one_more_would_wait(
    gated: tuple[Engine, GatedExecutor],
) -> None:
    engine, executor = gated
    mailbox = Mailbox()
    assert engine.next_opening() <= time.monotonic(), "at once"
    engine.submit(GenerationRequest("first", [1], GREEDY), mailbox)
    executor.entered.acquire()
    time.sleep(0.2)
    executor.gate.release()  # a step of a fifth of a second, and another like it
    executor.entered.acquire()
    started = time.monotonic()
    assert started + 0.1 < engine.next_opening() < started + 5.0
    for i in range(3):
        assert engine.next_opening() is not None
        engine.submit(GenerationRequest(f"more-{i}", [1], GREEDY), mailbox)
    assert engine.next_opening() is None, "the four places of the batch are taken"
    engine.submit(GenerationRequest("too many", [1], GREEDY), mailbox)
    executor.gate.release()
    executor.entered.acquire()
    assert engine.next_opening() is None
    assert engine.is_waiting("too many")
    assert not engine.is_waiting("first")
    assert not engine.is_waiting("nobody")


def test_cancel_ends_a_running_and_a_waiting_request_with_abort_and_frees_their_pages(
    gated: tuple[Engine, GatedExecutor],
) -> None:
    engine, executor = gated
    running, waiting = Mailbox(), Mailbox()
    engine.submit(GenerationRequest("running", [1] * 40, GREEDY), running)
    executor.entered.acquire()
    engine.submit(GenerationRequest("waiting", [1] * 40, GREEDY), waiting)
    engine.cancel("running")
    engine.cancel("waiting")
    engine.cancel("waiting")
    engine.cancel("never heard of")
    executor.open_for_good()
    assert collect_until_finished(running)[-1].finish_reason is FinishReason.ABORT
    assert collect_until_finished(waiting)[-1].finish_reason is FinishReason.ABORT
    engine.check()
    assert engine.stats().used_blocks == 0


def test_the_id_of_a_live_request_is_refused_and_can_be_used_again_afterwards(engine: Engine) -> None:
    mailbox = Mailbox()
    endless = SamplingParams(temperature=0.0, max_tokens=None)
    engine.submit(GenerationRequest("same", [1], endless), mailbox)
    with pytest.raises(RequestError, match="'same' is the id of a live request"):
        engine.submit(GenerationRequest("same", [2], endless), Mailbox())
    engine.cancel("same")
    collect_until_finished(mailbox)
    engine.submit(GenerationRequest("same", [3], GREEDY), mailbox)
    assert [t for o in collect_until_finished(mailbox) for t in o.token_ids] == expected_answer([3], 8)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: is empty"),
        ([1] * 512, "512 tokens leave no room for one more; prompt and answer hold at most 512"),
        ([1, 89], "integers from 0 to 88"),
        ([-1], "integers from 0 to 88"),
        ([True], "integers from 0 to 88"),
        ([1.5], "integers from 0 to 88"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_at_once(engine: Engine, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        engine.submit(GenerationRequest("bad", prompt, GREEDY), Mailbox())
    assert refused.value.param == "prompt"


def test_a_prompt_larger_than_the_whole_pool_is_refused_and_the_largest_that_fits_is_answered_to_its_end() -> None:
    with Engine.with_executor(RecallExecutor(4), max_num_seqs=4) as engine:
        assert engine.max_model_len == 64
        with pytest.raises(RequestError, match="at most 64 tokens"):
            engine.generate([[1] * 64], GREEDY)
        (output,) = engine.generate([[1] * 60], GREEDY)
        assert output.token_ids == expected_answer([1] * 60, 4)
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [88, 89]),
        ("logit_bias", {"5": 1, "89": 1}),
        ("allowed_token_ids", [0, 89]),
        ("bad_words", [[1, 89]]),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused_by_its_field_and_kills_nothing(
    engine: Engine, field: str, value: object
) -> None:
    with pytest.raises(RequestError, match=f"{field}: 89 is not a token id, from 0 to 88") as refused:
        engine.generate([[1]], SamplingParams(**{field: value}))
    assert refused.value.param == field
    assert engine.is_healthy


def test_numpy_and_torch_integers_are_token_ids_and_truth_values_are_not(engine: Engine) -> None:
    ids = [5, 6, 7]
    same = [ids, np.array(ids, np.int32), list(np.array(ids)), torch.tensor(ids), list(torch.tensor(ids)), tuple(ids)]
    assert [o.token_ids for o in engine.generate(same, GREEDY)] == [expected_answer(ids, 8)] * len(same)
    for bad in (True, np.True_, torch.tensor(True), 1.0, np.float32(1), torch.tensor(1.0), "1", None):
        with pytest.raises(RequestError, match="token ids are integers from 0 to 88") as refused:
            engine.generate([[1, bad]], GREEDY)
        assert refused.value.param == "prompt"


def test_a_prompt_with_a_lone_surrogate_is_refused_by_its_name() -> None:
    with Engine.with_executor(RecallExecutor(4), tokenizer=Tokenizer(BPE())) as engine:
        with pytest.raises(RequestError, match=r"prompt: .* has a lone surrogate at 2") as refused:
            engine.generate(["ab\ud800"], GREEDY)
        assert refused.value.param == "prompt"


def test_a_failed_step_ends_the_requests_in_it_and_no_others() -> None:
    executor = GatedExecutor(64)
    with Engine.with_executor(executor, max_num_seqs=2) as engine:
        boxes = [Mailbox() for _ in range(3)]
        engine.submit(GenerationRequest("0", [1], GREEDY), boxes[0])
        executor.entered.acquire()
        engine.submit(GenerationRequest("1", [2], GREEDY), boxes[1])
        engine.submit(GenerationRequest("2", [3], GREEDY), boxes[2])
        executor.gate.release()
        executor.entered.acquire()  # the step of 0 and 1; 2 waits for a place
        executor.fail_next = True
        executor.open_for_good()
        for box in boxes[:2]:
            last = collect_until_finished(box)[-1]
            assert last.finish_reason is FinishReason.ERROR
            assert "asked to fail" in last.error
        assert [t for o in collect_until_finished(boxes[2]) for t in o.token_ids] == expected_answer([3], 8)
        engine.check()
        assert engine.is_healthy
        assert engine.stats().used_blocks == 0


def test_when_the_executor_cannot_go_on_every_request_hears_of_it_and_the_engine_says_it_is_not_healthy() -> None:
    executor = GatedExecutor(64)
    executor.is_usable = lambda: False
    engine = Engine.with_executor(executor, max_num_seqs=1)
    boxes = [Mailbox(), Mailbox()]
    executor.fail_next = True
    for i, box in enumerate(boxes):
        engine.submit(GenerationRequest(str(i), [1], GREEDY), box)
    executor.open_for_good()
    for box in boxes:
        last = collect_until_finished(box)[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert "asked to fail" in last.error
    engine.shutdown()
    assert not engine.is_healthy
    with pytest.raises(EngineStoppedError):
        engine.submit(GenerationRequest("late", [1], GREEDY), Mailbox())


def test_drain_lets_live_requests_finish_and_refuses_new_ones(gated: tuple[Engine, GatedExecutor]) -> None:
    engine, executor = gated
    mailbox = Mailbox()
    engine.submit(GenerationRequest("live", [1], GREEDY), mailbox)
    assert not engine.drain(timeout=0.01)
    with pytest.raises(EngineStoppedError):
        engine.submit(GenerationRequest("late", [1], GREEDY), Mailbox())
    executor.open_for_good()
    assert engine.drain(timeout=30)
    assert [t for o in mailbox.collect() for t in o.token_ids] == expected_answer([1], 8)


def test_shutdown_finishes_or_aborts_what_is_alive_and_every_mailbox_hears_of_it() -> None:
    for finish, reason in ((True, FinishReason.LENGTH), (False, FinishReason.ABORT)):
        executor = GatedExecutor(64)
        engine = Engine.with_executor(executor)
        mailbox = Mailbox()
        engine.submit(GenerationRequest("live", [1], GREEDY), mailbox)
        executor.entered.acquire()
        executor.gate.release()
        stopping = threading.Thread(target=engine.shutdown, kwargs={"finish": finish})
        stopping.start()
        while engine._accepting:
            pass
        executor.open_for_good()
        assert collect_until_finished(mailbox)[-1].finish_reason is reason
        stopping.join(timeout=30)
        assert not engine.is_healthy
        engine.check()
        assert engine.stats().used_blocks == 0
        with pytest.raises(EngineStoppedError):
            engine.submit(GenerationRequest("late", [1], GREEDY), Mailbox())


def test_a_mailbox_that_fails_does_not_hurt_the_others(engine: Engine) -> None:
    class Broken(Mailbox):
        def put(self, outputs: object) -> None:
            raise OSError("nobody home")

    engine.submit(GenerationRequest("broken", [1], GREEDY), Broken())
    (output,) = engine.generate([[2]], GREEDY)
    assert output.token_ids == expected_answer([2], 8)
    assert engine.drain(timeout=30)


@pytest.mark.parametrize(("batching", "most"), [("continuous", 6), ("static", 2)])
def test_a_burst_fills_the_free_places_of_the_batch_beside_the_queue(batching: str, most: int) -> None:
    executor = GatedExecutor(64)
    with Engine.with_executor(executor, max_num_seqs=5, max_num_waiting=2, batching=batching) as engine:
        mailbox = Mailbox()
        engine.submit(GenerationRequest("running", [1], GREEDY), mailbox)
        executor.entered.acquire()
        for i in range(most):
            engine.submit(GenerationRequest(str(i), [1], GREEDY), mailbox)
        with pytest.raises(QueueFullError):
            engine.submit(GenerationRequest("refused", [1], GREEDY), mailbox)
        executor.open_for_good()

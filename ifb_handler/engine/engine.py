"""The engine's thread and its door: `submit` and `cancel` from any thread, outputs through mailboxes.

Nobody waits for a step: a submitted request is in the waiting queue when `submit` returns, and the thread takes the
new and the cancelled ones in between two steps.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from ifb_handler.engine.bad_words import tokenize
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore, StepResult
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError
from ifb_handler.engine.executor import Executor
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.outputs import EngineStats, FinishReason, RequestOutput, StepRecord
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.scheduler import Schedule
from ifb_handler.engine.stopping import OutputAssembler
from ifb_handler.models.progress import Progress
from ifb_handler.models.source import resolve
from ifb_handler.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

STEP_RECORDS = 2048
_RETRY_SECONDS = 0.01


class Engine:
    """A model being served in flight. `Engine("smollm2-135m", max_num_seqs=32)`; the options are EngineConfig's fields.

    Raises ConfigError on an option that cannot be used, and whatever loading the model raises.
    """

    def __init__(self, model: str = "smollm2-135m", *, progress: Progress | None = None, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **options})
        files = resolve(config.model, progress=progress)
        tokenizer = load_tokenizer(files, config.tokenizer)
        executor = ModelExecutor(config, files, progress=progress)
        self._start(config, executor, tokenizer, config.served_model_name or executor.model.name)

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        return cls(progress=progress, **vars(config))

    @classmethod
    def with_executor(cls, executor: Executor, tokenizer: Any = None, **options: Any) -> Engine:
        """An engine over another executor (a cost model, a test's own); `tokenizer` None serves token ids only."""
        engine = cls.__new__(cls)
        config = EngineConfig.from_mapping(options)
        engine._start(config, executor, tokenizer, config.served_model_name or type(executor).__name__)
        return engine

    def _start(self, config: EngineConfig, executor: Executor, tokenizer: Any, model_name: str) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)
        self.model_name = model_name
        self.vocab_size = executor.vocab_size
        self.eos_token_ids = executor.eos_token_ids
        self.weight_bytes = executor.weight_bytes
        self.pool_bytes = executor.pool_bytes
        self._core = EngineCore(executor, config)
        self.max_model_len = self._core.max_request_len
        self._seeds = random.Random(config.seed)
        self._changed = threading.Condition()  # guards all that follows
        self._mailboxes: dict[str, Mailbox] = {}  # by the ids of the live requests
        self._submitted: list[Request] = []
        self._cancelled: list[str] = []
        self._checks: list[Future[None]] = []
        self._num_arrived = 0
        self._accepting = True
        self._stopping = False
        self._stats = self._core.stats()
        self._records: deque[StepRecord] = deque(maxlen=STEP_RECORDS)
        self._thread = threading.Thread(target=self._run, name="ifb-engine", daemon=True)
        self._thread.start()

    # The door: any thread.

    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """Queue a request; its outputs come to `mailbox`, the last one with a finish_reason.

        Raises at once RequestError (it can never run), QueueFullError (try again later) or EngineStoppedError.
        """
        limit = self._check_request(request)
        if request.params.bad_words:
            bad_words = tokenize(request.params.bad_words, self.tokenizer)
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, bad_words=bad_words))
        detokenizer = Detokenizer(self._vocabulary, request.prompt_token_ids, request.params.skip_special_tokens)
        text = OutputAssembler(request.params, self.eos_token_ids, limit, detokenizer)
        with self._changed:
            if not self._accepting:
                raise EngineStoppedError("the engine is shutting down and takes no new requests")
            if request.request_id in self._mailboxes:
                raise RequestError(f"request_id: {request.request_id!r} is the id of a live request", "request_id")
            waiting = self._stats.num_requests_waiting + len(self._submitted)
            if waiting >= self.config.max_num_waiting:
                raise QueueFullError(f"the waiting queue is full: max_num_waiting is {self.config.max_num_waiting}")
            seed = request.params.seed if request.params.seed is not None else self._seeds.getrandbits(64)
            self._submitted.append(Request(request, self._num_arrived, seed, text))
            self._num_arrived += 1
            self._mailboxes[request.request_id] = mailbox
            self._changed.notify_all()

    def _check_request(self, request: GenerationRequest) -> int:
        """-> the most tokens it may generate. Raises RequestError if it can never run."""
        prompt = request.prompt_token_ids
        if not len(prompt):
            raise RequestError("prompt: is empty; it must hold at least one token", "prompt")
        if not all(type(token) is int for token in prompt) or not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            raise RequestError(f"prompt: token ids are integers from 0 to {self.vocab_size - 1}", "prompt")
        for field, ids in request.params.token_ids.items():
            bad = [i for i in ids if i >= self.vocab_size]
            if bad:
                raise RequestError(f"{field}: {bad[0]} is not a token id, from 0 to {self.vocab_size - 1}", field)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise RequestError(
                f"prompt: {len(prompt)} tokens leave no room for one more; prompt and answer hold at most "
                f"{self.max_model_len} tokens",
                "prompt",
            )
        return room if request.params.max_tokens is None else min(room, request.params.max_tokens)

    def cancel(self, request_id: str) -> None:
        """End a request between two steps; its last output has finish_reason `abort`. An unknown id is no error."""
        with self._changed:
            if request_id in self._mailboxes:
                self._cancelled.append(request_id)
                self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the live ones to end. False if `timeout` seconds were too few."""
        with self._changed:
            self._accepting = False
            return self._changed.wait_for(lambda: not self._mailboxes, timeout)

    def shutdown(self, finish: bool = False, timeout: float | None = None) -> None:
        """Stop the thread. `finish`: let live requests end first, for up to `timeout` seconds; the rest is aborted."""
        if finish:
            self.drain(timeout)
        with self._changed:
            self._accepting = False
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive()

    def stats(self) -> EngineStats:
        """As of the last step, with the requests submitted since then among the waiting."""
        with self._changed:
            waiting = self._stats.num_requests_waiting + len(self._submitted)
            return dataclasses.replace(self._stats, num_requests_waiting=waiting)

    def steps(self, after: int = -1) -> list[StepRecord]:
        """The records of the latest steps (STEP_RECORDS at most) with a number above `after`, oldest first."""
        with self._changed:
            return [record for record in self._records if record.step > after]

    def check(self) -> None:
        """Prove, between two steps, that pool, scheduler and requests agree; RuntimeError if they do not."""
        done: Future[None] = Future()
        with self._changed:
            if not self._thread.is_alive():
                return self._core.check()
            self._checks.append(done)
            self._changed.notify_all()
        return done.result()

    # The thread.

    def _run(self) -> None:
        error: str | None = None
        try:
            while not self._stopping:
                schedule = self._take_in()
                if schedule is not None:
                    self._publish(self._core.run(schedule))
        except Exception as failure:
            logger.exception("the engine thread died")
            error = f"the engine failed: {failure}"
        finally:
            self._end_all(error)

    def _take_in(self) -> Schedule | None:
        """Between two steps: wait for work, take the new requests, end the cancelled ones, and decide the next step."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._core.has_work or self._submitted or self._cancelled or self._checks or self._stopping
            )
            for request in self._submitted:
                self._core.add(request)
            self._submitted.clear()
            for request_id in self._cancelled:
                output = self._core.abort(request_id)
                if output is not None:
                    self._deliver([output])
            self._cancelled.clear()
            for done in self._checks:
                try:
                    done.set_result(self._core.check())
                except Exception as error:
                    done.set_exception(error)
            self._checks.clear()
            schedule = None if self._stopping else self._core.schedule()
            self._stats = self._core.stats()
            return schedule

    def _publish(self, result: StepResult) -> None:
        with self._changed:
            self._records.append(result.record)
            self._stats = self._core.stats()
            self._deliver(result.outputs)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand each mailbox its outputs at once. Called with the lock held: a mailbox's `put` must not block."""
        by_mailbox: dict[Mailbox, list[RequestOutput]] = {}
        for output in outputs:
            by_mailbox.setdefault(self._mailboxes[output.request_id], []).append(output)
            if output.finished:
                del self._mailboxes[output.request_id]
        for mailbox, news in by_mailbox.items():
            try:
                mailbox.put(news)
            except Exception:
                logger.exception("a mailbox refused %d outputs", len(news))
        if not self._mailboxes:
            self._changed.notify_all()

    def _end_all(self, error: str | None) -> None:
        """The last thing the thread does: no consumer is left waiting."""
        with self._changed:
            self._accepting = False
            if error is None:
                ended = [self._core.abort(request_id) for request_id in list(self._core.requests)]
                self._deliver([output for output in ended if output is not None])
                self._stats = self._core.stats()
            reason = FinishReason.ABORT if error is None else FinishReason.ERROR
            self._deliver([RequestOutput(i, finish_reason=reason, error=error) for i in list(self._mailboxes)])
            for done in self._checks:
                done.set_exception(RuntimeError(error or "the engine has stopped"))

    # The Python API.

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt (text or token ids) -> its whole answer, in the order of the prompts.

        `params` is for all prompts or one for each. Raises RequestError if a prompt can never run; the others are then
        cancelled. A request that fails later has finish_reason `error` and its `error`.
        """
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        answers = {request.request_id: RequestOutput(request.request_id) for request in requests}
        mailbox = Mailbox()
        todo = deque(requests)
        num_live = 0
        try:
            while todo or num_live:
                num_live += self._submit_what_fits(todo, mailbox, wait=not num_live)
                for output in mailbox.collect():
                    answers[output.request_id] = _joined(answers[output.request_id], output)
                    num_live -= output.finished
        except BaseException:
            for request in requests:
                self.cancel(request.request_id)
            raise
        return [answers[request.request_id] for request in requests]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, yielding the news as they come. Closing the iterator cancels the request."""
        request = self._request(prompt, params)
        mailbox = Mailbox()
        self.submit(request, mailbox)
        try:
            finished = False
            while not finished:
                for output in mailbox.collect():
                    finished = output.finished
                    yield output
        finally:
            self.cancel(request.request_id)

    def _request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> GenerationRequest:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt: this engine has no tokenizer; give token ids", "prompt")
            prompt = self.tokenizer.encode(prompt)
        return GenerationRequest(f"python-{uuid.uuid4().hex}", prompt, params or SamplingParams())

    def _submit_what_fits(self, todo: deque[GenerationRequest], mailbox: Mailbox, wait: bool) -> int:
        """Submit from the head of `todo` until the waiting queue is full -> how many. `wait`: at least one."""
        submitted = 0
        while todo:
            try:
                self.submit(todo[0], mailbox)
            except QueueFullError:
                if submitted or not wait:
                    break
                time.sleep(_RETRY_SECONDS)  # others fill the queue; nothing of ours will tell us when it has room
            else:
                todo.popleft()
                submitted += 1
        return submitted

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _joined(so_far: RequestOutput, news: RequestOutput) -> RequestOutput:
    return dataclasses.replace(
        news,
        text=so_far.text + news.text,
        token_ids=so_far.token_ids + news.token_ids,
        logprobs=news.logprobs if so_far.logprobs is None else so_far.logprobs + (news.logprobs or []),
        prompt_logprobs=news.prompt_logprobs if so_far.prompt_logprobs is None else so_far.prompt_logprobs,
    )

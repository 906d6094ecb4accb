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
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from ifb_handler.engine.answers import Answers, sequence_params, sequence_seed
from ifb_handler.engine.bad_words import tokenize
from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore, StepResult
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.draft_model import check_vocabulary, find_draft_model
from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError
from ifb_handler.engine.executor import Executor
from ifb_handler.engine.grammar import Grammars
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.outputs import EngineStats, FinishReason, RequestOutput, StepRecord
from ifb_handler.engine.python_api import PythonAPI
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.request_check import RequestCheck, plain_integers
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.scheduler import Schedule
from ifb_handler.engine.step_time import StepTime
from ifb_handler.engine.stopping import OutputAssembler
from ifb_handler.models.loading import open_checkpoint
from ifb_handler.models.progress import Progress
from ifb_handler.models.source import resolve
from ifb_handler.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

STEP_RECORDS = 2048


class Engine(PythonAPI):
    """A model being served in flight. `Engine("smollm2-135m", max_num_seqs=32)`; the options are EngineConfig's fields.

    Raises ConfigError on an option that cannot be used, and whatever loading the model raises.
    """

    def __init__(self, model: str = "smollm2-135m", *, progress: Progress | None = None, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **options})
        files = resolve(config.model, progress=progress)
        open_checkpoint(files)  # a broken one is named for what it is, before its tokenizer fails at it
        tokenizer = load_tokenizer(files, config.tokenizer)
        if config.speculative_model is not None:
            check_vocabulary(tokenizer, find_draft_model(config.speculative_model, progress))
        # In a thread that ends: OpenMP counts a thread's workers for as long as it lives, and hardly spins once there
        # are more of them than cores.
        with ThreadPoolExecutor(1, "ifb-load") as loading:
            executor = loading.submit(ModelExecutor, config, files, progress=progress).result()
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
        # The prompts of one request come one by one, each with the same words.
        self._tokenized = lru_cache(1)(lambda words: tokenize(words, tokenizer))
        self.model_name = model_name
        self.vocab_size = executor.vocab_size
        self.eos_token_ids = executor.eos_token_ids
        self.weight_bytes = executor.weight_bytes
        self.pool_bytes = executor.pool_bytes
        self.device_type, self.dtype = executor.device_type, executor.dtype
        self._core = EngineCore(executor, config)
        self.max_model_len = self._core.max_request_len
        self._check = RequestCheck(self._core, config)
        self._grammars = Grammars(tokenizer, executor.vocab_size, executor.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._changed = threading.Condition()  # guards all that follows
        self._answers: dict[str, Answers] = {}  # by the ids of the live requests
        self._sequences: dict[str, Answers] = {}  # by the ids of their live sequences, which the core knows
        self._submitted: list[Request] = []
        self._cancelled: list[Answers] = []
        self._checks: list[Future[None]] = []
        self._num_arrived = 0
        self._accepting = True
        self._stopping = False
        self._unpublished: StepResult | None = None
        self._step_time = StepTime()
        self._step_ends = 0.0
        self._observe()
        self._records: deque[StepRecord] = deque(maxlen=STEP_RECORDS)
        self._thread = threading.Thread(target=self._run, name="ifb-engine", daemon=True)
        self._thread.start()

    # The door: any thread.

    def prepare(self, params: SamplingParams) -> None:
        """Compile what `submit` needs of `params.structured`: seconds at worst, and then at once for long.

        Raises RequestError naming the field if it cannot be compiled. `submit` does it, too; who must not wait there
        prepares on a thread that may.
        """
        if params.structured is not None:
            self._grammars.get(params.structured)

    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """Queue a request; its outputs come to `mailbox`, the last one of each of its `n` answers with a finish_reason.

        If one answer fails, the others are aborted. A `best_of` above `n` and a beam search give each answer whole, in
        one output.
        Raises at once RequestError (it can never run), QueueFullError (try again later) or EngineStoppedError.
        """
        request = dataclasses.replace(request, prompt_token_ids=plain_integers(request.prompt_token_ids))
        limit = self._check.max_answer_len(request)
        params = sequence_params(request.params)
        if params.bad_words:
            params = dataclasses.replace(params, bad_words=self._tokenized(params.bad_words))
        grammar = None if params.structured is None else self._grammars.get(params.structured)
        texts = [
            OutputAssembler(
                params,
                self.eos_token_ids,
                limit,
                Detokenizer(self._vocabulary, request.prompt_token_ids, params.skip_special_tokens),
            )
            for _ in range(params.n if params.use_beam_search else params.num_sequences)
        ]
        with self._changed:
            if not self._accepting:
                raise EngineStoppedError("the engine is shutting down and takes no new requests")
            if request.request_id in self._answers:
                raise RequestError(f"request_id: {request.request_id!r} is the id of a live request", "request_id")
            waiting = self._stats.num_requests_waiting + len(self._submitted)
            if waiting + params.num_sequences > self.config.max_num_waiting + self._num_free_rows:
                raise QueueFullError(f"the waiting queue is full: max_num_waiting is {self.config.max_num_waiting}")
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
            ids = self._sequence_ids(request.request_id, params.num_sequences)
            answers = Answers(request.request_id, request.params, ids, mailbox)
            self._answers[request.request_id] = answers
            sequences: list[Request] = []
            for index, sequence_id in enumerate(ids):
                asked = dataclasses.replace(request, request_id=sequence_id, params=params)
                arrival = self._num_arrived + index
                if params.use_beam_search:
                    sequences.append(BeamRequest(asked, arrival, texts, self.eos_token_ids))
                else:
                    matcher = None if grammar is None else grammar.matcher()
                    sequences.append(Request(asked, arrival, sequence_seed(seed, index), texts[index], matcher))
                self._sequences[sequence_id] = answers
            if self.config.enable_prefix_caching and self.config.batching != "static":
                for other in sequences[1:]:
                    other.share_prompt_logprobs(sequences[0])
            self._submitted += sequences
            self._num_arrived += len(sequences)
            self._changed.notify_all()

    def _sequence_ids(self, request_id: str, count: int) -> list[str]:
        """The request's own id, or one for each of several sequences; in any case none that a live sequence has."""
        ids = [request_id] if count == 1 else [f"{request_id}#{index}" for index in range(count)]
        for index in range(count):
            while ids[index] in self._sequences:
                ids[index] += "'"
        return ids

    def cancel(self, request_id: str) -> None:
        """End a request between two steps; its last output has finish_reason `abort`. An unknown id is no error."""
        with self._changed:
            if request_id in self._answers:
                self._cancelled.append(self._answers[request_id])
                self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the live ones to end. False if `timeout` seconds were too few."""
        with self._changed:
            self._accepting = False
            return self._changed.wait_for(lambda: not self._answers, timeout)

    def shutdown(self, finish: bool = False, timeout: float | None = None) -> None:
        """Stop the thread. `finish`: let live requests end first, for up to `timeout` seconds; the rest is aborted."""
        if finish:
            self.drain(timeout)
        with self._changed:
            self._accepting = False
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._grammars.close()

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive()

    def next_opening(self) -> float | None:
        """About when the running step ends, by `time.monotonic()`: a request that is here by then can join the next.

        In the past where no step runs; None where one more request would have to wait for others to end.
        """
        with self._changed:
            full = self._num_free_rows <= len(self._submitted) or self._stats.num_requests_waiting > 0
            return None if full else self._step_ends

    def is_waiting(self, request_id: str) -> bool:
        """Whether, as of the last step, the request is in the queue and holds no pages."""
        return request_id in self._waiting

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
                    self._unpublished = self._execute(schedule)
        except Exception as failure:
            logger.exception("the engine thread died")
            error = f"the engine failed: {failure}"
        finally:
            self._end_all(error)

    def _execute(self, schedule: Schedule) -> StepResult:
        num_tokens = sum(schedule.num_tokens.values())
        started = time.monotonic()
        self._step_ends = started + self._step_time.estimate(num_tokens)
        result = self._core.run(schedule)
        self._step_time.observe(num_tokens, time.monotonic() - started)
        return result

    def _take_in(self) -> Schedule | None:
        """Between two steps: wait for work, take the new requests, end the cancelled ones, and decide the next step.

        What the last step has brought is told only then: whoever hears it wants the interpreter, which this thread
        needs until the next step's arithmetic has begun.
        """
        with self._changed:
            if self._cancelled or not self._core.has_work:
                self._publish()
            self._changed.wait_for(
                lambda: self._core.has_work or self._submitted or self._cancelled or self._checks or self._stopping
            )
            for request in self._submitted:
                self._core.add(request)
            self._submitted.clear()
            for answers in self._cancelled:
                self._abort(answers.live)
            self._cancelled.clear()
            for done in self._checks:
                try:
                    done.set_result(self._core.check())
                except Exception as error:
                    done.set_exception(error)
            self._checks.clear()
            schedule = None if self._stopping else self._core.schedule()
            self._observe()
            self._publish()
            return schedule

    def _abort(self, sequence_ids: Iterable[str]) -> None:
        ended = [self._core.abort(sequence_id) for sequence_id in list(sequence_ids)]
        self._deliver([output for output in ended if output is not None])

    def _observe(self) -> None:
        """What the door knows of the core, which is the thread's."""
        self._stats = self._core.stats()
        self._num_free_rows = self._core.scheduler.num_free_rows
        self._waiting = frozenset(request.request_id for request in self._core.scheduler.waiting)

    def _publish(self) -> None:
        """Tell what the last step has brought, if it has not been told yet. Called with the lock held."""
        result, self._unpublished = self._unpublished, None
        if result is not None:
            self._records.append(result.record)
            self._observe()
            self._deliver(result.outputs)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand each mailbox its outputs at once. Called with the lock held: a mailbox's `put` must not block."""
        by_mailbox: dict[Mailbox, list[RequestOutput]] = {}
        for output in outputs:
            answers = self._sequences[output.request_id]
            if output.finished:
                del self._sequences[output.request_id]
            if news := answers.take(output):
                by_mailbox.setdefault(answers.mailbox, []).extend(news)
            if not answers.live:
                del self._answers[answers.request_id]
            elif output.finish_reason is FinishReason.ERROR:
                self._cancelled.append(answers)
        for mailbox, news in by_mailbox.items():
            try:
                mailbox.put(news)
            except Exception:
                logger.exception("a mailbox refused %d outputs", len(news))
        if not self._answers:
            self._changed.notify_all()

    def _end_all(self, error: str | None) -> None:
        """The last thing the thread does: no consumer is left waiting."""
        with self._changed:
            self._publish()
            self._accepting = False
            if error is None:
                self._abort(self._core.requests)
                self._observe()
            reason = FinishReason.ABORT if error is None else FinishReason.ERROR
            self._deliver([RequestOutput(i, finish_reason=reason, error=error) for i in list(self._sequences)])
            for done in self._checks:
                done.set_exception(RuntimeError(error or "the engine has stopped"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

"""One iteration of in-flight batching: schedule -> execute -> sample -> commit. No threads, no clocks but for records.

`EngineCore` is driven by one thread (see `engine.py`), or step by step by a test.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.beam_request import rank_beams
from ifb_handler.engine.commit import Committer
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.draft_model import DraftModelProposer
from ifb_handler.engine.errors import ConfigError
from ifb_handler.engine.executor import Executor
from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.latency_target import LatencyTarget
from ifb_handler.engine.logprobs import read_prompts, token_logprobs
from ifb_handler.engine.ngram_proposer import NgramProposer
from ifb_handler.engine.outputs import EngineStats, FinishReason, RequestOutput, StepRecord, TokenLogprobs
from ifb_handler.engine.policies import (
    BATCHING,
    CAPACITY,
    KV_RESERVATION,
    PREFILL_PRIORITY,
    SCHEDULING_POLICY,
    Policies,
)
from ifb_handler.engine.prefix_cache import PrefixCache
from ifb_handler.engine.proposer import Proposer
from ifb_handler.engine.request import Request, RequestState
from ifb_handler.engine.sampler import Sampler
from ifb_handler.engine.scheduler import Schedule, Scheduler
from ifb_handler.engine.speculation import Speculator
from ifb_handler.engine.swap_space import SwapSpace
from ifb_handler.engine.token_masks import Filling, MaskFiller

_GIB = 1 << 30

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The news of each request that a step brought forward or ended, and the record of the step."""

    outputs: list[RequestOutput]
    record: StepRecord


class EngineCore:
    """The scheduler, the pool, the executor and the sampler of one model, and the requests that are alive."""

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        max_num_seqs = config.max_num_seqs
        budget = config.max_num_batched_tokens or max(executor.max_num_batched_tokens, max_num_seqs)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = budget
        self.executor = executor
        try:
            self.pool = KVPool(
                executor.num_blocks,
                config.block_size,
                max_num_seqs,
                executor.max_model_len,
                executor.sliding_window,
                max_chunk=budget if config.enable_chunked_prefill else None,
            )
        except MemoryError as error:
            raise ConfigError(f"max_num_seqs: no memory for the block tables of {max_num_seqs} sequences") from error
        self.cache = PrefixCache(self.pool) if config.enable_prefix_caching else None
        target = config.target_itl_ms
        self.latency_target = None if target is None else LatencyTarget(target / 1e3, budget)
        swap = SwapSpace(executor.allocate_swap_space(int(config.swap_space * _GIB)), config.preemption_mode)
        self.scheduler = Scheduler(self.pool, max_num_seqs, budget, self.cache, _policies(config), swap)
        self.sampler = Sampler(max_num_seqs, executor.eos_token_ids)
        self.mask_filler = MaskFiller(executor.vocab_size, executor.eos_token_ids)
        self.speculator = self._make_speculator(config)
        self.requests: dict[str, Request] = {}
        self.committer = Committer(self.requests, self.scheduler, self.cache)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swapped_pages = 0

    def _make_speculator(self, config: EngineConfig) -> Speculator | None:
        if config.speculative_method is None:
            return None
        proposer: Proposer
        if config.speculative_method == "ngram":
            proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        else:
            proposer = DraftModelProposer(self.executor, self.sampler, self.pool)
        return Speculator(proposer, config.num_speculative_tokens, self.pool)

    @property
    def max_request_len(self) -> int:
        """Most tokens of one request, prompt and answer: the model's length, or what the pool has room for."""
        return self.pool.max_sequence_len

    def max_beam_len(self, num_prompt_tokens: int, width: int) -> int:
        """As `max_request_len`, of each of the beams, which share only the full pages of their prompt."""
        shared = num_prompt_tokens // self.pool.block_size
        pages = shared + (self.pool.num_blocks - shared) // width
        return min(self.executor.max_model_len, pages * self.pool.block_size)

    def add(self, request: Request) -> None:
        """Queue a request whose prompt has been found to fit."""
        longest = self.executor.max_shared_prompt_len
        if longest is not None and request.num_prompt_tokens > longest:
            request.cache_namespace = request.cache_namespace, request.num_prompt_tokens
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its pages are free when this returns. None if it is not alive."""
        request = self.requests.get(request_id)
        return None if request is None else self.committer.finish(request, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepResult | None:
        """Run one iteration; None at once if there is nothing to run."""
        schedule = self.schedule()
        return None if schedule is None else self.run(schedule)

    def schedule(self) -> Schedule | None:
        """Decide the next step: check, evict, fill. None if there is nothing to run."""
        started = time.perf_counter()
        if self.latency_target is not None:
            decoding = sum(r.num_next for r in self.scheduler.running if r.state is RequestState.DECODE)
            self.scheduler.max_num_batched_tokens = self.latency_target.budget(decoding)
        schedule = self.scheduler.schedule()
        if not schedule.num_tokens:
            return None
        self.num_preemptions += len(schedule.preempted)
        for request in (*schedule.admitted, *schedule.forked):
            self.sampler.state.set(
                request.slot, request.params, request.seed, request.tokens, request.num_prompt_tokens
            )
            request.times.scheduled = request.times.scheduled or time.monotonic()
            if self.speculator is not None:
                self.speculator.proposer.start(request)
        schedule.seconds = time.perf_counter() - started
        return schedule

    def run(self, schedule: Schedule) -> StepResult:
        """Execute, sample and commit what `schedule` decided.

        A failure to execute or sample ends the requests of this step with an error, and only those; it is raised only
        if the executor cannot go on.
        """
        started = time.perf_counter()
        prefill = tuple((r.request_id, n) for r, n in schedule.num_tokens.items() if r.state is RequestState.PREFILL)
        decode = tuple(r.request_id for r in schedule.num_tokens if r.state is RequestState.DECODE)
        seconds: dict[str, float] = {}
        used_blocks = self.pool.num_used
        try:
            self._move_pages(schedule)
            moved = time.perf_counter()
            drafts = {} if self.speculator is None else self.speculator.draft(schedule)
            drafted = time.perf_counter()
            batch = Batch.build(schedule.num_tokens, self.pool, drafts)
            masks = self.mask_filler.begin([batch.requests[row] for row in batch.sample_rows.tolist()])
            scheduled = time.perf_counter()
            logits = self.executor.execute(batch)
            read_prompts(batch, self.executor)
            executed = time.perf_counter()
            candidates = rank_beams(batch, logits, self.sampler.state.edits)
            tokens = self._sample(batch, logits, masks)
            sampled = time.perf_counter()
            if len(prefill) and len(batch.token_ids) > 2 * len(decode):
                self.scheduler.swap.measured(executed - scheduled, num_tokens=len(batch.token_ids))
        except Exception as error:
            if not self.executor.is_usable():
                raise
            logger.exception("step %d failed; its %d requests end", self.num_steps, len(schedule.num_tokens))
            alive = dict.fromkeys(r.owner for r in schedule.num_tokens if r.state is not RequestState.FINISHED)
            outputs = [self.committer.fail(r, f"the step failed: {error}") for r in alive]
            self.executor.take_seconds()
        else:
            outputs = self.committer.commit(schedule, batch, drafts, tokens, self.speculator)
            outputs += self.committer.advance_beams(schedule, candidates)
            committed = time.perf_counter()
            seconds = self.executor.take_seconds()
            seconds["rest"] = moved - started + executed - scheduled - sum(seconds.values())
            seconds |= {
                "scheduling": schedule.seconds + scheduled - drafted,
                "sampling": sampled - executed,
                "bookkeeping": committed - sampled,
            }
            if self.speculator is not None:
                seconds["drafting"] = drafted - moved
            if self.latency_target is not None:
                self.latency_target.observe(len(batch.token_ids), time.perf_counter() - started)
            if self.speculator is not None and not prefill:
                self.speculator.observe(len(batch.token_ids), time.perf_counter() - started)
        record = StepRecord(
            step=self.num_steps,
            started=started,
            duration=schedule.seconds + time.perf_counter() - started,
            waiting=tuple(r.request_id for r in self.scheduler.waiting),
            prefill=prefill,
            decode=decode,
            preempted=tuple(r.request_id for r in schedule.preempted),
            finished=tuple(o.request_id for o in outputs if o.finished),
            used_blocks=used_blocks,
            total_blocks=self.pool.num_blocks,
            seconds=seconds,
        )
        self.num_steps += 1
        return StepResult(outputs, record)

    def _move_pages(self, schedule: Schedule) -> None:
        """A page that is copied may be another's by the end of the step: it is read before anything comes in."""
        started = time.perf_counter()
        if schedule.swap_out:
            self.executor.swap_out(schedule.swap_out)
        swapped_out = time.perf_counter()
        if schedule.copies:
            self.executor.copy_pages(schedule.copies)
        copied = time.perf_counter()
        if schedule.swap_in:
            self.executor.swap_in(schedule.swap_in)
        if num_pages := len(schedule.swap_out) + len(schedule.swap_in):
            self.num_swapped_pages += num_pages
            seconds = swapped_out - started + time.perf_counter() - copied
            self.scheduler.swap.measured(seconds, num_pages=num_pages)

    def _sample(
        self, batch: Batch, logits: torch.Tensor, masks: Filling | None
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """A token for each of the batch's `sample_tokens`, with its log probability where it was asked for."""
        if not len(batch.sample_rows):
            return []
        rows = [batch.requests[row] for row in batch.sample_rows.tolist()]
        slots = np.fromiter((r.slot for r in rows), np.int64, len(rows))
        generated = batch.positions[batch.sample_tokens] + 1
        generated -= np.fromiter((r.num_prompt_tokens for r in rows), np.int64, len(rows))
        asking = [i for i, request in enumerate(rows) if request.params.logprobs is not None]
        raw = logits[asking].log_softmax(-1) if asking else None  # before the sampler edits the logits
        token_ids = self.sampler.sample(logits, slots, generated, masks and masks.result()).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            chosen = [max(token_ids[i], 0) for i in asking]  # who is given INVALID_TOKEN hears of no logprobs
            num_top = [rows[i].params.logprobs for i in asking]
            for i, one in zip(asking, token_logprobs(raw, chosen, num_top), strict=True):
                logprobs[i] = one
        return list(zip(token_ids, logprobs, strict=True))

    def stats(self) -> EngineStats:
        return EngineStats(
            num_requests_running=len(self.scheduler.running),
            num_requests_waiting=len(self.scheduler.waiting),
            used_blocks=self.pool.num_used,
            total_blocks=self.pool.num_blocks,
            num_preemptions=self.num_preemptions,
            prompt_tokens=self.committer.prompt_tokens,
            generation_tokens=self.committer.generation_tokens,
            request_success=dict(self.committer.finished),
            num_steps=self.num_steps,
            prefix_cache_queries=0 if self.cache is None else self.cache.queries,
            prefix_cache_hits=0 if self.cache is None else self.cache.hits,
            spec_decode_num_draft_tokens=0 if self.speculator is None else self.speculator.num_draft_tokens,
            spec_decode_num_accepted_tokens=0 if self.speculator is None else self.speculator.num_accepted_tokens,
        )

    def check(self) -> None:
        """Prove that pool, scheduler and requests agree; else RuntimeError."""
        self.scheduler.check()
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        if {r.request_id for r in alive} != set(self.requests) or len(alive) != len(self.requests):
            raise RuntimeError("engine: a live request is neither running nor waiting, or both")


def _policies(config: EngineConfig) -> Policies:
    return Policies(
        batching=BATCHING[config.batching](),
        ordering=SCHEDULING_POLICY[config.scheduling_policy](),
        prefill_priority=PREFILL_PRIORITY[config.prefill_priority](),
        capacity=CAPACITY[config.capacity](),
        kv_reservation=KV_RESERVATION[config.kv_reservation](),
        enable_chunked_prefill=config.enable_chunked_prefill,
    )

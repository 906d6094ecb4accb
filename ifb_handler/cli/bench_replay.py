"""Run a workload on an engine core, step by step in this thread, and write down all that happened.

Without the engine's thread a step's schedule can be looked at before it runs: who is in the batch, and whose pages
are held for what. Arrivals are by the clock: a request that comes during a step waits for the next.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ifb_handler.cli.errors import CliError, UsageError
from ifb_handler.cli.workloads import Job, longest
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request, RequestState
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.scheduler import Schedule
from ifb_handler.engine.stopping import OutputAssembler


@dataclass
class ReplayedStep:
    """One step; requests are numbered as their jobs.

    ended            seconds from the start of the run to its end
    duration         seconds
    prefill          tokens by request
    decode, padding  requests that made a token, and rows of a static batch that have ended
    num_waiting      requests left in the queue
    preempted        how many lost their pages
    reserved         token places in the pages in use
    unwritten        of them, without keys and values after the step
    never_written    of them, without any until they were given back; known once the run is over
    total            token places in the pool
    """

    ended: float
    duration: float
    prefill: dict[int, int]
    decode: list[int]
    padding: list[int]
    num_waiting: int
    preempted: int
    reserved: int
    unwritten: int
    total: int
    never_written: int = 0


@dataclass
class Run:
    """What became of the jobs; seconds are from the run's start.

    arrived    by job; the time at which it was due, whether or not a step was just running
    tokens     by job, when each token of its answer was there
    cached     by job, tokens of the prompt found in the prefix cache
    """

    jobs: Sequence[Job]
    steps: list[ReplayedStep] = field(default_factory=list)
    arrived: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended if self.steps else 0.0


Watch = Callable[[Run, float], bool]


class _Asked(Request):
    """Its answer ends sooner than it may: what the engine can know of its length is what it asked for."""

    @property
    def max_len(self) -> int:
        return self.num_prompt_tokens + self.params.max_tokens


def replay(core: EngineCore, jobs: Sequence[Job], vocabulary: Vocabulary, watch: Watch | None = None) -> Run:
    """Run all jobs, greedy, to their ends; `watch(run so far, seconds)` is asked after each step whether to give up.

    UsageError if a job fits neither the model nor the pool, CliError if one fails.
    """
    most = max(longest(jobs))
    if most > core.max_request_len:
        raise UsageError(
            f"the workload has a request of {most} tokens; model and pool hold at most {core.max_request_len}"
        )
    return _Replay(core, jobs, vocabulary).run(watch)


def queue_job(
    core: EngineCore, index: int, job: Job, prompt: list[int], vocabulary: Vocabulary, arrival: int | None = None
) -> Request:
    """Queue the job with this prompt, its number as its id; `arrival` None: it is also its place in the order."""
    params = SamplingParams(temperature=0.0, max_tokens=job.limit, ignore_eos=True)
    text = OutputAssembler(params, (), job.num_output_tokens, Detokenizer(vocabulary, prompt))
    order = index if arrival is None else arrival
    request = _Asked(GenerationRequest(str(index), prompt, params), order, seed=0, text=text)
    core.add(request)
    return request


class _Replay:
    def __init__(self, core: EngineCore, jobs: Sequence[Job], vocabulary: Vocabulary) -> None:
        self._core = core
        self._vocabulary = vocabulary
        self._run = Run(jobs)
        free = [(job.at, i) for i, job in enumerate(jobs) if job.follows is None and job.beside is None]
        self._due = sorted(free, reverse=True)  # the next one last
        self._requests: dict[int, Request] = {}
        self._held: dict[tuple[int, int], _Held] = {}

    def run(self, watch: Watch | None) -> Run:
        core, run = self._core, self._run
        start = time.monotonic()
        while self._due or core.has_work:
            now = time.monotonic() - start
            while self._due and self._due[-1][0] <= now:
                self._submit(*self._due.pop())
            if not core.has_work:
                time.sleep(self._due[-1][0] - now)
                continue
            schedule = core.schedule()
            if schedule is None:
                raise CliError(f"nothing can run of {core.requests}")
            step = self._look_at(schedule)
            result = core.run(schedule)
            step.ended, step.duration = time.monotonic() - start, result.record.duration
            run.steps.append(step)
            for output in result.outputs:
                self._take(output, step.ended)
            if watch is not None and watch(run, step.ended):
                for request_id in list(core.requests):
                    core.abort(request_id)
                break
        self._settle()
        return run

    def _submit(self, at: float, index: int) -> None:
        job = self._run.jobs[index]
        before = [] if job.follows is None else self._requests[job.follows].tokens
        prompt = [*before, *(token % self._core.executor.vocab_size for token in job.prompt_token_ids)]
        self._requests[index] = queue_job(self._core, index, job, prompt, self._vocabulary, len(self._run.arrived))
        self._run.arrived[index] = at
        self._run.tokens[index] = []

    def _take(self, output: RequestOutput, now: float) -> None:
        if output.error is not None:
            raise CliError(f"request {output.request_id} failed: {output.error}")
        run, index = self._run, int(output.request_id)
        run.tokens[index].append(now)
        run.cached[index] = output.num_cached_tokens
        for i, job in enumerate(run.jobs):
            if (job.follows == index and output.finished) or job.beside == (index, output.num_generated_tokens):
                bisect.insort(self._due, (now, i), key=lambda entry: -entry[0])

    def _look_at(self, schedule: Schedule) -> ReplayedStep:
        """The step that is about to run."""
        scheduler, pool = self._core.scheduler, self._core.pool
        rows: dict[RequestState, list[int]] = {}
        for request in schedule.num_tokens:
            rows.setdefault(request.state, []).append(int(request.request_id))
        unwritten = 0
        for request in (*scheduler.running, *scheduler.ended):
            places = int(pool.num_pages[request.slot]) * pool.block_size
            written = request.num_computed + schedule.num_tokens.get(request, 0)
            unwritten += places - written
            held = self._held.setdefault((int(request.request_id), request.num_preemptions), _Held())
            held.written = written
            held.places.append((len(self._run.steps), places))
        return ReplayedStep(
            ended=0.0,
            duration=0.0,
            prefill={i: schedule.num_tokens[self._requests[i]] for i in rows.get(RequestState.PREFILL, [])},
            decode=rows.get(RequestState.DECODE, []),
            padding=rows.get(RequestState.FINISHED, []),
            num_waiting=len(scheduler.waiting),
            preempted=len(schedule.preempted),
            reserved=pool.num_used * pool.block_size,
            unwritten=unwritten,
            total=pool.num_blocks * pool.block_size,
        )

    def _settle(self) -> None:
        """Now that it is known how much each came to write. Only full pages are shared, so nothing counts twice."""
        for held in self._held.values():
            for step, places in held.places:
                self._run.steps[step].never_written += max(0, places - held.written)


@dataclass
class _Held:
    """Pages of a request, from its admission until it ends or is preempted: (step, token places), and the most tokens
    written to them."""

    places: list[tuple[int, int]] = field(default_factory=list)
    written: int = 0

"""Seeded request mixes for the benchmarks: what is asked, and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_LOWEST_ID, _HIGHEST_ID = 100, 40_000  # past the special tokens, within the vocabulary of the embedded model


@dataclass(frozen=True)
class Job:
    """A prompt of token ids and how many tokens its answer has; end-of-sequence is ignored.

    max_tokens    what the request asks for at most: all that an engine can know of the answer's length before its end;
                  None: num_output_tokens
    at            seconds from the start to its arrival
    follows       the job whose prompt and answer come before `prompt_token_ids`: it arrives when that one has ended
    beside        (job, tokens): it arrives when that job's answer has so many tokens, however fast the machine
    """

    prompt_token_ids: list[int]
    num_output_tokens: int
    max_tokens: int | None = None
    at: float = 0.0
    follows: int | None = None
    beside: tuple[int, int] | None = None

    @property
    def limit(self) -> int:
        return self.max_tokens or self.num_output_tokens


def mixed(num_requests: int, seed: int) -> list[Job]:
    """Prompts of 16 to 256 tokens, uniform; answers exponential with mean 64, from 4 to 256. All at once."""
    source = random.Random(seed)
    jobs = []
    for _ in range(num_requests):
        prompt_len = source.randint(16, 256)
        output_len = int(min(256, max(4, source.expovariate(1 / 64))))
        jobs.append(Job(_tokens(source, prompt_len), output_len, max_tokens=256))
    return jobs


def exponential(num_requests: int, seed: int) -> list[Job]:
    """Prompts of 4 to 12 tokens; answers exponential with mean 40, at most 320, where 512 are allowed for. All at once.

    The queue is full until the end is near (saturation), and batching by request wastes the most.
    """
    source = random.Random(seed)
    jobs = []
    for _ in range(num_requests):
        prompt = _tokens(source, source.randint(4, 12))
        jobs.append(Job(prompt, int(min(320, max(1, source.expovariate(1 / 40)))), max_tokens=512))
    return jobs


def shared_prefix(num_requests: int, seed: int) -> list[Job]:
    """A system prompt of 600 tokens in common, 8 to 32 of their own, answers of 8. All at once."""
    source = random.Random(seed)
    prefix = _tokens(source, 600)
    return [Job(prefix + _tokens(source, source.randint(8, 32)), 8) for _ in range(num_requests)]


TURNS = 8


def chat(num_requests: int, seed: int) -> list[Job]:
    """Conversations of 8 turns, `num_requests` turns in all: each sends all that was said before and 48 tokens more."""
    source = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < num_requests:
        for turn in range(min(TURNS, num_requests - len(jobs))):
            jobs.append(Job(_tokens(source, 48), 24, follows=len(jobs) - 1 if turn else None))
    return jobs


def long_arrivals(num_requests: int, seed: int) -> list[Job]:
    """Eight answers of 192 tokens are being written; while they are, prompts of 2,000 tokens arrive one by one."""
    source = random.Random(seed)
    num_running = min(8, max(1, num_requests - 1))
    num_long = num_requests - num_running
    running = [Job(_tokens(source, 32), 192) for _ in range(num_running)]
    gap = 176 // max(1, num_long)
    return running + [Job(_tokens(source, 2000), 4, beside=(0, 16 + i * gap)) for i in range(num_long)]


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randint(_LOWEST_ID, _HIGHEST_ID) for _ in range(count)]


@dataclass(frozen=True)
class Workload:
    """`make(num_requests, seed)`; `num_requests` is what it is made for."""

    make: Callable[[int, int], list[Job]]
    num_requests: int


WORKLOADS = {
    "mixed": Workload(mixed, 64),
    "exponential": Workload(exponential, 128),
    "shared_prefix": Workload(shared_prefix, 64),
    "chat": Workload(chat, 4 * TURNS),
    "long_arrivals": Workload(long_arrivals, 8 + 3),
}
# Those whose requests come all at once, or whenever they are made to.
OFFLINE = ("mixed", "exponential", "shared_prefix")


def poisson(jobs: Sequence[Job], rate: float, seed: int) -> list[Job]:
    """The jobs with exponential gaps between their arrivals, `rate` a second on average.

    With the same seed the gaps are the same but for their scale, so that two rates differ in nothing else.
    """
    source = random.Random(seed)
    at = 0.0
    timed = []
    for job in jobs:
        at += source.expovariate(1.0) / rate
        timed.append(replace(job, at=at))
    return timed


def longest(jobs: Sequence[Job]) -> list[int]:
    """Most tokens of each job, prompt and answer, as the engine must expect."""
    ends: list[int] = []  # of prompt and answer as they will be
    limits = []
    for job in jobs:
        prompt = len(job.prompt_token_ids) + (ends[job.follows] if job.follows is not None else 0)
        ends.append(prompt + job.num_output_tokens)
        limits.append(prompt + job.limit)
    return limits


def turn_of(jobs: Sequence[Job], index: int) -> int:
    """How many jobs came before it in its conversation."""
    parent = jobs[index].follows
    return 0 if parent is None else 1 + turn_of(jobs, parent)

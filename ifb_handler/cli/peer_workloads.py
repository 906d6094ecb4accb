"""The seeded workloads that systems are measured by side by side: what all of them can be asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ifb_handler.cli.workloads import Job, _tokens, mixed, poisson

_TURNS = 4


def chat(num_requests: int, seed: int) -> list[Job]:
    """Conversations of 4 turns, `num_requests` turns in all, after a system prompt of 256 tokens that all share.

    A turn sends what was said before and 16 to 64 tokens more; answers have 32 to 64.
    """
    source = random.Random(seed)
    system = _tokens(source, 256)
    jobs: list[Job] = []
    while len(jobs) < num_requests:
        for turn in range(min(_TURNS, num_requests - len(jobs))):
            said = _tokens(source, source.randint(16, 64))
            follows = len(jobs) - 1 if turn else None
            jobs.append(Job(said if turn else system + said, source.randint(32, 64), follows=follows))
    return jobs


def long(num_requests: int, seed: int) -> list[Job]:
    """Prompts of 1,000 to 3,000 tokens, answers of 16 to 32."""
    source = random.Random(seed)
    return [Job(_tokens(source, source.randint(1000, 3000)), source.randint(16, 32)) for _ in range(num_requests)]


def single(num_requests: int, seed: int) -> list[Job]:
    """One stream: prompts of 64 tokens and answers of 64, each asked for when the one before it has ended."""
    source = random.Random(seed)
    return [Job(_tokens(source, 64), 64, beside=(i - 1, 64) if i else None) for i in range(num_requests)]


@dataclass(frozen=True)
class PeerWorkload:
    """`make(num_requests, seed)`; `num_requests` is what it is made for.

    prefix_caching    on in every system that has it, and the prompts are others in every round
    """

    make: Callable[[int, int], list[Job]]
    num_requests: int
    prefix_caching: bool = False


PEER_WORKLOADS = {
    "mixed": PeerWorkload(mixed, 64),
    "chat": PeerWorkload(chat, 16 * _TURNS, prefix_caching=True),
    "long": PeerWorkload(long, 16),
    "single": PeerWorkload(single, 8),
}


def arriving(jobs: Sequence[Job], rate: float, seed: int) -> list[Job]:
    """The jobs as Poisson arrivals, `rate` a second. A conversation arrives with its first turn; where one request
    waits for another's end, it comes at its time or then, whichever is later."""
    free = [index for index, job in enumerate(jobs) if job.follows is None]
    timed = poisson([jobs[index] for index in free], rate, seed)
    at = {index: job.at for index, job in zip(free, timed, strict=True)}
    return [replace(job, at=at.get(index, 0.0)) for index, job in enumerate(jobs)]


def warm_up(workload: PeerWorkload, num_requests: int, seed: int) -> list[Job]:
    """The beginning of the same kind of work with other tokens, its answers cut short."""
    jobs = workload.make(num_requests, seed)
    shorter = [min(16, job.num_output_tokens) for job in jobs]
    return [
        replace(job, num_output_tokens=shorter[i], beside=job.beside and (job.beside[0], shorter[job.beside[0]]))
        for i, job in enumerate(jobs)
    ]

"""Seeded request mixes for the benchmarks: what is asked, not when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A prompt of token ids and how many tokens to answer with (end-of-sequence ignored)."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def mixed(num_requests: int = 64, seed: int = 0) -> list[Job]:
    """Prompts of 16 to 256 tokens, uniform; answers exponential with mean 64, from 4 to 256."""
    source = random.Random(seed)
    jobs = []
    for _ in range(num_requests):
        prompt_len = source.randint(16, 256)
        output_len = int(min(256, max(4, source.expovariate(1 / 64))))
        jobs.append(Job([source.randint(100, 40_000) for _ in range(prompt_len)], output_len))
    return jobs


WORKLOADS: dict[str, Callable[[int, int], list[Job]]] = {"mixed": mixed}

"""What the engine says of a request: plain data, safe to hand to another thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class FinishReason(str, Enum):
    """Why a request ended. `stop` and `length` are the OpenAI values; the others never reach a successful answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    __str__ = str.__str__


@dataclass
class RequestTimes:
    """`time.monotonic()` seconds; None until it happens."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities where one token was chosen (or, in a prompt, given), before any filter of sampling.

    top    (token id, logprob) of the likeliest tokens, likeliest first, as many as were asked for
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class RequestOutput:
    """News of one request since the last output for it (`Engine.generate` adds the news up: there it is the whole).

    text, token_ids         what is new; text can lag behind the ids (half a character, the beginning of a stop string)
    index                   which of the request's `n` answers this is news of
    logprobs                one for each of token_ids; None if they were not asked for
    prompt_logprobs         on the first output of an answer, if asked for: one a prompt token, None for the first
    num_cached_tokens       prompt tokens whose keys and values were found in the prefix cache
    num_generated_tokens    the total so far
    score                   of an answer of a beam search: the sum of its tokens' log probabilities over its length to
                            the power of length_penalty
    beams                   within the engine, on the last output of a beam search: its answers, best first
    finish_reason           set on the last output only
    stop_reason             the stop string or stop token id that ended it; None for the model's own EOS
    error, error_param      what went wrong, with finish_reason `error`; the field of the request at fault, if one is
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    score: float | None = None
    beams: list[RequestOutput] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_param: str | None = None
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepRecord:
    """One iteration, for whoever draws or tests it.

    started, duration    `time.perf_counter()` seconds
    waiting              request ids left in the queue once the step was filled
    prefill, decode      request ids that were in the step, each prefill with the tokens of its chunk
    used_blocks          pages owned while the step ran
    seconds              by section: scheduling, gemm, attention, rest, sampling, bookkeeping, and with speculation
                         drafting; empty if the step failed
    """

    step: int
    started: float
    duration: float
    waiting: tuple[str, ...]
    prefill: tuple[tuple[str, int], ...]
    decode: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    used_blocks: int
    total_blocks: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class EngineStats:
    """Gauges of now and counters since start, by their meaning in vLLM's metrics."""

    num_requests_running: int
    num_requests_waiting: int
    used_blocks: int
    total_blocks: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    request_success: dict[str, int]
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0

    @property
    def kv_cache_usage_perc(self) -> float:
        """Used share of the pool, 0 to 1 (vLLM's name says percent, its value is a fraction)."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0

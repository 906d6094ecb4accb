"""How one request wants its tokens chosen and when it wants to stop. Names, meanings and ranges are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ifb_handler.engine.errors import RequestError

MAX_SEED = 2**64 - 1
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """Validated on construction: a bad value raises RequestError naming the field, the value and the range.

    max_tokens                 most tokens to generate, >= 1; None means up to the model's length
    min_tokens                 no stop of any kind before this many tokens, >= 0
    temperature                0 to 2; 0 is greedy, and so is anything below 1e-5
    top_k                      keep the k most likely tokens; 0 or -1 keeps all
    top_p                      keep the smallest set of tokens whose probabilities reach it, (0, 1]
    min_p                      drop tokens less likely than min_p times the likeliest, [0, 1]
    seed                       0 to 2**64 - 1; the same seed gives the same tokens whoever the neighbours are
    stop                       text that ends the answer, not part of it unless include_stop_str_in_output
    stop_token_ids             token ids that end the answer beside the model's own end-of-sequence ids
    ignore_eos                 do not stop at the model's end-of-sequence ids
    skip_special_tokens        leave special tokens out of the text
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: {self.min_tokens} is above max_tokens, {self.max_tokens}", "min_tokens")
        _real("temperature", self.temperature, 0.0, 2.0)
        _integer("top_k", self.top_k, -1, None)
        _real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise RequestError(f"{field}: {getattr(self, field)!r} is not true or false", field)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))


def _integer(field: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise RequestError(f"{field}: {value!r} is not {allowed}", field)


def _real(field: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high or (low_open and value == low):  # type: ignore[operator]
        bracket = "(" if low_open else "["
        raise RequestError(f"{field}: {value!r} is not a number in {bracket}{low:g}, {high:g}]", field)


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop: {stop!r} is not a non-empty string or a list of them", "stop")
    return tuple(strings)


def _token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int and i >= 0 for i in ids):
        raise RequestError(f"stop_token_ids: {ids!r} is not a list of token ids", "stop_token_ids")
    return tuple(ids)

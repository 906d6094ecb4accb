"""The limits at the door: what an operator lets one request ask for. Each is an option of EngineConfig."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import Fields, text
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.sampling_params import SamplingParams

# OpenAI's word for a prompt, or a prompt with its answer, that is longer than it may be.
TOO_LONG = "context_length_exceeded"
# Seconds: a year.
LONGEST_TIMEOUT = 31_536_000


def check_sampling(params: SamplingParams, config: EngineConfig) -> None:
    """Raises a 400 APIError for a parameter beyond what the server allows."""
    stops = params.stop or ()
    _at_most("stop", len(stops), "max_stop_sequences", config, "stop strings")
    _at_most("stop", max(map(len, stops), default=0), "max_stop_length", config, "characters in one stop string")
    for name in ("n", "best_of"):
        _at_most(name, getattr(params, name, None), "max_n", config)
    for name in ("logprobs", "prompt_logprobs"):
        _at_most(name, getattr(params, name, None), "max_logprobs", config)


def check_batch(param: str, size: int, config: EngineConfig) -> None:
    """Raises a 400 for more prompts in one request than the server allows."""
    _at_most(param, size, "max_client_batch_size", config, "prompts in one request")


def check_sequences(count: int, config: EngineConfig) -> None:
    """Raises a 400 for more answers in one request, to all of its prompts, than even an empty queue takes."""
    _at_most("n", count, "max_num_waiting", config, "answers to one request")


def _at_most(param: str, value: int | None, option: str, config: EngineConfig, what: str = "") -> None:
    most = getattr(config, option)
    if value is not None and value > most:
        raise bad_field(param, f"{value}{what and f' {what}'} is above this server's {option}, {most}")


def handling(fields: Fields, config: EngineConfig) -> dict[str, Any]:
    """What every form of request may say of how it is handled, as Asked's `timeout`, `priority` and `cache_salt`."""
    priority = fields.get("priority")
    if priority is not None and type(priority) is not int:
        raise bad_field("priority", f"{shown(priority)} is not an integer")
    salt = text(fields, "cache_salt")
    if salt == "":
        raise bad_field("cache_salt", "is empty")
    return {"timeout": _timeout(fields, config), "priority": priority or 0, "cache_salt": salt}


def _timeout(fields: Fields, config: EngineConfig) -> float | None:
    """Seconds that the request may take: its `timeout`, at most the server's `request_timeout`; None: for ever."""
    value = fields.get("timeout")
    if value is None:
        return config.request_timeout
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LONGEST_TIMEOUT
    if not good:
        raise bad_field("timeout", f"{shown(value)} is not a number of seconds above 0, at most {LONGEST_TIMEOUT}")
    return min(value, config.request_timeout or math.inf)


def fit(
    params: SamplingParams, num_prompt_tokens: int, param: str, model: ServedModel, may_be_cut: bool = False
) -> SamplingParams:
    """The parameters for a prompt of that many tokens: without max_tokens, what `max_total_tokens` leaves.

    param         the prompt's field
    may_be_cut    max_tokens is no wish of the client's
    Raises a 400 APIError when the prompt, or the prompt with what is asked for, is longer than the server allows.
    """
    config = model.config
    check_tokens(num_prompt_tokens, param, model)
    if config.max_total_tokens is None:
        return params
    room = config.max_total_tokens - num_prompt_tokens
    if params.max_tokens is None or (may_be_cut and params.max_tokens > room):
        return dataclasses.replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise bad_field(
            "max_tokens",
            f"{params.max_tokens} and the prompt's {num_prompt_tokens} tokens are above this server's "
            f"max_total_tokens, {config.max_total_tokens}",
            TOO_LONG,
        )
    return params


def check_tokens(count: int, param: str, model: ServedModel) -> None:
    """Raises a 400 for more tokens than a prompt may have."""
    if count > model.max_prompt_tokens:
        raise bad_field(param, f"{count} tokens are above {_prompt_limit(model)}", TOO_LONG)


def check_characters(characters: int, param: str, model: ServedModel) -> None:
    """Raises a 400 for a text that is sure to be longer than a prompt may be, however it is tokenized."""
    fewest = model.fewest_tokens(characters)
    if fewest > model.max_prompt_tokens:
        raise bad_field(
            param, f"{characters} characters are at least {fewest} tokens, above {_prompt_limit(model)}", TOO_LONG
        )


def _prompt_limit(model: ServedModel) -> str:
    config, most = model.config, model.max_prompt_tokens
    if most == config.max_input_tokens:
        return f"this server's max_input_tokens, {most}"
    if config.max_total_tokens is not None and most == config.max_total_tokens - 1:
        return f"{most}, which max_total_tokens leaves to a prompt"
    return f"{most}: prompt and answer hold at most {model.max_model_len} tokens"

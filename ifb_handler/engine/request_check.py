"""What can never run is refused at the door, before it waits for anything."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.request import GenerationRequest
from ifb_handler.engine.sampling_params import SamplingParams


class RequestCheck:
    """Holds a request against the limits of the model, the pool and the batch. Safe to use from any thread."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self._core = core
        self._config = config
        self._vocab_size = core.executor.vocab_size

    def max_answer_len(self, request: GenerationRequest) -> int:
        """-> the most tokens it may generate. Raises RequestError if it can never run."""
        prompt = request.prompt_token_ids
        if not len(prompt):
            raise RequestError("prompt: is empty; it must hold at least one token", "prompt")
        if set(map(type, prompt)) != {int} or not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise RequestError(f"prompt: token ids are integers from 0 to {self._vocab_size - 1}", "prompt")
        for field, ids in request.params.token_ids.items():
            bad = [i for i in ids if i >= self._vocab_size]
            if bad:
                raise RequestError(f"{field}: {bad[0]} is not a token id, from 0 to {self._vocab_size - 1}", field)
        if request.params.num_sequences > self._config.max_num_waiting:
            field = "best_of" if request.params.ranked else "n"
            raise RequestError(
                f"{field}: {request.params.num_sequences} answers are more than the waiting queue holds: "
                f"max_num_waiting is {self._config.max_num_waiting}",
                field,
            )
        most = self._core.max_request_len
        room = most - len(prompt)
        if room < 1:
            raise RequestError(
                f"prompt: {len(prompt)} tokens leave no room for one more; prompt and answer hold at most "
                f"{most} tokens",
                "prompt",
            )
        if request.params.use_beam_search:
            room = self._room_for_beams(request.params, len(prompt))
        return room if request.params.max_tokens is None else min(room, request.params.max_tokens)

    def _room_for_beams(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """-> the most tokens of each beam's answer. Raises RequestError if so many beams can never run."""
        field = "n" if params.best_of is None else "best_of"
        for option in ("max_num_seqs", "max_num_batched_tokens"):
            most = getattr(self._core, option)
            if params.width > most:
                raise RequestError(f"{field}: {params.width} beams are more than {option}, {most}", field)
        if self._config.batching == "static":
            raise RequestError('use_beam_search: true needs "batching: continuous"', "use_beam_search")
        room = self._core.max_beam_len(num_prompt_tokens, params.width) - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"{field}: {params.width} beams after a prompt of {num_prompt_tokens} tokens are more than the KV pool "
                f"holds, {self._core.pool.num_blocks} pages of {self._config.block_size} tokens",
                field,
            )
        return room


def plain_integers(ids: Sequence[Any]) -> Sequence[Any]:
    """`ids` with numpy's and torch's integers as Python's; what is no integer, a truth value too, stays as it is."""
    if set(map(type, ids)) <= {int}:
        return ids
    try:
        return [
            i if isinstance(i, bool) or str(getattr(i, "dtype", "")) == "torch.bool" else operator.index(i) for i in ids
        ]
    except TypeError:
        return ids

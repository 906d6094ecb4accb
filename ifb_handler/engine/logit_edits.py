"""What a request asks to have changed in its row of logits before a token is chosen.

In this order: logit_bias, penalties (as transformers and vLLM do), then everything that forbids tokens, for which the
order does not matter: allowed_token_ids, bad_words, min_tokens, and the bit mask of a constrained request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ifb_handler.engine.bad_words import BadWords
from ifb_handler.engine.penalties import Penalties
from ifb_handler.engine.sampling_params import SamplingParams

Masks = tuple[np.ndarray, torch.Tensor]
"""(rows int [M], bits int32 [M, ceil(V / 32)]): in each of the rows, bit j % 32 of word j // 32 is set if token j is
allowed (the layout of xgrammar and llguidance)."""


class LogitEdits:
    """The settings of the slots that ask for edits; a batch in which none does costs one look at `active`."""

    def __init__(self, max_num_seqs: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._penalties = Penalties(max_num_seqs)
        self.active = np.zeros(max_num_seqs, bool)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        # By slot, for those that ask only.
        self._texts: dict[int, tuple[Sequence[int], int]] = {}
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._allowed: dict[int, np.ndarray] = {}
        self._stops: dict[int, np.ndarray] = {}
        self._bad_words: dict[int, BadWords] = {}

    def set(self, slot: int, params: SamplingParams, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """See `SamplerState.set`."""
        for settings in (self._texts, self._biases, self._allowed, self._stops, self._bad_words):
            settings.pop(slot, None)
        self._penalties.set(slot, params)
        self.min_tokens[slot] = min(params.min_tokens, np.iinfo(np.int64).max)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64)
            self._biases[slot] = ids, np.fromiter(params.logit_bias.values(), np.float32)
        if params.allowed_token_ids is not None:
            self._allowed[slot] = np.unique(np.array(params.allowed_token_ids, np.int64))
        if params.bad_words:
            self._bad_words[slot] = BadWords(params.bad_words)
        if params.min_tokens:
            # A constrained request's mask says where it may end.
            no_eos = params.ignore_eos or params.structured is not None
            stops = {*(params.stop_token_ids or ()), *(() if no_eos else self._eos_token_ids)}
            self._stops[slot] = np.array(sorted(stops), np.int64)
        self.active[slot] = self._penalties.active[slot] or any(
            slot in settings for settings in (self._biases, self._allowed, self._stops, self._bad_words)
        )
        if self.active[slot]:
            self._texts[slot] = tokens, num_prompt_tokens

    def apply(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, masks: Masks | None) -> None:
        """Edit `logits`, float32 [S, V], in place; a row whose request asks for nothing is not touched."""
        asking = np.flatnonzero(self.active[slots])
        if asking.size:
            self._apply(logits, [(row, int(slots[row])) for row in asking.tolist()], slots, positions)
        if masks is not None and len(masks[0]):
            _add_masks(logits, *masks)

    def _apply(
        self, logits: torch.Tensor, asking: list[tuple[int, int]], slots: np.ndarray, positions: np.ndarray
    ) -> None:
        biased = [(row, *self._biases[slot]) for row, slot in asking if slot in self._biases]
        if biased:
            at, biases = _places(logits, *zip(*biased, strict=True))
            logits[at] += biases
        penalised = [row for row, slot in asking if self._penalties.active[slot]]
        if penalised:
            rows = np.array(penalised)
            self._penalties.apply(logits, rows, slots[rows], [self._texts[slot] for slot in slots[rows].tolist()])
        limited = [(row, self._allowed[slot]) for row, slot in asking if slot in self._allowed]
        if limited:
            at, _ = _places(logits, *zip(*limited, strict=True))
            kept = logits[at]
            logits.index_fill_(0, torch.tensor([row for row, _ in limited], device=logits.device), -torch.inf)
            logits[at] = kept
        forbidden = [
            (row, self._bad_words[slot].forbidden_after(*self._texts[slot]))
            for row, slot in asking
            if slot in self._bad_words
        ]
        forbidden += [
            (row, self._stops[slot])
            for row, slot in asking
            if slot in self._stops and positions[row] < self.min_tokens[slot]
        ]
        if forbidden:
            at, _ = _places(logits, *zip(*forbidden, strict=True))
            logits[at] = -torch.inf


def _places(
    logits: torch.Tensor,
    rows: Sequence[int],
    ids: Sequence[np.ndarray],
    values: Sequence[np.ndarray] = (),
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """An index of `logits` for the ids of each row, and their values in the same order; ids outside it are left out."""
    row = np.repeat(np.array(rows), [len(each) for each in ids])
    column = np.concatenate(ids)
    inside = column < logits.shape[1]
    at = tuple(torch.from_numpy(each[inside]).to(logits.device) for each in (row, column))
    return at, torch.from_numpy(np.concatenate(values)[inside]).to(logits.device) if values else None


def _add_masks(logits: torch.Tensor, rows: np.ndarray, bits: torch.Tensor) -> None:
    """Adds minus infinity to what the masks forbid, eight tokens at a look-up: several times as fast as masked_fill."""
    vocab_size = logits.shape[1]
    octets = bits.to(logits.device).contiguous().view(torch.uint8)
    forbids = torch.nn.functional.embedding(octets.int(), _octets(logits.device)).flatten(1)[:, :vocab_size]
    if len(rows) == len(logits) and (rows[1:] > rows[:-1]).all():
        logits.add_(forbids)
    else:
        logits.index_add_(0, torch.from_numpy(np.asarray(rows, np.int64)).to(logits.device), forbids)


@cache
def _octets(device: torch.device) -> torch.Tensor:
    """float32 [256, 8]: 0 where a byte's bit is set, counted from the lowest, else minus infinity."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)

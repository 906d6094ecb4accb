"""Presence, frequency and repetition penalties: what a request has said before counts against saying it again.

Repetition (Keskar et al., "CTRL", 2019) scales the logit of every token of prompt and answer; frequency and presence
(OpenAI's API reference) are taken off the logits of the answer's tokens only: with c the times a token was generated,

    logit <- logit / repetition  if logit > 0 else logit * repetition       for every token seen
    logit <- logit - c * frequency - (c > 0) * presence

in this order, as in vLLM. Only the tokens that a request has seen are touched, so that a step costs what the contexts
hold and not what the vocabulary does; memory is taken when the first request asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ifb_handler.engine.sampling_params import SamplingParams

# Beyond these the order of the tokens no longer changes, but float32 could overflow.
_REPETITION_RANGE = (1e-30, 1e30)
_FIRST_WIDTH = 256


class Penalties:
    """The penalised requests' settings and tokens by slot, in matrices on the host.

    ids, counts    int64 [max_num_seqs, W]: each token that the slot's request has seen, once, and how many times it was
                   generated; only the first `sizes[slot]` columns of a row mean anything
    num_seen       how many of the request's tokens are in there
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.active = np.zeros(max_num_seqs, bool)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.sizes = np.zeros(max_num_seqs, np.int64)
        self.num_seen = np.zeros(max_num_seqs, np.int64)
        self.ids = self.counts = np.zeros((max_num_seqs, 0), np.int64)

    def set(self, slot: int, params: SamplingParams) -> None:
        """Gives `slot` to a request; its tokens are read when it is first sampled."""
        self.repetition[slot] = np.clip(params.repetition_penalty, *_REPETITION_RANGE)
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.active[slot] = params.penalised
        self.num_seen[slot] = 0

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, texts: Sequence[tuple[Sequence[int], int]]
    ) -> None:
        """Penalise `rows` of `logits`, float32 [S, V], in place; the other rows are not touched.

        slots    [len(rows)] the slot of each row, all of them active
        texts    each row's tokens so far, prompt and answer, and how many of them are the prompt's
        """
        self._see(slots, texts)
        sizes = self.sizes[slots]
        width = int(sizes.max())
        ids, counts = self.ids[slots, :width], self.counts[slots, :width]
        which, column = np.nonzero(np.arange(width) < sizes[:, None])
        counts = counts[which, column].astype(np.float32)
        at = torch.from_numpy(rows[which]).to(logits.device), torch.from_numpy(ids[which, column]).to(logits.device)
        repetition = torch.from_numpy(self.repetition[slots][which]).to(logits.device)
        taken_off = counts * self.frequency[slots][which] + (counts > 0) * self.presence[slots][which]
        values = logits[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = values.sub_(torch.from_numpy(taken_off).to(logits.device))

    def _see(self, slots: np.ndarray, texts: Sequence[tuple[Sequence[int], int]]) -> None:
        """Catch up with the requests' tokens: mostly each has one more than at the last step."""
        lengths = np.fromiter((len(tokens) for tokens, _ in texts), np.int64, len(texts))
        behind = lengths - self.num_seen[slots]
        one_more = np.flatnonzero((behind == 1) & (self.num_seen[slots] > 0))
        for i in np.flatnonzero((behind != 0) & ((behind != 1) | (self.num_seen[slots] == 0))).tolist():
            self._read(int(slots[i]), *texts[i])
        if one_more.size:
            self._count(slots[one_more], np.fromiter((texts[i][0][-1] for i in one_more.tolist()), np.int64))
        self.num_seen[slots] = lengths

    def _read(self, slot: int, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """All of a request's tokens, at its first step or the first after a preemption."""
        tokens = np.array(tokens, np.int64)
        if self.repetition[slot] == 1:
            tokens, num_prompt_tokens = tokens[num_prompt_tokens:], 0
        ids, column = np.unique(tokens, return_inverse=True)
        self._widen(len(ids) + 1)
        self.ids[slot, : len(ids)] = ids
        self.counts[slot, : len(ids)] = np.bincount(column[num_prompt_tokens:], minlength=len(ids))
        self.sizes[slot] = len(ids)

    def _count(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One more generated token of each slot."""
        self._widen(int(self.sizes[slots].max()) + 1)
        filled = np.arange(self.ids.shape[1]) < self.sizes[slots][:, None]
        same = filled & (self.ids[slots] == tokens[:, None])
        column = np.where(same.any(1), same.argmax(1), self.sizes[slots])
        new = column == self.sizes[slots]
        self.ids[slots, column] = tokens
        self.counts[slots, column] = np.where(new, 1, self.counts[slots, column] + 1)
        self.sizes[slots] += new

    def _widen(self, width: int) -> None:
        if width > self.ids.shape[1]:
            more = ((0, 0), (0, max(width, 2 * self.ids.shape[1], _FIRST_WIDTH) - self.ids.shape[1]))
            self.ids, self.counts = np.pad(self.ids, more), np.pad(self.counts, more)

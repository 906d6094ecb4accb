"""Chooses the next token of every row of a step at once.

What requests want changed in their logits comes first (`logit_edits.py`), then the filters, in the order of Hugging
Face's `generate`: temperature, top_k, top_p, min_p. (vLLM applies min_p before top_k and top_p; the sets differ only
where min_p and top_p are both given, as top_p then measures what min_p left.)

Draws are counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the uniform number of a
request's i-th token is a hash of (seed, i), so neither neighbours nor preemption can change it. The hash is SplitMix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). A row's draw is the same in every
batch, and a token of weight zero can not be drawn: the native kernel (`draw_tokens.py`) adds a row's probabilities in
one order; plain torch adds them as integers, whose sums are exact in whatever order a device takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ifb_handler.engine.logit_edits import LogitEdits, Masks
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_kernels.draw_tokens import draw_tokens
from ifb_kernels.finite_argmax import finite_argmax

INVALID_TOKEN = -1  # as `finite_argmax` has it
"""Stands in for a token where a row's logits hold NaN or +inf, or leave no token at all."""

_WEIGHT_OF_ONE = 2.0**60
_NO_LIMIT = 2**31 - 1
# Rows that need their tokens in order are tried on this many candidates first: few rows need more, and a full sort
# costs some thirty times as much.
_CANDIDATES = (128, 4096)
_BLOCK = 64
# Most elements of a chunk of rows: bounds the memory of the 8-byte copies of the logits (several times 8 bytes each).
_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**23}


class SamplerState:
    """The running requests' settings by slot, in small arrays on the host; a step gathers its rows and builds none."""

    def __init__(self, max_num_seqs: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.edits = LogitEdits(max_num_seqs, eos_token_ids)
        self.greedy = np.ones(max_num_seqs, dtype=bool)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.temperature = np.ones(max_num_seqs)
        self.top_k = np.full(max_num_seqs, _NO_LIMIT, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs)
        self.min_p = np.zeros(max_num_seqs)

    def set(
        self, slot: int, params: SamplingParams, seed: int, tokens: Sequence[int] = (), num_prompt_tokens: int = 0
    ) -> None:
        """Gives `slot` (0 to max_num_seqs - 1) to a request; overwrites all that its last holder left.

        tokens    the request's own, prompt and answer, which it appends to as it goes: read when a row is sampled
        """
        self.greedy[slot] = params.greedy
        self.seed[slot] = seed
        self.temperature[slot] = params.temperature
        self.top_k[slot] = min(params.top_k, _NO_LIMIT) if params.top_k > 0 else _NO_LIMIT
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.edits.set(slot, params, tokens, num_prompt_tokens)


class Sampler:
    """Samples with the settings that `state` holds for each slot."""

    def __init__(self, max_num_seqs: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.state = SamplerState(max_num_seqs, eos_token_ids)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: Any, positions: Any, masks: Masks | None = None) -> torch.Tensor:
        """The chosen token ids: int64 [S], on the device of `logits`.

        logits      float32 [S, V] on any device; the rows of requests that ask for it are edited in place
        slots       [S] integers on the host (list, numpy or CPU tensor): each row's slot
        positions   [S] integers on the host: how many tokens the row's request has generated before this one
        masks       the rows of constrained requests, and which tokens each of them may choose

        A row that can not be sampled (NaN, +inf, or nothing above -inf) yields INVALID_TOKEN; the others are as ever.
        """
        state, slots, positions = self.state, np.asarray(slots), np.asarray(positions)
        state.edits.apply(logits, slots, positions, masks)
        chosen = finite_argmax(logits)
        random_rows = np.flatnonzero(~state.greedy[slots])
        if random_rows.size:
            uniforms = uniform(state.seed[slots[random_rows]], positions[random_rows])
            if not self._draw_natively(chosen, logits, random_rows, slots[random_rows], uniforms):
                self._draw_all(chosen, logits, random_rows, slots[random_rows], uniforms)
        return chosen

    def _draw_natively(
        self, chosen: torch.Tensor, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, uniforms: np.ndarray
    ) -> bool:
        state = self.state
        return draw_tokens(
            chosen, logits, rows, temperature=state.temperature[slots], top_k=state.top_k[slots],
            top_p=state.top_p[slots], min_p=state.min_p[slots], uniforms=uniforms,
        )  # fmt: skip

    def _draw_all(
        self, chosen: torch.Tensor, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, uniforms: np.ndarray
    ) -> None:
        """What `draw_tokens` does, on any device."""
        chunk = max(1, _CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
        for start in range(0, rows.size, chunk):
            part = slice(start, start + chunk)
            at = _to_device(rows[part], logits)
            drawn = self._draw(logits[at], slots[part], uniforms[part])
            chosen[at] = torch.where(chosen[at] == INVALID_TOKEN, INVALID_TOKEN, drawn)

    def _draw(self, logits: torch.Tensor, slots: np.ndarray, uniforms: np.ndarray) -> torch.Tensor:
        chosen = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        uniforms_there = _to_device(uniforms, logits)
        for rows, ids, weights in kept_weights(logits, self.state, slots):
            column = _invert(weights, uniforms_there[rows])
            chosen[rows] = column if ids is None else ids.gather(1, column[:, None]).squeeze(1)
        return chosen


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (uint64 seed, index), float64: multiples of 2**-53."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        # The seed is hashed first, so that neighbouring seeds do not walk one another's sequence.
        state = _mix(seeds.astype(np.uint64) + golden) + (indices.astype(np.uint64) + np.uint64(1)) * golden
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def kept_weights(
    logits: torch.Tensor, state: SamplerState, slots: np.ndarray
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """The distributions of random rows after all filters, as integer weights in proportion to the probabilities.

    Yields (rows int64 [R], ids int64 [R, W] or None, weights int64 [R, W]); every row of `logits` [S, V] comes once.
    `ids` are the token ids of the columns; None: column j is token j. Weight 0: filtered out.
    """
    vocab_size = logits.shape[1]
    settings = np.stack([state.temperature[slots], state.top_p[slots], state.min_p[slots]])
    temperature, top_p, min_p = _to_device(settings, logits)[..., None]
    top_k = _to_device(np.where(state.top_k[slots] < vocab_size, state.top_k[slots], _NO_LIMIT), logits)[:, None]
    # The maximum goes first: the quotient of the best token is then 0 at any temperature, never inf.
    scores = (logits - logits.amax(-1, keepdim=True)).div_(temperature.float())
    probs = scores.softmax(-1)
    needs_order = (state.top_k[slots] < vocab_size) | (state.top_p[slots] < 1.0)
    if not needs_order.all():
        rows = _to_device(np.flatnonzero(~needs_order), logits)
        kept = probs if not needs_order.any() else probs[rows]
        if state.min_p[slots].any():
            kept = kept * (kept >= min_p[rows].float() * kept.amax(-1, keepdim=True)).float()
        yield rows, None, _weights(kept)
    rows = _to_device(np.flatnonzero(needs_order), logits)
    for width in (*_CANDIDATES, vocab_size):
        if not len(rows):
            return
        if width > vocab_size:
            continue
        everyone = len(rows) == len(scores)
        row_scores, row_probs = (scores, probs) if everyone else (scores[rows], probs[rows])
        values, ids = in_order(row_scores, width)
        weights = _weights(row_probs.gather(1, ids))
        whole = row_probs.sum(-1, keepdim=True, dtype=torch.float64) * _WEIGHT_OF_ONE
        keep, least = _keep(values, weights, whole, top_k[rows], top_p[rows], min_p[rows])
        # Tokens beyond the candidates are none of ours if all that matter are above the last candidate. A row that can
        # not be sampled is let go with whatever it has.
        done = (least > values[:, -1]) | values[:, 0].isnan() | (width == vocab_size)
        yield rows[done], ids[done], weights.masked_fill_(~keep, 0)[done]
        rows = rows[~done]


def _keep(
    values: torch.Tensor,
    weights: torch.Tensor,
    whole: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidates stay, bool [R, W], and the least score on which that rests, [R].

    values: scores in falling order, [R, W]; weights: theirs; whole: the weight of all tokens and settings: [R, 1].
    """
    limited = top_k < _NO_LIMIT
    # Tokens as likely as the k-th stay too, as in transformers.
    kth = values.gather(1, (top_k - 1).clamp(max=values.shape[1] - 1))
    keep = ~limited | (values >= kth)
    whole = torch.where(limited, (weights * keep).sum(-1, keepdim=True).double(), whole)
    before = weights.cumsum(-1) - weights
    keep &= (before.double() < top_p * whole) | (top_p >= 1.0)
    keep &= (values.exp() >= min_p.float()) & (weights > 0)
    least = torch.where(keep, values, torch.inf).amin(-1)
    return keep, torch.where(limited, kth, least[:, None]).squeeze(1)


def in_order(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` highest scores in falling order and their token ids; equal scores in the order of their ids."""
    if width < scores.shape[1]:
        values, ids = scores.topk(width, sorted=False)
    else:
        values, ids = scores, torch.arange(width, device=scores.device).expand_as(scores)
    # Scores are at most 0, so the bits of the negated score rise as the score falls. -(-0.0) and -(0.0) differ: abs.
    key = (values.abs().view(torch.int32).long() << 32) | ids
    key = key.sort(-1).values
    return -(key >> 32).int().view(torch.float32), key & 0xFFFFFFFF


def _weights(probs: torch.Tensor) -> torch.Tensor:
    return (probs * _WEIGHT_OF_ONE).long()  # exact: a power of two


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first column whose running sum is above `uniforms` times the whole: int64 [R].

    First the block of columns, then the column in it: the running sum of all of them would cost more.
    """
    size = _BLOCK if weights.shape[1] % _BLOCK == 0 else weights.shape[1]
    blocks = weights.unflatten(1, (-1, size))
    sums = blocks.sum(-1).cumsum(-1)
    total = sums[:, -1]
    target = torch.minimum((uniforms * total.double()).long(), total - 1)
    block = _first_above(sums, target)
    within = blocks[torch.arange(len(blocks), device=blocks.device), block].cumsum(-1)
    before = sums.gather(1, block[:, None]).squeeze(1) - within[:, -1]
    return block * size + _first_above(within, target - before)


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    column = torch.searchsorted(sums, target[:, None], right=True).squeeze(1)
    return column.clamp_(max=sums.shape[1] - 1)  # only a row that can not be sampled goes beyond


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _to_device(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)

"""Log probabilities as the model itself gives them: before logit edits, temperature and filters (vLLM: `raw_logprobs`).

A row's numbers depend on that row alone: as many candidates are ranked for every row as anyone may ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.executor import Executor
from ifb_handler.engine.outputs import TokenLogprobs
from ifb_handler.engine.request import Request
from ifb_handler.engine.sampler import in_order
from ifb_handler.engine.sampling_params import MAX_LOGPROBS

# Most elements of the logits that are made at once for the tokens of prompts: bounds their memory (16 MB, a few times).
_SLICE_ELEMENTS = 2**22


def token_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> Iterator[TokenLogprobs]:
    """For each row of `logprobs`, float32 [R, V], its token's and those of the `num_top` likeliest, likeliest first.

    Equally likely tokens come in the order of their ids.
    """
    ids = torch.tensor(token_ids, device=logprobs.device)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
    top: Sequence[list[tuple[int, float]]] = [[]] * len(chosen)
    if any(num_top):
        values, ids = in_order(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
        # -0.0 becomes 0.0.
        top = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), (values + 0.0).tolist(), strict=True)]
    for row, (token_id, logprob) in enumerate(zip(token_ids, chosen, strict=True)):
        yield TokenLogprobs(token_id, logprob, tuple(top[row][: num_top[row]]))


def read_prompts(batch: Batch, executor: Executor) -> None:
    """Add to the `prompt_logprobs` of the batch's requests what the batch that `executor` has just run tells of them.

    The token at position p is told by the logits at p - 1, so that a chunk tells of its own tokens but the first, and
    of the first token of the next. What a request has heard before its preemption is not told again.
    """
    wanted: list[tuple[Request, int]] = []  # with the positions in the prompt
    places: list[np.ndarray] = []
    for row, request in enumerate(batch.requests):
        if not request.needs_prompt_logits:
            continue
        start, end = batch.query_starts[row : row + 2].tolist()
        first = len(request.prompt_logprobs)
        last = min(request.num_computed + end - start, request.num_prompt_tokens - 1)
        wanted += [(request, position) for position in range(first, last + 1)]
        places.append(np.arange(first, last + 1) - 1 - request.num_computed + start)
    if not wanted:
        return
    flat, size = np.concatenate(places), max(1, _SLICE_ELEMENTS // executor.vocab_size)
    for at in range(0, len(wanted), size):
        some = wanted[at : at + size]
        logprobs = executor.logits_at(flat[at : at + size]).log_softmax(-1)
        token_ids = [request.tokens[position] for request, position in some]
        num_top = [request.params.prompt_logprobs for request, _ in some]
        for (request, _), one in zip(some, token_logprobs(logprobs, token_ids, num_top), strict=True):
            request.prompt_logprobs.append(one)

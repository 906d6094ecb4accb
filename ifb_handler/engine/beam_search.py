"""Beam search: of all continuations of the `width` sequences that run, the likeliest `width` run on.

It decides as Hugging Face's `generate(num_beams=width, ...)` does (transformers 5), so that answers and scores are the
same: a continuation is ranked by the sum of its tokens' log probabilities; one that ends, and is among the best `width`
at its step, is an answer, whose score is that sum over length ** length_penalty; the best `width` answers are kept.
Logit edits change log probabilities here, not logits, and what they leave is not normalised again.

Nothing of requests, pages or devices is known here but `rank`'s one look at the log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Path:
    """A sequence of generated tokens, as its last one and what it continues: sequences share their beginnings.

    score    the sum of the tokens' log probabilities
    """

    token_id: int
    score: float
    before: Path | None

    @property
    def token_ids(self) -> list[int]:
        backwards: list[int] = []
        path: Path | None = self
        while path is not None:
            backwards.append(path.token_id)
            path = path.before
        return backwards[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer and its score: the higher the better, and comparable between lengths."""

    path: Path
    score: float


@dataclass(frozen=True)
class Candidates:
    """Continuations, the best first: which beam goes on with which token, int64 [C], and the sums, float32 [C]."""

    beams: np.ndarray
    token_ids: np.ndarray
    scores: np.ndarray


class BeamSearch:
    """One prompt's search.

    width             beams that run, fewer only while fewer continuations are possible
    ends              token ids that end an answer
    max_tokens        most tokens of an answer
    length_penalty    above 0 longer answers are favoured
    early_stopping    when to stop, once there are `width` answers: True: at once; False: when the best running beam
                      would not be better than the worst of them if it ended now; "never": when it could not be, even
                      at its longest

    running           the beams, best first; none yet before the first `advance`
    hypotheses        the answers so far, best first
    length            tokens of every running beam
    """

    def __init__(
        self,
        width: int,
        ends: frozenset[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        self.width = width
        self.max_tokens = max_tokens
        self.running: list[Path] = []
        self.hypotheses: list[Hypothesis] = []
        self.length = 0
        self.done = False
        self._ends = ends
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    @property
    def scores(self) -> list[float]:
        """Of each row that the next step computes: of the running beams, or of the prompt."""
        return [path.score for path in self.running] or [0.0]

    @property
    def num_candidates(self) -> int:
        """How many of a beam's likeliest tokens may matter: `width` that go on, beside all that end."""
        return self.width + len(self._ends)

    def advance(self, candidates: Candidates) -> list[int]:
        """Take the next step's candidates -> for each beam that now runs, which of those before it continues."""
        self.length += 1
        parents: list[int] = []
        running: list[Path] = []
        columns = (candidates.beams, candidates.token_ids, candidates.scores)
        for place, (beam, token_id, score) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if token_id in self._ends or self.length == self.max_tokens:
                if place < self.width:
                    self._keep(self._continued(beam, token_id, score))
            elif len(running) < self.width:
                parents.append(beam)
                running.append(self._continued(beam, token_id, score))
        self.running = running
        self.done = self._is_done()
        return parents

    def _continued(self, beam: int, token_id: int, score: float) -> Path:
        return Path(token_id, score, self.running[beam] if self.running else None)

    def _keep(self, path: Path) -> None:
        self.hypotheses.append(Hypothesis(path, self._normalised(path.score, self.length)))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _normalised(self, score: float, length: int) -> float:
        return score / length**self._length_penalty

    def _is_done(self) -> bool:
        if not self.running:
            return True
        if len(self.hypotheses) < self.width:
            return False
        if self._early_stopping is True:
            return True
        at_most = self._early_stopping == "never" and self._length_penalty > 0
        best = self._normalised(self.running[0].score, self.max_tokens if at_most else self.length)
        return best <= self.hypotheses[-1].score


def rank(logprobs: torch.Tensor, searches: Sequence[BeamSearch]) -> list[Candidates | None]:
    """The candidates of each search; None where its log probabilities are not numbers.

    logprobs    float32 [R, V], the rows of one search after those of the other, as its `scores`

    One topk serves all searches of the same width. A search's candidates depend on its own rows alone; of equally
    likely ones the earlier beam's, then the lower token id come first.
    """
    firsts = np.cumsum([0, *(len(search.scores) for search in searches)])
    found: list[Candidates | None] = [None] * len(searches)
    for count in {min(search.num_candidates, logprobs.shape[1]) for search in searches}:
        alike = [i for i, s in enumerate(searches) if min(s.num_candidates, logprobs.shape[1]) == count]
        rows = np.concatenate([np.arange(firsts[i], firsts[i + 1]) for i in alike])
        values, ids = (t.cpu().numpy() for t in logprobs[torch.from_numpy(rows).to(logprobs.device)].topk(count))
        at = 0
        for i in alike:
            until = at + firsts[i + 1] - firsts[i]
            found[i] = _merged(values[at:until], ids[at:until], searches[i].scores)
            at = until
    return found


def _merged(values: np.ndarray, ids: np.ndarray, scores: Sequence[float]) -> Candidates | None:
    """What is possible (above minus infinity) of each beam's likeliest tokens, [beams, C], in the order of the sums."""
    sums = (values + np.array(scores, np.float32)[:, None]).ravel()
    if np.isnan(sums).any():
        return None
    beams = np.repeat(np.arange(len(ids)), ids.shape[1])
    order = np.lexsort((ids.ravel(), beams, -sums))[: int((sums > -np.inf).sum())]
    return Candidates(beams[order], ids.ravel()[order], sums[order])

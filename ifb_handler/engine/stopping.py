"""When an answer ends and which of its text may be shown yet.

Token level: the model's end-of-sequence ids, `stop_token_ids`, the token limit. Text level: stop strings, which may
span several tokens and end inside one. Meanings follow vLLM, with one difference: which stop string wins does not
depend on how the text is cut into tokens (see `StopStrings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ifb_handler.engine.detokenizer import Detokenizer
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.sampling_params import SamplingParams


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and never lets the beginning of one out early.

    Read character by character, the match that completes first wins; of several that complete at the same character,
    the longest. So the answer is the same however the text was cut. Text is held back while it could still be the
    beginning of a stop string: the held part is the longest suffix of the text that is a proper prefix of one.

    Cost of a piece: its length plus the stop strings' length; the text so far plays no part.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the text ends with the stop string rather than just before it."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Adds `text`; returns the text that may be shown now and the stop string that ended it, if one did.

        A match counts only if it ends within a piece pushed with `may_stop`; it may have begun before.
        """
        if not self._stops:
            return text, None
        before, text = len(self._held), self._held + text
        if may_stop:
            found = [
                (start + len(stop), start, stop)
                for stop in self._stops
                if (start := text.find(stop, max(0, before + 1 - len(stop)))) >= 0
            ]
            if found:
                end, start, stop = min(found)
                self._held = ""
                return text[: end if self._include else start], stop
        shown = self._held_from(text)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The held text, once it is known that no more comes."""
        text, self._held = self._held, ""
        return text

    def _held_from(self, text: str) -> int:
        """Where the longest suffix of `text` that is a proper prefix of a stop string begins."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if 0 <= start < first:
                first = start
        return first


@dataclass(frozen=True, slots=True)
class Delta:
    """What one more token changed: the text that may now be shown, and whether and why the answer has ended.

    stop_reason is the stop string or the `stop_token_ids` entry that ended it; None for the model's own EOS and length.
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class OutputAssembler:
    """Turns one request's tokens, one at a time, into text and the decision to end. It outlives preemption.

    The order of decisions at a token: EOS or a stop token id (its own text is never shown), then stop strings, then the
    token limit. None of the first two is honoured before `min_tokens` tokens are there: a stop token counts from the
    `min_tokens`-th token on, a stop string when it ends in the text of a later token than the `min_tokens`-th, though
    it may have begun in an earlier one. Text held back as the possible beginning of a stop string comes with the
    last delta; an incomplete character at the very end is dropped.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        detokenizer: Detokenizer,
    ) -> None:
        """`max_tokens`: the request's own limit, the smaller of `params.max_tokens` and the room the model leaves."""
        if params.stop and not detokenizer.makes_text:
            raise RequestError(
                "stop: stop strings need a tokenizer and this model has none; use stop_token_ids", "stop"
            )
        self.num_generated = 0
        self.max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._all_eos = frozenset(eos_token_ids)
        self._eos = frozenset() if params.ignore_eos else self._all_eos
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._strings = StopStrings(params.stop or (), params.include_stop_str_in_output)
        self._detokenizer = detokenizer

    def append(self, token_id: int, complete: bool = False) -> Delta:
        """Takes the next generated token; cost does not grow with the answer.

        complete    the answer is held to a grammar and ends with this token, whatever `min_tokens` and `ignore_eos` say
        """
        self.num_generated += 1
        if complete and token_id in self._all_eos:
            return Delta(self._strings.flush(), FinishReason.STOP)
        if self.num_generated >= self._min_tokens:
            if token_id in self._eos:
                return Delta(self._strings.flush(), FinishReason.STOP)
            if token_id in self._stop_ids:
                return Delta(self._strings.flush(), FinishReason.STOP, token_id)
        text = self._detokenizer.push(token_id)
        text, stop = self._strings.push(text, may_stop=self.num_generated > self._min_tokens)
        if stop is not None:
            return Delta(text, FinishReason.STOP, stop)
        if complete:
            return Delta(text + self._strings.flush(), FinishReason.STOP)
        if self.num_generated >= self.max_tokens:
            return Delta(text + self._strings.flush(), FinishReason.LENGTH)
        return Delta(text)

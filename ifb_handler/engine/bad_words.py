"""Words that an answer must not hold: the last token of each is forbidden where the tokens before it are there.

As in vLLM: a word is looked for as it is and with a space before it, in the tokens that the tokenizer makes of the
two, and in the answer only, so that a word begun in the prompt may be ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.sampling_params import MAX_BAD_WORD_LENGTH

_ANY, _NONE = -1, -2


def tokenize(words: Sequence[str | Sequence[int]], tokenizer: Any | None) -> tuple[tuple[int, ...], ...]:
    """The token id sequences that stand for `words`, each once; one that is token ids already stands for itself.

    Raises RequestError where there is no tokenizer for a text, or where it makes no token of it, or too many.
    """
    texts = [word.lstrip() for word in words if isinstance(word, str)]
    if texts and tokenizer is None:
        raise RequestError("bad_words: this engine has no tokenizer; give token ids", "bad_words")
    both = [spaced for text in texts for spaced in (text, f" {text}")]
    found = iter(tokenizer(both, add_special_tokens=False)["input_ids"] if both else ())
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        of_word = [tuple(word)] if not isinstance(word, str) else [tuple(next(found)), tuple(next(found))]
        if not any(of_word):
            raise RequestError(f"bad_words: {word!r} makes no tokens", "bad_words")
        if max(map(len, of_word)) > MAX_BAD_WORD_LENGTH:
            raise RequestError(f"bad_words: {word!r} makes more than {MAX_BAD_WORD_LENGTH} tokens", "bad_words")
        sequences.update((ids, None) for ids in of_word if ids)
    return tuple(sequences)


class BadWords:
    """One request's sequences: their last tokens, int64 [N], and what must stand before them, int64 [N, L]."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._last = np.array([ids[-1] for ids in sequences], np.int64)
        self._before = np.full((len(sequences), max(map(len, sequences)) - 1), _ANY, np.int64)
        for row, ids in enumerate(sequences):
            if len(ids) > 1:
                self._before[row, 1 - len(ids) :] = ids[:-1]

    def forbidden_after(self, tokens: Sequence[int], num_prompt_tokens: int) -> np.ndarray:
        """The token ids that may not come next, perhaps some twice: int64 [M]."""
        reach = self._before.shape[1]
        answer = tokens[max(num_prompt_tokens, len(tokens) - reach) :]
        context = np.full(reach, _NONE, np.int64)
        if len(answer):
            context[-len(answer) :] = answer
        return self._last[((self._before == context) | (self._before == _ANY)).all(1)]

"""Log probabilities in the forms of OpenAI's two routes and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.detokenizer import Detokenizer
from ifb_handler.engine.outputs import TokenLogprobs

# JSON has no form for minus infinity; this is what OpenAI and vLLM write for it.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    """NaN becomes LOWEST, too."""
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(model: ServedModel, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """A chat choice's `logprobs`: each token with its bytes and its likeliest rivals with theirs."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = model.bytes_of(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*rival) for rival in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """A completion choice's `logprobs`: four lists with an entry a token.

    text_offset is where a token's text begins, in characters of the choice's whole text, an echoed prompt included.
    """

    def __init__(self, model: ServedModel, context: Sequence[int], skip_special_tokens: bool) -> None:
        """`context`: the prompt's tokens, when they are not part of the text."""
        self._model = model
        self._text = Detokenizer(model.vocabulary, context, skip_special_tokens)
        self._offset = 0

    def push(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], top: int) -> dict[str, Any]:
        """The lists for the next tokens; an entry is None for a prompt's first token. `top` is what was asked for."""
        told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            told["tokens"].append(self._model.text_of(token_id))
            told["text_offset"].append(self._offset)
            self._offset += len(self._text.push(token_id))
            told["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            told["top_logprobs"].append(None if entry is None or not top else self._by_text(entry))
        return told

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of several that read alike the likeliest is kept."""
        ranked = sorted((*entry.top, (entry.token_id, entry.logprob)), key=lambda rival: rival[1], reverse=True)
        by_text: dict[str, float] = {}
        for token_id, logprob in ranked:
            by_text.setdefault(self._model.text_of(token_id), finite(logprob))
        return by_text


def prompt_logprobs(model: ServedModel, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token null (the first) or a map of token ids; the rank is null where unknown."""

    def one(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": model.text_of(token_id)}

    def position(entry: TokenLogprobs) -> dict[str, Any]:
        told = {str(token): one(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        told.setdefault(str(entry.token_id), one(entry.token_id, entry.logprob, None))
        return told

    return [None if entry is None else position(entry) for entry in entries]

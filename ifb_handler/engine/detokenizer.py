"""Token ids to text, one token at a time, for the tokenizers of the `tokenizers` library.

A token is one of two things. Either it is bytes: every token of a byte-level BPE, and the `<0x0A>` tokens of a
vocabulary with byte fallback; those run through an incremental UTF-8 decoder, which keeps half a character until the
rest comes.
Or it is text whose spelling depends on what stands before it (a SentencePiece space that is dropped at the beginning
of a text, a WordPiece `##`): such a token is decoded together with the token before it, and that one's text taken off.
Either way a token costs the same wherever it stands, and nothing is ever taken back.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

_CONTEXT_TOKENS = 8
_EACH_BYTE = "ifb_replace_each_byte"

# Byte fallback spells malformed UTF-8 with one U+FFFD a byte, where byte-level BPE has one a malformed sequence.
codecs.register_error(_EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))


class Vocabulary:
    """What detokenizing needs to know of a tokenizer; made once a tokenizer and shared by its requests' detokenizers.

    `tokenizer` is a transformers fast tokenizer, a `tokenizers.Tokenizer`, or None when there is no text to make.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.special_ids: frozenset[int] = frozenset()
        self.byte_level = False
        self._bytes: dict[int, bytes | None] = {}
        if self._backend is None:
            return
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self._backend.decoder
        # A decoder's pickled state is its JSON; to_str() would spell out the whole vocabulary for it.
        steps = [] if decoder is None else _decoder_steps(json.loads(decoder.__getstate__()))
        self.byte_level = steps == ["ByteLevel"]
        if self.byte_level:
            self._byte_of_char = _byte_of_char()
        elif "ByteFallback" in steps:
            ids = {self._backend.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
            self._bytes = {token_id: byte for token_id, byte in ids.items() if token_id is not None}

    @property
    def makes_text(self) -> bool:
        return self._backend is not None

    def bytes_of(self, token_id: int) -> bytes | None:
        """The token's bytes, or None if it is text that only `decode` can spell. An id outside the vocabulary: b""."""
        if self.byte_level and token_id not in self._bytes:
            token = self._backend.id_to_token(token_id) or ""
            try:
                self._bytes[token_id] = bytes([self._byte_of_char[char] for char in token])
            except KeyError:  # an added token, spelled as it is
                self._bytes[token_id] = token.encode()
        return self._bytes.get(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


class Detokenizer:
    """One request's text: the joined results of `push` are decode(prompt + generated) less decode(prompt).

    For a byte-level vocabulary that is decode(generated); for SentencePiece it keeps the space that decoding the answer
    alone would drop. Half a character at the end of the answer never appears; half a character at the end of the
    prompt is completed by the answer's first tokens. A malformed byte sequence becomes U+FFFD as the tokenizer's own
    decode spells it, except that whole characters before it in one run of byte-fallback tokens stay what they were.
    With no tokenizer there is no text.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        errors = "replace" if vocabulary.byte_level else _EACH_BYTE
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._context: list[int] = []
        self._context_text = ""
        for token_id in self._last_of(prompt_token_ids):
            self.push(token_id)

    @property
    def makes_text(self) -> bool:
        return self._vocabulary.makes_text

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        if token_id in self._skipped or not self._vocabulary.makes_text:
            return ""
        token_bytes = self._vocabulary.bytes_of(token_id)
        if token_bytes is not None:
            text = self._utf8.decode(token_bytes)
            if not self._vocabulary.byte_level:
                if text == " " and not self._context_text:  # a text may lose the space that it begins with
                    text = self._vocabulary.decode([*self._context, token_id])
                self._stand_after(token_id)
            return text
        cut_short = self._utf8.decode(b"", final=True)
        text = self._vocabulary.decode([*self._context, token_id])[len(self._context_text) :]
        self._stand_after(token_id)
        return cut_short + text

    def _stand_after(self, token_id: int) -> None:
        """The next token's context: this token alone, or with its forerunners if it has no text of its own."""
        text = self._vocabulary.decode([token_id])
        if text:
            self._context, self._context_text = [token_id], text
        else:
            self._context = [*self._context, token_id][-_CONTEXT_TOKENS:]
            self._context_text = self._vocabulary.decode(self._context)

    def _last_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last few tokens that have text: enough for any character and any context."""
        last: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                last.append(token_id)
                if len(last) == _CONTEXT_TOKENS:
                    break
        return last[::-1]


def _decoder_steps(decoder: dict[str, Any]) -> list[str]:
    """The kinds of the decoder's steps, in order."""
    if decoder["type"] == "Sequence":
        return [kind for step in decoder["decoders"] for kind in _decoder_steps(step)]
    return [decoder["type"]]


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): printable Latin-1 stands for itself, the other bytes for U+0100 onward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

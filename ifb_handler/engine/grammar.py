"""Constrained output: which tokens may come next in an answer that is held to a schema, a regex or a grammar.

The library is llguidance 1.9 (MIT), chosen over xgrammar 0.2.9 by trying both on SmolLM2's vocabulary. xgrammar's masks
are quicker (3 us a row against 15 to 30 in JSON, 150 in a loose regex; ours are filled beside the model's work), but it
lets through, with a warning, what it cannot enforce (multipleOf, allOf, not, uniqueItems), where llguidance refuses; it
sets itself no limits (20,000 enum values: 10 s to compile and as long for a mask, against 0.35 s); and it needs tvm-ffi
and costs 0.1 s and 14 MB to import, against 6 ms and 2 MB. llguidance needs no other package; one wheel serves every
Python from 3.9. Its tokenizer takes 25 MB and 0.3 s, a schema in use 1 to 30 ms to compile.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ifb_handler.engine.grammar_trial import TrialProcess, make_matcher, make_tokenizer
from ifb_handler.engine.structured import StructuredOutput

_CACHED_GRAMMARS = 256
_CACHED_BYTES = 256 << 20
_LEAST_BYTES = 64 << 10  # what any grammar is taken to need


class Matcher:
    """How far one answer has come in its grammar. Used by one thread at a time.

    num_words    int32 words in a mask: of 32 tokens each
    """

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self.num_words = num_words

    def accept(self, token_id: int) -> None:
        """The answer's next token; `error` tells if it was not allowed."""
        self._matcher.consume_token(token_id)

    def fill(self, row: np.ndarray) -> None:
        """The mask of the next token into `row`, [num_words] contiguous. All zeros once there is an `error`."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            row[:] = 0

    @property
    def is_complete(self) -> bool:
        """The grammar is fulfilled and nothing but the end can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why nothing can follow: a token that was not allowed, no way on, or more work than is allowed."""
        return self._matcher.get_error().split("\n<", 1)[0] or None


class Grammar:
    """Compiled; any number of answers can be held to it."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self._compiled = compiled
        self._num_words = -(-vocab_size // 32)

    def matcher(self) -> Matcher:
        """At the beginning of an answer; takes some 10 us."""
        return Matcher(self._compiled.deep_copy(), self._num_words)


class Grammars:
    """Compiles and remembers, from any thread. Refusals are remembered, too: the second costs as little as a success.

    At most _CACHED_GRAMMARS are kept, or as many as take _CACHED_BYTES; the one used longest ago goes first.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: a transformers fast tokenizer or a `tokenizers.Tokenizer`; None refuses every grammar."""
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._vocab_size = vocab_size
        of_tokenizer = getattr(tokenizer, "eos_token_id", None)
        self._eos_token_ids = list(eos_token_ids) or ([] if of_tokenizer is None else [of_tokenizer])
        self._lock = threading.Lock()  # guards what follows
        self._known: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._bytes: dict[tuple[str, str], int] = {}
        self._compiling = threading.Lock()  # guards what follows; is held for long
        self._tokenizer: Any = None
        self._trial: TrialProcess | None = None

    def get(self, asked: StructuredOutput) -> Grammar:
        """At once if it is known; else it takes milliseconds, or seconds before a monster is refused.

        Raises RequestError naming `asked.field` if there can be no such grammar, and RuntimeError if none can be tried.
        """
        key = asked.kind, asked.text
        with self._lock:
            known = self._known.get(key)
            if known is None:
                mine = self._known[key] = Future()
            else:
                self._known.move_to_end(key)
        if known is None:
            self._compile(key, mine)
            known = mine
        try:
            return known.result()
        except _RefusedError as error:
            raise asked.error(f"the {asked.kind} cannot be used: {error}") from None

    def close(self) -> None:
        """Ends the process that tries grammars, if there is one; it is started anew if it is needed."""
        if self._trial is not None:
            self._trial.close()

    def _compile(self, key: tuple[str, str], result: Future[Grammar]) -> None:
        num_bytes = 0
        try:
            with self._compiling:
                grammar, num_bytes = self._compiled(*key)
            result.set_result(grammar)
        except _RefusedError as error:
            result.set_exception(error)
        except BaseException as error:  # no fault of the grammar's: whoever waits hears of it, and the next one tries
            with self._lock:
                self._known.pop(key, None)
            result.set_exception(error)
            return
        with self._lock:
            self._bytes[key] = len(key[1]) + max(num_bytes, _LEAST_BYTES)
            while len(self._bytes) > _CACHED_GRAMMARS or sum(self._bytes.values()) > _CACHED_BYTES:
                oldest = next(k for k in self._known if k in self._bytes)
                del self._known[oldest], self._bytes[oldest]

    def _compiled(self, kind: str, text: str) -> tuple[Grammar, int]:
        if self._trial is None:
            setup = self._setup()
            try:
                self._tokenizer = make_tokenizer(**setup)
            except ValueError as error:
                raise _RefusedError(f"this model's tokenizer does not allow for grammars: {error}") from None
            self._trial = TrialProcess(setup)
        answer = self._trial.run(kind, text)
        if "error" in answer:
            raise _RefusedError(answer["error"])
        compiled = make_matcher(self._tokenizer, answer["grammar"])
        return Grammar(compiled, self._tokenizer.vocab_size), answer["bytes"]

    def _setup(self) -> dict[str, Any]:
        if self._backend is None:
            raise _RefusedError("this model has no tokenizer")
        if not self._eos_token_ids:
            raise _RefusedError("this model has no end-of-sequence token")
        backend = copy.copy(self._backend)
        backend.no_padding()
        backend.no_truncation()
        vocab_size = max(self._vocab_size, backend.get_vocab_size())
        return {"tokenizer": backend.to_str(), "vocab_size": vocab_size, "eos_token_ids": self._eos_token_ids}


class _RefusedError(Exception):
    """There can be no such grammar; says why, for the client."""

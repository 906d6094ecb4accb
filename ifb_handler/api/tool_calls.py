"""Tool calls in a model's text, found as the text comes.

A call is a JSON object that names a function and its arguments. What stands around it depends on the model:

- Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as many as there are, text before them
- Llama 3: the answer begins with `{"name": …, "parameters": {…}}`, further ones after `;`
- Mistral, and any model held to a JSON array of calls: the answer begins with `[{"name": …, "arguments": {…}}, …]`

Text is held back while it could still begin a call. Once a call's name is known and its arguments begin, they are
passed on as they come. What turns out to be no call, or one of a function that was not offered, is text after all.
The result is the same however the text was cut.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

_NAME_FIRST = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|([^"\s]))')
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")


@dataclass(frozen=True)
class Format:
    """marker      what announces a call
    closing     what stands after a call; empty: nothing
    between     what may stand before the first call and between two
    anywhere    text may come before a call
    """

    marker: str
    closing: str
    between: re.Pattern[str]
    anywhere: bool = False


HERMES = Format("<tool_call>", "</tool_call>", re.compile(r"\s*"), anywhere=True)
LLAMA3_JSON = Format("<|python_tag|>", "", re.compile(r"(?:\s|;|<\|python_tag\|>)*"))
ARRAY = Format("[TOOL_CALLS]", "", re.compile(r"(?:\s|\[TOOL_CALLS\]|[\[,\]])*"))


def format_of(template: str) -> Format:
    """What a model writes whose chat template this is."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return ARRAY
    return LLAMA3_JSON if "<|python_tag|>" in template or '"parameters"' in template else HERMES


@dataclass
class CallDelta:
    """What is new of a call: its id and name come first, then its arguments in pieces, which add up to JSON."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


class _State(Enum):
    TEXT = auto()  # between calls, or before the first one
    CALL = auto()  # in an object that may be a call
    ARGUMENTS = auto()  # in a call's arguments
    AFTER = auto()  # behind a call's arguments, before its closing
    PLAIN = auto()  # no call can come any more


class ToolCallReader:
    """One answer's text, read piece by piece.

    names        the functions that were offered
    max_calls    further ones are dropped
    only_calls   the answer is held to calls: what is none was cut short, and is no text
    """

    def __init__(
        self, format: Format, names: Collection[str], max_calls: int | None = None, only_calls: bool = False
    ) -> None:
        self._format = format
        self._only_calls = only_calls
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._state = _State.TEXT
        self._held = ""
        self._opening = ""  # the text before the object that may be a call
        self._span = Span()
        self._spanned = 0  # characters of `_held` that `_span` has seen
        self._text: list[str] = []
        self._deltas: list[CallDelta] = []
        self.num_calls = 0
        self.complete = False  # the last call's arguments have ended

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """-> the text that is no call, and the calls' news."""
        self._held += text
        steps = {
            _State.TEXT: self._read_text,
            _State.CALL: self._read_call,
            _State.ARGUMENTS: self._read_arguments,
            _State.AFTER: self._read_after,
            _State.PLAIN: self._read_plain,
        }
        while self._held and steps[self._state]():
            pass
        return self._take()

    def flush(self) -> tuple[str, list[CallDelta]]:
        """As `push`, once it is known that no more text comes."""
        if self._state is _State.CALL:
            self._text.append(self._opening + self._held)
        elif self._state is _State.TEXT and not (self.num_calls and self._format.between.fullmatch(self._held)):
            self._text.append(self._held)
        self._held = self._opening = ""
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        text, deltas = "" if self._only_calls else "".join(self._text), self._deltas
        self._text, self._deltas = [], []
        return text, deltas

    # Each reads what it can of `_held`; True if there may be more to do.

    def _read_text(self) -> bool:
        return self._find_marker() if self._format.anywhere else self._find_beginning()

    def _find_marker(self) -> bool:
        marker = self._format.marker
        at = self._held.find(marker)
        if at < 0:
            kept = _held_from(self._held, marker)
            self._text.append(self._held[:kept])
            self._held = self._held[kept:]
            return False
        before = self._held[:at]
        self._text.append(before.rstrip())
        self._opening = before[len(before.rstrip()) :] + marker
        self._held = self._held[at + len(marker) :]
        return self._enter_call()

    def _find_beginning(self) -> bool:
        marker = self._format.marker
        skipped = self._format.between.match(self._held)
        assert skipped is not None
        rest = self._held[skipped.end() :]
        if not rest or marker.startswith(rest) or marker.startswith(self._held.lstrip()):
            return False
        if not rest.startswith("{"):
            self._state = _State.PLAIN
            return True
        self._opening, self._held = self._held[: skipped.end()], rest
        return self._enter_call()

    def _enter_call(self) -> bool:
        self._state, self._span = _State.CALL, Span()
        self._spanned = 0
        return True

    def _read_call(self) -> bool:
        begun = _NAME_FIRST.match(self._held)
        if begun and (name := _decoded(begun[1])) is not None:
            if name not in self._names:
                return self._no_call()
            self._held = self._held[begun.end() :]
            self._begin(name)
            self._state, self._span = _State.ARGUMENTS, Span()
            return True
        key = _FIRST_KEY.match(self._held)
        if (key and key[1] not in _KEYS) or not "{".startswith(self._held.lstrip()[:1]):
            return self._no_call()
        end = self._span.feed(self._held[self._spanned :])
        if end is None:
            self._spanned = len(self._held)
            return False
        end += self._spanned
        call = _whole_call(self._held[:end])
        if call is None or call[0] not in self._names:
            return self._no_call()
        self._held = self._held[end:]
        self._begin(call[0])
        self._argue(call[1])
        self.complete = True
        self._state = _State.AFTER if self._format.closing else _State.TEXT
        return True

    def _no_call(self) -> bool:
        """The object is text, and its opening, too."""
        self._text.append(self._opening)
        self._opening = ""
        self._state = _State.TEXT if self._format.anywhere else _State.PLAIN
        return True

    def _read_arguments(self) -> bool:
        end = self._span.feed(self._held)
        self._argue(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self.complete = True
            self._state, self._span = _State.AFTER, Span(depth=1)
        return True

    def _read_after(self) -> bool:
        closing = self._format.closing
        if closing:
            at = self._held.find(closing)
            if at < 0:
                self._held = self._held[_held_from(self._held, closing, spaces=False) :]
                return False
            self._held = self._held[at + len(closing) :]
        else:
            end = self._span.feed(self._held)
            self._held = "" if end is None else self._held[end:]
            if end is None:
                return False
        self._opening, self._state = "", _State.TEXT
        return True

    def _read_plain(self) -> bool:
        self._text.append(self._held)
        self._held = ""
        return False

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self.complete = False
        if not self._dropped:
            self._deltas.append(CallDelta(self.num_calls - 1, "", _new_id(), name))

    def _argue(self, arguments: str) -> None:
        if self._dropped or not arguments:
            return
        if self._deltas and self._deltas[-1].index == self.num_calls - 1:
            self._deltas[-1].arguments += arguments
        else:
            self._deltas.append(CallDelta(self.num_calls - 1, arguments))

    @property
    def _dropped(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls


class NamedCallReader:
    """For an answer that is held to the arguments of one function: all of its text is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0
        self.complete = False

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        if not text:
            return "", []
        first, self.num_calls = not self.num_calls, 1
        return "", [CallDelta(0, text, *((_new_id(), self._name) if first else ()))]

    def flush(self) -> tuple[str, list[CallDelta]]:
        self.complete = bool(self.num_calls)
        return "", []


class Span:
    """Finds where a JSON object ends in text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The index behind the object's last character, if it is in `text`."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


def _held_from(text: str, marker: str, spaces: bool = True) -> int:
    """Where the longest suffix begins that may become `marker`, the spaces before it included."""
    start = max(0, len(text) - len(marker) + 1)
    while start < len(text) and not marker.startswith(text[start:]):
        start += 1
    return len(text[:start].rstrip()) if spaces else start


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _decoded(quoted: str) -> str | None:
    try:
        return json.loads(quoted)
    except ValueError:
        return None


def _whole_call(text: str) -> tuple[str, str] | None:
    """A call's name and arguments from an object whose keys are in another order, or that wraps them as OpenAI does."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)

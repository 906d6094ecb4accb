"""A grammar is tried in a process of its own before the engine's process compiles it.

llguidance bounds most of what it does, but not all: `{"multipleOf": 9999991}` keeps it busy for minutes and takes a
gigabyte, and a chain of 5,000 rules overflows its stack, which ends the process. So `TrialProcess` keeps a child that
compiles each new grammar first and walks a little through it, within limits of processor time, memory and stack that
the kernel enforces. What ends the child is refused, and the next grammar gets a new child. The child holds a
tokenizer and no model (some 70 MB), is started for the first grammar, and ends with its parent.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from typing import Any

COMPILE_SECONDS = 2.0
"""Of processor time, for one grammar. Schemas in use take 1 to 30 ms; 3,000 optional properties take 0.8 s."""
WALK_SECONDS = 0.5
"""Of processor time, for the masks of the first _WALK_TOKENS tokens of an answer."""
_WALK_TOKENS = 48
_MEMORY_BYTES = 512 << 20
# Less than the stack of any thread that compiles in the engine's process: what fits here fits there.
_STACK_BYTES = 1 << 20
# The child may wait for a processor, but not for ever.
_WALL_SECONDS = 120.0

# Between two tokens of JSON a space, or a line break and an indentation: a small model that may write any white space
# goes on with it to the end of its answer.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n(?: {0,20}|\t{0,8})", "lenient": False, "coerce_one_of": False}


class TrialProcess:
    """`setup` is what `make_tokenizer` takes, as plain data. Thread-safe; one grammar at a time."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def run(self, kind: str, text: str) -> dict[str, Any]:
        """-> {"grammar": what LLMatcher takes, "bytes": memory it takes} or {"error": why it is refused}.

        Raises RuntimeError if there is no child to try it in.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = self._start()
            answer = _ask(self._child, {"kind": kind, "text": text})
            if answer is None:
                self._stop()
                limits = f"{COMPILE_SECONDS:g} s of computing, {_MEMORY_BYTES >> 20} MB, or nesting within reason"
                return {"error": f"it is too complex: it takes more than {limits}"}
            return answer

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[str]:
        # Not `-m`: the child finds its modules where this process does, whatever was done to its path.
        code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {__name__}; {__name__}.main()"
        child = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        if _ask(child, self._setup) is None:
            child.kill()
            raise RuntimeError(f"the process that tries grammars ended at once, with {child.wait()}")
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _ask(child: subprocess.Popen[str], message: dict[str, Any]) -> dict[str, Any] | None:
    """The child's answer, or None if that is its end."""
    limit = threading.Timer(_WALL_SECONDS, child.kill)
    limit.start()
    try:
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
    except BrokenPipeError:
        return None
    finally:
        limit.cancel()
    return json.loads(line) if line.endswith("\n") else None


# What both processes do alike.


def make_tokenizer(tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """llguidance's own form (30 MB, 0.3 s) of a tokenizer given as the JSON of the `tokenizers` library."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)


def make_matcher(tokenizer: Any, grammar: str) -> Any:
    """Compiles; an error is the matcher's to tell."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_max_items=20_000, max_lexer_states=100_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


# The child.


def main() -> None:
    """Answers each line of stdin with one of stdout; the first is the setup."""
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()


def _serve() -> None:
    import resource
    import signal

    tokenizer = make_tokenizer(**json.loads(sys.stdin.readline()))
    words = -(-tokenizer.vocab_size // 32)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_bytes_used(0) + _MEMORY_BYTES, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say({})
    for line in sys.stdin:
        # SIGPROF is left to do what it does by default: it ends the process.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
        before = _bytes_used(1)
        try:
            answer = _try(tokenizer, words, **json.loads(line))
        except Exception as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer | {"bytes": max(0, _bytes_used(1) - before)})


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _bytes_used(column: int) -> int:
    """This process's memory: 0 its address space, 1 what is resident. 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[column]) * 4096
    except OSError:
        return 0


def _try(tokenizer: Any, words: int, kind: str, text: str) -> dict[str, Any]:
    import signal

    grammar = _grammar_of(kind, text)
    matcher = make_matcher(tokenizer, grammar)
    signal.setitimer(signal.ITIMER_PROF, WALK_SECONDS)
    choose = random.Random(0).choice  # the same walk each time: a grammar is refused always or never
    for _ in range(_WALK_TOKENS):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return {"error": _first_lines(matcher.get_error())}
        if matcher.is_stopped():
            break
        word = choose([i for i in range(words) if any(mask[4 * i : 4 * i + 4])])
        bits = int.from_bytes(mask[4 * word : 4 * word + 4], "little")
        matcher.consume_token(32 * word + choose([i for i in range(32) if bits >> i & 1]))
        if matcher.is_stopped() and not matcher.is_error():
            break
    return {"grammar": grammar}


def _grammar_of(kind: str, text: str) -> str:
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    if kind == "regex":  # its \d are 0 to 9, as those in a schema's patterns; digits of all scripts would surprise
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'd')}/")
    if kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(text))))
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def _first_lines(error: str) -> str:
    """Without the excerpt of the grammar that follows, and without the library's own state."""
    return " ".join(error.split("\n<", 1)[0].split())[:500]

"""The in-flight batching diagram, drawn from a real run: a row a request, a column a step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rich.style import Style
from rich.text import Text


class State(Enum):
    """What a request does in one step: its letter in plain text, its sign and colour on a terminal."""

    WAITING = (".", "·", "bright_black")
    PREFILL = ("P", "▓", "yellow")
    DECODE = ("d", "█", "green")
    PREEMPTED = ("x", "x", "red")

    def __init__(self, letter: str, sign: str, colour: str) -> None:
        self.letter = letter
        self.sign = sign
        self.style = Style.parse(colour)


_BARS = " ▁▂▃▄▅▆▇█"


@dataclass
class Step:
    """One StepRecord as the server sends it: who was in which state, and the pool."""

    number: int
    states: dict[str, State]
    used_blocks: int
    total_blocks: int

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Step:
        # Who runs came before who waits, so that is the order of the rows, too.
        states = dict.fromkeys(record["decode"], State.DECODE)
        states |= {request: State.PREFILL for request, _ in record["prefill"]}
        states |= dict.fromkeys(record["preempted"], State.PREEMPTED)
        states |= {request: State.WAITING for request in record["waiting"] if request not in states}
        return cls(record["step"], states, record["used_blocks"], record["total_blocks"])

    @property
    def num_running(self) -> int:
        return sum(state in (State.PREFILL, State.DECODE) for state in self.states.values())

    @property
    def pool_share(self) -> float:
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0


@dataclass
class Timeline:
    """The steps so far, and the requests in the order they first appeared in one."""

    steps: list[Step] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def add(self, records: Sequence[Mapping[str, Any]]) -> list[Step]:
        """Append StepRecords in the order of their numbers; what they say."""
        steps = [Step.from_json(record) for record in records]
        self.steps += steps
        for step in steps:
            self.requests += [request for request in step.states if request not in self.requests]
        return steps

    @property
    def last_step(self) -> int:
        return self.steps[-1].number if self.steps else -1

    def draw(self, names: Mapping[str, str], width: int, *, plain: bool, whole: bool) -> Text:
        """A line a request and one for the pool, each at most `width` columns.

        names     request id -> what to call it; its number in order of arrival where it has none
        plain     letters only, for logs; else signs and colours
        whole     the run squeezed into the width, several steps a column; else its newest steps
        """
        labels = [names.get(request, f"#{i + 1}") for i, request in enumerate(self.requests)]
        margin = max(map(len, [*labels, "pool"])) + 2
        columns = self._columns(max(10, width - margin), whole)
        lines = Text()
        for request, label in zip(self.requests, labels, strict=True):
            lines.append(label.ljust(margin))
            states = [_commonest([step.states.get(request) for step in column]) for column in columns]
            for state, run in itertools.groupby(states):
                sign, style = (" ", "") if state is None else (state.letter, "") if plain else (state.sign, state.style)
                lines.append(sign * len(list(run)), style)
            lines.append("\n")
        lines.append("pool".ljust(margin))
        shares = [max(step.pool_share for step in column) for column in columns]
        signs = "0123456789" if plain else _BARS
        lines.append("".join(signs[min(len(signs) - 1, int(share * len(signs)))] for share in shares), "cyan")
        return lines

    def _columns(self, count: int, whole: bool) -> list[list[Step]]:
        if not whole:
            return [[step] for step in self.steps[-count:]]
        per_column = -(-len(self.steps) // count) or 1
        return [self.steps[i : i + per_column] for i in range(0, len(self.steps), per_column)]


def legend(plain: bool) -> Text:
    """What the signs mean."""
    text = Text()
    for state in State:
        text.append(state.letter if plain else state.sign, None if plain else state.style)
        text.append(f" {state.name.lower()}  ")
    text.append("pool: tenths in use" if plain else "pool: share in use")
    return text


def _commonest(states: list[State | None]) -> State | None:
    """A column's state. Prefills and preemptions are short, and what one looks for: they are never squeezed out."""
    for rare in (State.PREEMPTED, State.PREFILL):
        if rare in states:
            return rare
    return Counter(states).most_common(1)[0][0]

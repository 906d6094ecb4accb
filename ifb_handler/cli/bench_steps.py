"""Where the time of a run's steps went: all together, and by the kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ifb_handler.cli.bench_table import show

if TYPE_CHECKING:
    from ifb_handler.engine.outputs import StepRecord

# A kind of step goes up to so many decode rows, or prompt tokens where it computes any.
_DECODE_ROWS = (1, 4, 8, 16, 32, 64, 128)
_PREFILL_TOKENS = (64, 128, 256, 512)


def step_figures(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Of all steps: seconds and shares by section; `kinds` has each kind's own, in milliseconds a step."""
    total = sum(record.duration for record in records)
    sections = _sections(records)
    rows = [len(record.decode) + len(record.prefill) for record in records]
    kinds: dict[tuple[bool, int, str], list[StepRecord]] = {}
    for record in records:
        kinds.setdefault(_kind(record), []).append(record)
    return {
        "count": len(records),
        "mean_rows": sum(rows) / len(rows),
        "preemptions": sum(len(record.preempted) for record in records),
        "seconds": {name: round(seconds, 4) for name, seconds in sections.items()},
        "share": {name: round(seconds / total, 4) for name, seconds in sections.items()},
        "kinds": {kind[-1]: _of_one_kind(kinds[kind]) for kind in sorted(kinds)},
    }


def _sections(records: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds by section; `other` is what no section has timed."""
    sections: dict[str, float] = {}
    for record in records:
        for name, seconds in record.seconds.items():
            sections[name] = sections.get(name, 0.0) + seconds
    sections["other"] = sum(record.duration for record in records) - sum(sections.values())
    return sections


def _kind(record: StepRecord) -> tuple[bool, int, str]:
    """To sort by, with its name last: decodes first, then prefills, each by size."""
    prefill = sum(tokens for _, tokens in record.prefill)
    what, size, limits = (
        ("prefill", prefill, _PREFILL_TOKENS) if prefill else ("decode", len(record.decode), _DECODE_ROWS)
    )
    index = sum(limit < size for limit in limits)
    least = limits[index - 1] + 1 if index else 1
    most = limits[index] if index < len(limits) else None
    span = f"{least} and more" if most is None else f"{least}" if least == most else f"{least} to {most}"
    return bool(prefill), index, f"{what} {span}"


def _of_one_kind(records: Sequence[StepRecord]) -> dict[str, Any]:
    count = len(records)
    tokens = sum(len(record.decode) + sum(n for _, n in record.prefill) for record in records)
    return {
        "count": count,
        "mean_tokens": round(tokens / count, 1),
        "seconds": round(sum(record.duration for record in records), 4),
        "ms": {name: round(seconds / count * 1e3, 3) for name, seconds in _sections(records).items()},
    }


def show_kinds(steps: dict[str, Any]) -> None:
    """A line a kind, the costliest sections first: of decode steps by rows, of those with prefill by prompt tokens."""
    names = sorted(steps["seconds"], key=lambda name: -steps["seconds"][name])
    rows = [
        [
            kind,
            str(of["count"]),
            f"{of['mean_tokens']:.1f}",
            f"{of['seconds']:.2f}",
            f"{of['seconds'] / of['count'] * 1e3:.1f}",
            *(f"{of['ms'].get(name, 0.0):.2f}" for name in names),
        ]
        for kind, of in steps["kinds"].items()
    ]
    show("milliseconds a step", ["kind of step", "steps", "tokens", "all, s", "step", *names], rows)

"""The in-flight batching diagram as a picture: who was in the batch at each step, beside the KV pool's use."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ifb_handler.cli.bench_replay import Run
from ifb_handler.cli.errors import UsageError

_COLOURS = {"prefill": "#e8a33d", "decode": "#3f8f5b", "padding": "#c9c9c9"}
_RESERVED, _NEVER = "#4a78b0", "#c7504b"


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png: matplotlib is not installed; pip install 'torchserve-ifb[bench]'")


def draw(runs: Mapping[str, Run], title: str, path: Path) -> None:
    """A row of two drawings for each run, all on the same scale of steps."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(15, 1 + 2.2 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, squeeze=False, sharex=True, width_ratios=(3, 2))
    colours = ListedColormap(["white", *_COLOURS.values()])
    for (name, run), (batch, pool) in zip(runs.items(), axes, strict=True):
        picture = _picture(run)
        height, width = picture.shape
        batch.imshow(
            picture,
            cmap=colours,
            norm=BoundaryNorm(np.arange(len(_COLOURS) + 2) - 0.5, len(_COLOURS) + 1),
            aspect="auto",
            interpolation="nearest",
            extent=(0, width, height, 0),
        )
        batch.set_ylabel("request", fontsize=8)
        batch.set_title(f"{name}: {width} steps, {run.seconds:.1f} s", loc="left", fontsize=10)
        total = run.steps[0].total
        reserved = np.array([step.reserved for step in run.steps]) / total
        never = np.array([step.never_written for step in run.steps]) / total
        steps = np.arange(width)
        pool.fill_between(steps, reserved - never, step="post", color=_RESERVED, linewidth=0)
        pool.fill_between(steps, reserved - never, reserved, step="post", color=_NEVER, linewidth=0)
        pool.set_ylim(0, 1)
        pool.set_ylabel("share of the pool", fontsize=8)
    axes[0, 0].set_xlim(0, max(len(run.steps) for run in runs.values()))
    for axis in axes[-1]:
        axis.set_xlabel("step")
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    handles += [Patch(color=_RESERVED, label="KV pages in use"), Patch(color=_NEVER, label="of them never written")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _picture(run: Run) -> np.ndarray:
    """uint8 [requests, steps], rows in the order of arrival: 0 not in the batch, else a colour's number."""
    order = {request: row for row, request in enumerate(sorted(run.arrived, key=lambda i: (run.arrived[i], i)))}
    picture = np.zeros((len(order), len(run.steps)), np.uint8)
    for column, step in enumerate(run.steps):
        for number, requests in enumerate((step.prefill, step.decode, step.padding), 1):
            picture[[order[request] for request in requests], column] = number
    return picture

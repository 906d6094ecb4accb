"""In-flight batching of large language models for TorchServe.

The names below are imported on first use: TorchServe gives a worker two minutes to start, and torch is slow to import.
"""

import os
from typing import TYPE_CHECKING, Any

# What is left to torch's own operations runs on libgomp's threads, which wait for one another by spinning. Some hundred
# microseconds bridge the gaps between them (a thread that sleeps takes some fifty to wake: sampled steps are 6 % slower
# with a tenth of this); libgomp's own milliseconds would keep the cores from the frontend, from clients and from the
# kernels' helpers. libgomp reads this once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from ifb_handler.engine.engine import Engine
    from ifb_handler.engine.outputs import RequestOutput
    from ifb_handler.engine.sampling_params import SamplingParams

__all__ = ["Engine", "RequestOutput", "SamplingParams"]

_HOMES = {
    "Engine": "ifb_handler.engine.engine",
    "RequestOutput": "ifb_handler.engine.outputs",
    "SamplingParams": "ifb_handler.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""Times a model's linear layers by the form of their weights: `python -m ifb_kernels.bench_linear` prints JSON.

Milliseconds of all the matrix products of a step, by rows in it. The weights of each form are as many and as large as
SmolLM2-135M's, so that they come from memory as in a step. Each product allocates its result, and the output projection
is taken for every row: at 256 rows a step, which does neither, is a quarter quicker.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

import torch

from ifb_kernels.bench import quickest_ms
from ifb_kernels.grouped_linear import GroupedLinear, quantize_in_groups
from ifb_kernels.int8_linear import Int8Linear
from ifb_kernels.packed_linear import PackedLinear

FORMS: dict[str, Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "float32": PackedLinear,
    "int8": Int8Linear,
    "int8_weight_only": lambda weight: GroupedLinear(quantize_in_groups(weight, 8)),
    "int4_weight_only": lambda weight: GroupedLinear(quantize_in_groups(weight, 4)),
}


def layer_shapes(
    hidden: int, intermediate: int, queries: int, keys: int, layers: int, vocab: int
) -> list[tuple[int, int]]:
    """(in, out) of all fused projections, in the order of a step. `queries`, `keys`: channels of all heads together."""
    layer = [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * intermediate), (intermediate, hidden)]
    return layer * layers + [(hidden, vocab)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ifb_kernels.bench_linear", description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=list(FORMS), action="append", help="may be repeated (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 256])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = layer_shapes(576, 1536, 576, 192, 30, 49152)
    macs = sum(inputs * outputs for inputs, outputs in shapes)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for form in options.form or FORMS:
        linears = [(FORMS[form](torch.randn(outputs, inputs)), inputs) for inputs, outputs in shapes]
        figures[form] = {}
        for rows in options.rows:
            inputs = {size: torch.randn(rows, size) for size in {size for size, _ in shapes}}

            def step(linears: list = linears, inputs: dict[int, torch.Tensor] = inputs) -> None:
                for linear, size in linears:
                    linear(inputs[size])

            ms = quickest_ms(step, options.repeat)
            figures[form][f"{rows}_rows"] = {"ms": round(ms, 2), "gmacs_per_s": round(macs * rows / ms / 1e6, 1)}
    print(
        json.dumps(
            {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "macs_per_row": macs, "forms": figures},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

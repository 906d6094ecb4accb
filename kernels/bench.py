"""Times the attention backends and the decoder's fused operations: `python -m ifb_kernels.bench` prints JSON.

The shapes are a layer of SmolLM2-135M (9 query heads, 3 key/value heads of 64 channels) by default. Each case walks the
pages of up to 30 layers and 256 MB, as a step does, so that keys come from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from ifb_kernels.backend import AttentionBackend, select_backend
from ifb_kernels.rms_norm import rms_norm
from ifb_kernels.rotary_embedding import rotary_embedding
from ifb_kernels.silu_and_mul import silu_and_mul
from ifb_kernels.synthetic import SyntheticBatch, synthetic_batch

CASES = {
    "decode_32x200": [(1, 200)] * 32,
    "prefill_256": [(256, 256)],
    "prefill_256_after_1792": [(256, 2048)],
    "mixed_31x200_and_prefill_225": [(1, 200)] * 31 + [(225, 225)],
    "decode_8x2000": [(1, 2000)] * 8,
    "decode_1x2000": [(1, 2000)],
    "decode_1x8000": [(1, 8000)],
}
POOL_BYTES = 256 * 2**20


def quickest_ms(action: Callable[[], None], repeat: int) -> float:
    """Milliseconds of one `action`, the least of `repeat`: what other processes take away is not the kernel's."""
    taken = []
    for _ in range(repeat):
        started = time.perf_counter()
        action()
        taken.append((time.perf_counter() - started) * 1e3)
    return min(taken)


def attention_ms(
    backend: AttentionBackend, batch: SyntheticBatch, kv_dtype: torch.dtype, layers: int, repeat: int
) -> dict[str, float]:
    """Milliseconds a layer, for the KV-cache write and for attention."""
    pools = [batch.fill(backend, kv_dtype) for _ in range(layers)]
    tokens = batch.queries.shape[0]
    keys, values = batch.keys[:tokens], batch.values[:tokens]

    def write() -> None:
        for pages in pools:
            backend.write(keys, values, pages, batch.step)

    def attend() -> None:
        for pages in pools:
            batch.attend(backend, pages)

    return {
        "write_ms": round(quickest_ms(write, repeat) / layers, 4),
        "attend_ms": round(quickest_ms(attend, repeat) / layers, 4),
    }


def operations_ms(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, repeat: int) -> dict[str, float]:
    """Milliseconds a call of each fused operation of a decoder layer, on CPU."""
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((tokens, hidden), (tokens, hidden), (hidden,)))
    gate_up = torch.randn(tokens, 2 * intermediate).to(dtype)
    q, k = torch.randn(tokens, 9, 64).to(dtype), torch.randn(tokens, 3, 64).to(dtype)
    angles, positions = torch.randn(tokens, 32), torch.arange(tokens)
    actions = {
        "rms_norm": lambda: rms_norm(x, weight, 1e-5, residual),
        "rotary_embedding": lambda: rotary_embedding(q, k, angles, angles, positions),
        "silu_and_mul": lambda: silu_and_mul(gate_up),
    }
    return {name: round(quickest_ms(action, 10 * repeat), 4) for name, action in actions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ifb_kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="triton, cpu, torch or reference (default: the CPU's quickest)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--kv-dtype", choices=["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    kv_dtype = getattr(torch, options.kv_dtype or options.dtype)
    backend = select_backend(torch.device("cpu"), options.backend)
    attention = {}
    for name, rows in CASES.items():
        batch = synthetic_batch(
            rows,
            num_heads=options.heads,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            dtype=dtype,
        )
        layers = max(1, min(30, POOL_BYTES // (2 * batch.keys.numel() * dtype.itemsize)))
        attention[name] = attention_ms(backend, batch, kv_dtype, layers, options.repeat)
    report = {
        "backend": backend.name,
        "dtype": options.dtype,
        "kv_dtype": options.kv_dtype or options.dtype,
        "heads": [options.heads, options.kv_heads, options.head_dim],
        "threads": torch.get_num_threads(),
        "attention_per_layer": attention,
        "operations": {f"{n}_tokens": operations_ms(n, 576, 1536, dtype, options.repeat) for n in (1, 32, 256)},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

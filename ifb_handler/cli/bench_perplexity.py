"""`ifb bench perplexity`: what a model loses by quantized weights, keys and values, on a text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ifb_handler.cli.bench_table import show
from ifb_handler.cli.errors import UsageError
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.sampling_params import SamplingParams

TEXT = Path(__file__).with_name("harbour.txt")  # a story written for this: no model has seen it


@dataclass(frozen=True)
class Reading:
    """How well a model foretold a text. `likeliest`: the token that greedy decoding would have gone on with, each time.

    The text is read in pieces of at most the model's length, the first token of each unjudged.
    """

    perplexity: float
    likeliest: list[int]
    weight_bytes: int


def perplexity(
    model: Annotated[str, typer.Option(help="Name, folder, GGUF file or hub id.")] = "smollm2-135m",
    quantization: Annotated[
        str | None, typer.Option(help="int8, int8_weight_only or int4_weight_only; none by default.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8_e4m3.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    text: Annotated[Path, typer.Option(help="A file of text in UTF-8.", show_default="a story of 1,300 tokens")] = TEXT,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Read a text with a quantized model and with the same in float32: perplexity, and greedy tokens in common."""
    try:
        words = " ".join(text.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: {text} cannot be read: {error}") from error
    exact = read(words, model, dtype="float32")
    chosen = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "dtype": dtype}
    quantized = read(words, model, **chosen)
    equal = sum(a == b for a, b in zip(exact.likeliest, quantized.likeliest, strict=True))
    figures = {
        "model": model,
        **chosen,
        "tokens": len(exact.likeliest),
        "float32_perplexity": exact.perplexity,
        "perplexity": quantized.perplexity,
        "perplexity_change": quantized.perplexity / exact.perplexity - 1,
        "greedy_tokens_equal": equal / len(exact.likeliest),
        "float32_weight_mib": exact.weight_bytes / 2**20,
        "weight_mib": quantized.weight_bytes / 2**20,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    rows = [
        ("perplexity", f"{exact.perplexity:.3f}", f"{quantized.perplexity:.3f}"),
        ("  change", "", f"{figures['perplexity_change']:+.2%}"),
        ("greedy tokens equal", "", f"{figures['greedy_tokens_equal']:.1%}"),
        ("weights, MiB", f"{figures['float32_weight_mib']:.0f}", f"{figures['weight_mib']:.0f}"),
    ]
    show(f"{model}, {len(exact.likeliest)} tokens", ["", "float32", quantization or "as asked"], rows)


def read(text: str, model: str, **options: Any) -> Reading:
    """`text` under `model` with these engine options. Raises UsageError if it has fewer than two tokens."""
    with Engine(model, enable_prefix_caching=False, **options) as engine:
        token_ids = engine.tokenizer.encode(text)
        if len(token_ids) < 2:
            raise UsageError(f"--text: {len(token_ids)} tokens are too few: at least 2")
        longest = engine.max_model_len - 1
        pieces = [token_ids[start : start + longest] for start in range(0, len(token_ids), longest)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        outputs = engine.generate(pieces, params)
        judged = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
        loss = -sum(entry.logprob for entry in judged) / len(judged)
        return Reading(math.exp(loss), [entry.top[0][0] for entry in judged], engine.weight_bytes)

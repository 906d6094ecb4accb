"""The batching of known systems, each as a configuration of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from ifb_handler.cli.errors import UsageError

# Prompts that are not cut need a step that holds them: the budget that vLLM had before it cut them.
_WHOLE_PROMPTS: dict[str, object] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
_NO_CACHE: dict[str, object] = {"enable_prefix_caching": False}


@dataclass(frozen=True)
class Mode:
    """`options` go over the engine's; `granularity`: what is scheduled at once."""

    about: str
    granularity: str
    options: dict[str, object]


MODES = {
    "static": Mode(
        "a batch runs until its longest answer ends (Hugging Face generate, TorchServe's batchSize)",
        "request",
        {"batching": "static", "kv_reservation": "max_length", **_WHOLE_PROMPTS, **_NO_CACHE},
    ),
    "orca": Mode(
        "continuous, pages for the longest answer, whole prompts (Orca)",
        "iteration",
        {"kv_reservation": "max_length", **_WHOLE_PROMPTS, **_NO_CACHE},
    ),
    "vllm-early": Mode(
        "paged, whole prompts in steps of their own, before answers (vLLM 0.1 to 0.4)",
        "iteration, prompts apart",
        {"prefill_priority": "prefill_first", **_WHOLE_PROMPTS, **_NO_CACHE},
    ),
    "trt-no-evict": Mode(
        "paged, whole prompts beside answers, none in that might be preempted (TensorRT-LLM GUARANTEED_NO_EVICT)",
        "iteration",
        {"capacity": "guaranteed_no_evict", **_WHOLE_PROMPTS, **_NO_CACHE},
    ),
    "trt-max-util": Mode(
        "the same, in while there are pages (TensorRT-LLM MAX_UTILIZATION)",
        "iteration",
        {"capacity": "max_utilization", **_WHOLE_PROMPTS, **_NO_CACHE},
    ),
    "sarathi": Mode(
        "paged, answers first, prompts in chunks (Sarathi-Serve, DeepSpeed-FastGen)",
        "iteration, chunks",
        {**_NO_CACHE},
    ),
    "sglang": Mode(
        "the same with a prefix cache, the longest known prefix first (SGLang)",
        "iteration, chunks",
        {"scheduling_policy": "longest_prefix_match"},
    ),
    "default": Mode("what this engine does unless told otherwise", "iteration, chunks", {}),
}


def check_modes(names: list[str], option: str) -> list[str]:
    """The names, if all are modes; else UsageError."""
    for name in names:
        if name not in MODES:
            raise UsageError(f"{option}: {name!r} is not one of {', '.join(MODES)}")
    return names

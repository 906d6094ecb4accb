"""The engine's options. Each is a key under `handler:` in model-config.yaml and a keyword of `Engine(...)`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from ifb_handler.engine.errors import ConfigError
from ifb_handler.engine.sampling_params import MAX_LOGPROBS

_COUNTS = (
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "num_gpu_blocks_override",
    "default_max_tokens",
    "max_input_tokens",
    "max_total_tokens",
    "max_stop_sequences",
    "max_stop_length",
    "max_n",
    "max_logprobs",
    "max_client_batch_size",
    "num_threads",
)

# Far above what a machine can use, and below what overflows or exhausts it before anything names the option.
_MOST = {
    "max_model_len": 2**24,
    "block_size": 1024,
    "max_num_seqs": 65_536,
    "max_num_batched_tokens": 2**20,
    "num_gpu_blocks_override": 2**31 - 1,
    "num_speculative_tokens": 64,
    "prompt_lookup_max": 64,
}
_MOST_GIB = 2**20

CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": (None, "int8", "int8_weight_only", "int4_weight_only"),
    "kv_cache_dtype": ("auto", "int8", "fp8_e4m3"),
    "attention_backend": ("auto", "triton", "cpu", "torch"),
    "batching": ("continuous", "static"),
    "scheduling_policy": ("fcfs", "priority", "longest_prefix_match", "shortest_job_first"),
    "prefill_priority": ("decode_first", "prefill_first"),
    "capacity": ("max_utilization", "guaranteed_no_evict"),
    "preemption_mode": ("auto", "recompute", "swap"),
    "kv_reservation": ("on_demand", "max_length"),
}
SPECULATIVE_METHODS = ("ngram", "draft_model")


@dataclass(frozen=True)
class EngineConfig:
    """Validated on construction; a bad value raises ConfigError naming the key, the value and what is allowed.

    model                      `smollm2-135m` (embedded default), a Hugging Face folder, a GGUF file, or a hub id
    tokenizer                  a tokenizer from elsewhere: folder, tokenizer.json or hub id; None: the model's own
    served_model_name          the name in answers; None: the model's own
    dtype                      auto, float32, bfloat16 or float16; auto is float32 on CPU, the checkpoint's own on a GPU
    quantization               None: weights in the dtype above; in float32 on a CPU those of a Q4_0, Q4_1 or Q8_0 GGUF
                               file stay in its codes, which gives the same bits sooner. On a CPU also
                               int8: linear layers, the output projection included, multiply in 8-bit integers, with a
                               scale for each output channel and each token;
                               int8_weight_only, int4_weight_only: their weights are codes of 8 or 4 bits, a scale for
                               32 of them (the output projection's always 8), and a GGUF file's own are kept as they
                               are, where they are of no more bits; activations stay floats
    kv_cache_dtype             auto (the dtype above), int8 or fp8_e4m3: keys and values in 8 bits, a scale for each
                               token and head; about a quarter of float32's memory, half of bfloat16's
    device                     auto, cpu, cuda or cuda:N
    max_model_len              prompt plus answer, in tokens; None: what the model was trained for
    block_size                 tokens in a KV page, a power of two up to 1024
    max_num_seqs               most requests in the running batch, up to 65536
    max_num_batched_tokens     token budget of one step: decodes first, then prefill chunks; None: 256 on a CPU, 2048 on
                               a GPU, or max_num_seqs if that is more
    target_itl_ms              milliseconds between two tokens of an answer to aim at: the token budget adapts to it;
                               None: the budget is always the same
    batching                   continuous, or static: a batch is formed when nothing runs, and none joins it
    scheduling_policy          who is admitted first: fcfs, priority, longest_prefix_match or shortest_job_first
    prefill_priority           decode_first (no answer stalls) or prefill_first (prompts before answers)
    enable_chunked_prefill     cut prompts to what is left of a step's budget; false: whole or not at all
    capacity                   max_utilization (admit while there are pages, preempt when there are none) or
                               guaranteed_no_evict (admit only what can run to its end)
    kv_reservation             on_demand, or max_length: pages for the longest answer when a request comes in
    swap_space                 GiB of host memory for the pages of preempted requests; 0: they are computed again
    preemption_mode            auto (what is cheaper), recompute or swap
    speculative_method         None, ngram or draft_model: guess a few tokens of an answer ahead and let one step judge
                               them all. Answers stay the same; by itself it is used only where it pays
    speculative_model          draft_model: a small model that guesses, of the same vocabulary, named as `model` is
    num_speculative_tokens     most tokens guessed ahead for a request, up to 64
    prompt_lookup_max, prompt_lookup_min    ngram: the longest and the shortest run of last tokens, up to 64, that is
                               looked for earlier in prompt and answer
    max_num_waiting            most requests in the waiting queue, those not counted that the batch has places for;
                               one more is refused (503)
    num_gpu_blocks_override    pages in the pool, whatever the memory; None: from the two options below
    enable_prefix_caching      keep the keys and values of prompts that have ended, for others that begin alike
    gpu_memory_utilization     on a GPU, the share of its memory that weights and pool together may take
    cpu_kv_cache_gib           on a CPU, the pool's size
    default_max_tokens         max_tokens of a plain body or raw text that names none
    max_input_tokens           longest prompt that is taken, in tokens; None: what leaves room for one token more
    max_total_tokens           most tokens of a prompt and the max_tokens asked for with it; None: an answer that comes
                               to max_model_len just ends there
    max_stop_sequences         most stop strings of a request
    max_stop_length            most characters in a stop string
    max_n                      most answers to one prompt (n, best_of)
    max_logprobs               most rivals of a token whose log probabilities are told
    max_client_batch_size      most prompts in one request
    request_timeout            seconds until a request is ended with an error; a request may ask for less; None: never
    seed                       seeds the requests that bring no seed of their own; None: from the system
    attention_backend          auto, triton, cpu or torch
    num_threads                threads of torch and the CPU kernels, up to the machine's cores; None: torch's own choice
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    target_itl_ms: float | None = None
    batching: str = "continuous"
    scheduling_policy: str = "fcfs"
    prefill_priority: str = "decode_first"
    enable_chunked_prefill: bool = True
    capacity: str = "max_utilization"
    kv_reservation: str = "on_demand"
    swap_space: float = 0.0
    preemption_mode: str = "auto"
    speculative_method: str | None = None
    speculative_model: str | None = None
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    max_num_waiting: int = 1024
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    default_max_tokens: int = 256
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_stop_sequences: int = 16
    max_stop_length: int = 256
    max_n: int = 16
    max_logprobs: int = 20
    max_client_batch_size: int = 128
    request_timeout: float | None = None
    seed: int | None = None
    attention_backend: str = "auto"
    num_threads: int | None = None

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> EngineConfig:
        """From model-config.yaml's `handler:` section. An unknown key is an error that names it and the nearest one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"{key}: not an option of the engine; {hint}the options are {', '.join(known)}")
        return cls(**options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for name, hint in hints.items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), hint))
        for name, allowed in CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        if self.device not in ("auto", "cpu", "cuda") and not (
            self.device.startswith("cuda:") and self.device[5:].isdigit()
        ):
            raise ConfigError(f"device: {self.device!r} is not auto, cpu, cuda or cuda:N")
        if not self.model:
            raise ConfigError("model: '' is not a model's name, folder or file")
        for name in _COUNTS:
            _count(name, getattr(self, name))
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size: {self.block_size} is not a power of two")
        if self.speculative_method is not None:
            _one_of("speculative_method", self.speculative_method, SPECULATIVE_METHODS)
        if (self.speculative_method == "draft_model") != bool(self.speculative_model):
            raise ConfigError(
                f"speculative_model: {self.speculative_model!r} and speculative_method: {self.speculative_method!r}; a "
                "model is named with draft_model, and with that only"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max, {self.prompt_lookup_max}"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: {self.gpu_memory_utilization} is not in (0, 1]")
        if not (math.isfinite(self.cpu_kv_cache_gib) and self.cpu_kv_cache_gib > 0):
            raise ConfigError(f"cpu_kv_cache_gib: {self.cpu_kv_cache_gib} is not above 0")
        if self.target_itl_ms is not None and not (math.isfinite(self.target_itl_ms) and self.target_itl_ms > 0):
            raise ConfigError(f"target_itl_ms: {self.target_itl_ms} is not above 0")
        if not (math.isfinite(self.swap_space) and self.swap_space >= 0):
            raise ConfigError(f"swap_space: {self.swap_space} is not 0 or above")
        for name in ("cpu_kv_cache_gib", "swap_space"):
            if getattr(self, name) > _MOST_GIB:
                raise ConfigError(f"{name}: {getattr(self, name)} is more than {_MOST_GIB}")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs: {self.max_logprobs} is above {MAX_LOGPROBS}")
        if self.request_timeout is not None and not (math.isfinite(self.request_timeout) and self.request_timeout > 0):
            raise ConfigError(f"request_timeout: {self.request_timeout} is not above 0")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed: {self.seed} is not from 0 to 2**64 - 1")


def _typed(name: str, value: object, hint: object) -> object:
    """`value` if it is of the type `hint` (an integer passes for a float); raises ConfigError otherwise."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return value
    if float in allowed and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, tuple(allowed)):
        names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)  # type: ignore[union-attr]
        raise ConfigError(f"{name}: {value!r} is of type {type(value).__name__}, not {names}")
    return value


def _one_of(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(a or 'null' for a in allowed)}")


def _count(name: str, value: int | None) -> None:
    if value is None:
        return
    if value < 1:
        raise ConfigError(f"{name}: {value} is not at least 1")
    if value > _MOST.get(name, value):
        raise ConfigError(f"{name}: {value} is more than {_MOST[name]}")

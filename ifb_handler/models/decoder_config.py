"""The shape of a Llama-family decoder, read from a Hugging Face config.json or from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ifb_handler.models.errors import ModelError
from ifb_handler.models.rope import RopeParameters, yarn_attention_factor

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What `transformers` assumes for a key that a config.json leaves out, where the architectures differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
}


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    dtype             of weights and KV pages: the checkpoint's own until `load_model` decides
    max_model_len     positions that the model was trained for, times the factor where they are scaled dynamically
    sliding_windows   one per layer: how many positions back a query sees, itself included; None: all of them
    qkv_bias, output_bias, mlp_bias   which projections add a bias
    qk_norm           RMSNorm over each head of queries and keys before the rotation (Qwen3)
    tied_embeddings   the output projection is the embedding table
    eos_token_ids     from the checkpoint's config; a generation_config.json may override them (see `loading.py`)
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeParameters
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()

    @property
    def sliding_window(self) -> int | None:
        """How far back any layer looks; None when at least one layer sees everything."""
        return None if None in self.sliding_windows else max(w for w in self.sliding_windows if w is not None)

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
            "max_model_len",
        ):  # fmt: skip
            _check_count(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_kv_heads: {self.num_kv_heads} does not divide the {self.num_heads} attention heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim: {self.head_dim} is odd; rotary positions need pairs of channels")
        if not (isinstance(self.rms_norm_eps, float) and math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ModelError(f"rms_norm_eps: {self.rms_norm_eps!r} is not a number above 0")
        if any(w is not None and w < 1 for w in self.sliding_windows):
            raise ModelError(f"sliding_window: {self.sliding_window!r} is not at least 1")


def config_from_huggingface(raw: Mapping[str, Any]) -> DecoderConfig:
    """From a parsed config.json. Raises ModelError on an architecture or a feature that the decoder does not have."""
    architecture = raw.get("model_type")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported_architecture("model_type", architecture)
    values = {**_DEFAULTS[architecture], **raw}
    _must_be(raw, "hidden_act", "silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"quantization_config: a {method} checkpoint; supported are float32, bfloat16 and float16 safetensors, "
            "and the quantized types of GGUF files"
        )
    num_layers = _required_count(values, "num_hidden_layers")
    num_heads = _required_count(values, "num_attention_heads")
    hidden_size = _required_count(values, "hidden_size")
    rope = _rope_from_huggingface(values)
    attention_bias = architecture != "mistral" and bool(values.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_required(values, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or (8 if architecture == "mistral" else num_heads),
        head_dim=values.get("head_dim") or hidden_size // num_heads,
        vocab_size=_required(values, "vocab_size"),
        max_model_len=_max_model_len(values, rope),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        sliding_windows=_sliding_windows(architecture, values, num_layers),
        qkv_bias=architecture == "qwen2" or attention_bias,
        output_bias=architecture != "qwen2" and attention_bias,
        mlp_bias=architecture == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        dtype=_checkpoint_dtype(values),
        eos_token_ids=as_token_ids("eos_token_id", values.get("eos_token_id")),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: set[str], dtype: torch.dtype) -> DecoderConfig:
    """From GGUF metadata (arrays of strings may be absent) and the names of its tensors.

    `general.architecture` is llama (also Mistral's, which llama.cpp writes as llama), mistral, qwen2 or qwen3. The
    factors of a `rope_freqs.weight` tensor are the reader's to add (`RopeParameters.frequency_factors`).
    """
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported_architecture("general.architecture", architecture)

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    def required(name: str) -> Any:
        return _required(metadata, f"{architecture}.{name}")

    num_layers, num_heads, hidden_size = (
        _required_count(metadata, f"{architecture}.{name}")
        for name in ("block_count", "attention.head_count", "embedding_length")
    )
    head_dim = key("attention.key_length") or key("rope.dimension_count") or hidden_size // num_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if key(name, head_dim) != head_dim:
            raise ModelError(f"{architecture}.{name}: {key(name)} is not the head size {head_dim}; it must be")
    if key("expert_count", 0):
        raise ModelError(f"{architecture}.expert_count: {key('expert_count')}; mixtures of experts are not supported")
    scaling = key("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"{architecture}.rope.scaling.type: {scaling!r} is not one of none, linear")
    factor = float(key("rope.scaling.factor") or key("rope.scale_linear") or 1.0)
    eos = [metadata.get(f"tokenizer.ggml.{name}") for name in ("eos_token_id", "eot_token_id")]
    return DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=required("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=key("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=required("vocab_size"),
        max_model_len=required("context_length"),
        rms_norm_eps=float(required("attention.layer_norm_rms_epsilon")),
        rope=RopeParameters(
            theta=float(key("rope.freq_base", 10_000.0)),
            type="default" if factor == 1.0 else "linear",
            factor=factor,
        ),
        sliding_windows=(key("attention.sliding_window") or None,) * num_layers,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm=architecture == "qwen3",
        tied_embeddings="output.weight" not in tensor_names,
        dtype=dtype,
        eos_token_ids=as_token_ids("tokenizer.ggml.eos_token_id", [e for e in eos if e is not None]),
    )


def as_token_ids(field: str, value: Any) -> tuple[int, ...]:
    """`value` (None, an id or a list of ids) as a tuple without repeats, in order. Raises ModelError otherwise."""
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{field}: {value!r} is neither a token id nor a list of token ids")
    return tuple(dict.fromkeys(ids))


def unsupported_architecture(field: str, architecture: object) -> ModelError:
    return ModelError(f"{field}: {architecture!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise ModelError(f"{key}: missing from the model's config")
    return values[key]


def _required_count(values: Mapping[str, Any], key: str) -> int:
    value = _required(values, key)
    _check_count(key, value)
    return value


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: {value!r} is not a whole number of at least 1")


def _must_be(raw: Mapping[str, Any], key: str, only: str) -> None:
    if raw.get(key, only) != only:
        raise ModelError(f"{key}: {raw[key]!r} is not supported; supported is {only}")


def _checkpoint_dtype(values: Mapping[str, Any]) -> torch.dtype:
    """`dtype` (transformers 5) or `torch_dtype` (before); float32 when neither is there."""
    name = values.get("dtype") or values.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _rope_from_huggingface(values: Mapping[str, Any]) -> RopeParameters:
    """`rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (before)."""
    rope = dict(values.get("rope_parameters") or {}) | dict(values.get("rope_scaling") or {})
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor: {partial!r} is not supported; supported is 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", values.get("rope_theta"))
    scaling: dict[str, Any] = {}
    if kind == "linear":
        scaling = {"factor": float(_required(rope, "factor"))}
    elif kind == "dynamic":
        trained = values["max_position_embeddings"]
        scaling = {"factor": float(_required(rope, "factor")), "original_max_position_embeddings": trained}
    elif kind == "llama3":
        scaling = {key: float(_required(rope, key)) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        trained = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = trained or values["max_position_embeddings"]
    elif kind == "yarn":
        scaling = _yarn_from_huggingface(rope, values)
    return RopeParameters(theta=10_000.0 if theta is None else float(theta), type=kind, **scaling)


def _max_model_len(values: Mapping[str, Any], rope: RopeParameters) -> int:
    trained = values["max_position_embeddings"]
    return int(trained * rope.factor) if rope.type == "dynamic" else trained


def _yarn_from_huggingface(rope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    trained = rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
    factor = float(rope.get("factor") or values["max_position_embeddings"] / trained)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return {
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
        "attention_factor": float(attention),
        "truncate": rope.get("truncate", True),
    }


def _sliding_windows(architecture: str, values: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Mistral: the window on every layer. Qwen: with `use_sliding_window`, on the layers that are said to slide."""
    if architecture == "llama":
        return (None,) * num_layers
    window = values["sliding_window"]
    if architecture == "mistral":
        return (window,) * num_layers
    if not values.get("use_sliding_window", False):
        window = None
    kinds = values.get("layer_types")
    if kinds is None:
        first_sliding = values.get("max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(num_layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise ModelError(
            f"layer_types: {unknown or len(kinds)}; expected are {num_layers} of full_attention or sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

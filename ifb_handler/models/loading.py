"""Fills a decoder from a checkpoint, one fused weight at a time: never two copies of the whole model in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ifb_handler.models.checkpoint import Checkpoint
from ifb_handler.models.decoder import Decoder, DecoderLayer
from ifb_handler.models.decoder_config import DTYPES, DecoderConfig, as_token_ids
from ifb_handler.models.embedding import Embedding
from ifb_handler.models.errors import ModelError
from ifb_handler.models.linear import WEIGHT_ONLY_BITS, Linear, multiplies_codes_as_floats, packs
from ifb_handler.models.memory import release_freed_memory, release_startup_code
from ifb_handler.models.progress import Progress
from ifb_handler.models.source import ModelFiles
from ifb_kernels.backend import AttentionBackend
from ifb_kernels.grouped_linear import GroupedWeight, concatenated


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `weight_bytes` counts all that was allocated for weights, the embedding table included."""

    name: str
    config: DecoderConfig
    decoder: Decoder
    eos_token_ids: tuple[int, ...]
    weight_bytes: int


def load_model(
    files: ModelFiles,
    *,
    dtype: str,
    device: torch.device,
    backend: AttentionBackend,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the weights of `files` onto `device`.

    `dtype` is float32, bfloat16, float16 or auto: float32 on a CPU, the checkpoint's own elsewhere. `quantization` is
    one of QUANTIZATIONS, which all linear layers put their weights in (on a CPU); None: as they are, which may be in a
    GGUF file's codes where products come out the same. Raises ModelError naming the tensor that is missing, unexpected
    or of the wrong shape.
    """
    checkpoint = open_checkpoint(files)
    config = dataclasses.replace(checkpoint.config, dtype=_choose_dtype(dtype, device, checkpoint.config))
    loader = _Loader(checkpoint, config, device, quantization, progress)
    decoder = loader.build(backend)
    return LoadedModel(files.name, config, decoder, _eos_token_ids(files, config), loader.weight_bytes)


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """The checkpoint's config and list of tensors; no weights are read."""
    if files.is_gguf:
        from ifb_handler.models.gguf_file import GGUFFile

        return GGUFFile(files.path)
    from ifb_handler.models.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(files.path)


def _choose_dtype(dtype: str, device: torch.device, config: DecoderConfig) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype: {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _eos_token_ids(files: ModelFiles, config: DecoderConfig) -> tuple[int, ...]:
    """generation_config.json's where it names any, as in Hugging Face's `generate`; else those of the model's config.

    (`generate` would never stop where that file is there and names none.)
    """
    path = files.path / "generation_config.json"
    if files.is_gguf or not path.exists():
        return config.eos_token_ids
    from ifb_handler.models.safetensors_folder import read_json

    named = as_token_ids("generation_config.json eos_token_id", read_json(path).get("eos_token_id"))
    return named or config.eos_token_ids


class _Loader:
    """Reads the parts of each fused weight into one buffer, and hands it to the layer that packs it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        device: torch.device,
        quantization: str | None,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._device = device
        self._quantization = quantization
        self._progress = progress or (lambda done, total, what: None)
        expected = set(_expected_tensors(config))
        found = checkpoint.tensor_names
        if config.tied_embeddings:
            found = found - {"lm_head.weight"}
        if missing := sorted(expected - found):
            raise ModelError(f"{missing[0]}: missing from the checkpoint ({len(missing)} tensors are)")
        if unexpected := sorted(found - expected):
            raise ModelError(
                f"{unexpected[0]}: in the checkpoint ({len(unexpected)} such tensors), but not in {config.architecture}"
            )
        self._scratch = self._empty(0, 1)
        self._total = len(expected)
        self._done = 0
        self.weight_bytes = 0

    def build(self, backend: AttentionBackend) -> Decoder:
        config = self._config
        self._step(0)
        output = self._output()
        embedding = self._embedding(output)
        self._scratch = self._empty(0, 1)  # the output projection's is far larger than any layer needs
        layers = [self._layer(index) for index in range(config.num_layers)]
        norm = self._vector("model.norm.weight", config.hidden_size)
        release_freed_memory()
        release_startup_code()
        return Decoder(config, embedding, layers, norm, output, backend)

    def _layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, intermediate = config.hidden_size, config.intermediate_size
        norm = config.head_dim if config.qk_norm else None
        release_freed_memory()
        return DecoderLayer(
            attention_norm=self._vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(
                {f"{attention}.q_proj": query, f"{attention}.k_proj": key_value, f"{attention}.v_proj": key_value},
                hidden,
                config.qkv_bias,
            ),
            query_norm=self._vector(f"{attention}.q_norm.weight", norm) if norm else None,
            key_norm=self._vector(f"{attention}.k_norm.weight", norm) if norm else None,
            attention_out=self._fused({f"{attention}.o_proj": hidden}, query, config.output_bias),
            feed_forward_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused(
                {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}, hidden, config.mlp_bias
            ),
            down=self._fused({f"{mlp}.down_proj": hidden}, intermediate, config.mlp_bias),
            sliding_window=config.sliding_windows[index],
        )

    def _fused(self, parts: dict[str, int], in_features: int, bias: bool) -> Linear:
        """One linear whose outputs are those of `parts` (name: out features), one after another."""
        return self._linear(parts, in_features, bias, self._quantization)

    def _output(self) -> Linear:
        """The projection to the vocabulary. It decides what is said: 8 bits where the others take 4 cost little."""
        config = self._config
        name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        quantization = "int8_weight_only" if self._quantization == "int4_weight_only" else self._quantization
        return self._linear({name: config.vocab_size}, config.hidden_size, False, quantization)

    def _linear(self, parts: dict[str, int], in_features: int, bias: bool, quantization: str | None) -> Linear:
        out_features = sum(parts.values())
        biases = self._filled(parts, "bias", self._empty(out_features)) if bias else None
        weight: torch.Tensor | GroupedWeight | None = self._grouped(parts, in_features, quantization)
        if weight is None:
            weight = self._filled(parts, "weight", self._weight_to_fill(out_features, in_features))
        linear = Linear(weight, biases, quantization)
        self.weight_bytes += linear.num_bytes
        return linear

    def _filled(self, parts: dict[str, int], kind: str, room: torch.Tensor) -> torch.Tensor:
        """`room` with the weights or biases of `parts`, one after another."""
        for name, part in zip(parts, room.split(list(parts.values())), strict=True):
            self._read(f"{name}.{kind}", part)
        return room

    def _grouped(self, parts: dict[str, int], in_features: int, quantization: str | None) -> GroupedWeight | None:
        """The checkpoint's own codes: of no more bits than `quantization` asks for, or wherever that loses nothing."""
        if quantization is not None:
            bits = WEIGHT_ONLY_BITS.get(quantization, 0)
        else:
            bits = max(WEIGHT_ONLY_BITS.values()) if multiplies_codes_as_floats(self._scratch) else 0
        if bits == 0:
            return None
        weights = []
        for name, out_features in parts.items():
            weight = self._checkpoint.grouped(f"{name}.weight")
            if weight is None or weight.bits > bits or (weights and weight.bits != weights[0].bits):
                return None
            if (weight.out_features, weight.in_features) != (out_features, in_features):
                return None  # and `read` says so
            weights.append(weight)
        self._step(len(parts))
        return concatenated(weights)

    def _embedding(self, output: Linear) -> Embedding:
        """The output projection's own memory where it is tied and not packed; else a table in its stored form."""
        name = "model.embed_tokens.weight"
        if self._config.tied_embeddings and output.weight is not None:
            return Embedding(output.weight, self._config.dtype)
        if self._device.type == "cpu":
            embedding = self._checkpoint.embedding(name, self._config.dtype)
        else:
            table = self._empty(self._config.vocab_size, self._config.hidden_size)
            self._checkpoint.read(name, table)
            embedding = Embedding(table, self._config.dtype)
        if not self._config.tied_embeddings:
            self._step(1)
        self.weight_bytes += embedding.num_bytes
        return embedding

    def _vector(self, name: str, size: int) -> torch.Tensor:
        vector = self._empty(size)
        self._read(name, vector)
        self.weight_bytes += vector.numel() * vector.element_size()
        return vector

    def _weight_to_fill(self, out_features: int, in_features: int) -> torch.Tensor:
        """Room for a fused weight: the same room each time where the layer that gets it keeps a packed copy."""
        if not packs(self._scratch, self._quantization):
            return self._empty(out_features, in_features)
        size = out_features * in_features
        if self._scratch.numel() < size:
            self._scratch = self._empty(size, 1)
        return self._scratch.flatten()[:size].view(out_features, in_features)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._config.dtype, device=self._device)

    def _read(self, name: str, out: torch.Tensor) -> None:
        self._checkpoint.read(name, out)
        self._step(1)

    def _step(self, tensors: int) -> None:
        self._done += tensors
        self._progress(self._done, self._total, "loading weights")


def _expected_tensors(config: DecoderConfig) -> Iterator[str]:
    """The name of every tensor that the decoder needs."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tied_embeddings:
        yield "lm_head.weight"
    projections = {
        "self_attn.q_proj": config.qkv_bias,
        "self_attn.k_proj": config.qkv_bias,
        "self_attn.v_proj": config.qkv_bias,
        "self_attn.o_proj": config.output_bias,
        "mlp.gate_proj": config.mlp_bias,
        "mlp.up_proj": config.mlp_bias,
        "mlp.down_proj": config.mlp_bias,
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    for layer in range(config.num_layers):
        for name in (*projections, *norms):
            yield f"model.layers.{layer}.{name}.weight"
        for name, has_bias in projections.items():
            if has_bias:
                yield f"model.layers.{layer}.{name}.bias"

"""Reads a GGUF file, llama.cpp's format: metadata, then quantized tensors that are widened as they are read.

The types, block sizes and dequantization come from the `gguf` package. The header is walked here: the package's
`GGUFReader` maps the whole file and makes two numpy objects for every word of the vocabulary, which takes seconds and
more memory than the engine's whole allowance.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ifb_handler.models.checkpoint import Checkpoint
from ifb_handler.models.decoder_config import config_from_gguf
from ifb_handler.models.embedding import Embedding
from ifb_handler.models.errors import ModelError
from ifb_kernels.grouped_linear import GROUP, GroupedWeight
from ifb_kernels.q8_0 import widen_q8_0

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32

# The scalar types of metadata values by their number, as struct formats; then the two that are not scalars.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Values that are widened at a time: what a conversion takes beside the weights.
_VALUES_AT_A_TIME = 1 << 18

# Hugging Face's names by llama.cpp's, both without `.weight` or `.bias`.
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies. `name` is llama.cpp's; `shape` is in torch's order: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile(Checkpoint):
    """One GGUF file of version 2 or 3, little-endian."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self.metadata, tensors = _read_header(file, path)
        except (OSError, OverflowError, MemoryError, struct.error, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read as GGUF: {error}") from error
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path}: one of {self.metadata['split.count']} pieces; join them with llama-gguf-split --merge"
            )
        architecture = self.metadata.get("general.architecture")
        if "token_embd.weight" in tensors:
            self.metadata.setdefault(f"{architecture}.vocab_size", tensors["token_embd.weight"].shape[0])
        size = path.stat().st_size
        for tensor in tensors.values():
            if tensor.offset + math.prod(tensor.shape[:-1]) * _row_bytes(tensor) > size:
                raise _incomplete(tensor)
        config = config_from_gguf(self.metadata, set(tensors), _own_dtype(tensors))
        if _ROPE_FACTORS in tensors:
            factors = torch.empty(tensors[_ROPE_FACTORS].shape)
            self._copy(tensors.pop(_ROPE_FACTORS), factors)
            rope = dataclasses.replace(config.rope, frequency_factors=tuple(factors.tolist()))
            config = dataclasses.replace(config, rope=rope)
        self.config = config
        self._tensors = {_huggingface_name(name): tensor for name, tensor in tensors.items()}
        self.tensor_names = set(self._tensors)

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        if tensor.shape != tuple(out.shape):
            raise ModelError(f"{name}: shape {list(tensor.shape)} in the file, {list(out.shape)} by its metadata")
        heads = self._permuted_heads(name)
        if not heads:
            self._copy(tensor, out)
            return
        stored = torch.empty(out.shape, dtype=out.dtype)
        self._copy(tensor, stored)
        out.copy_(stored[_huggingface_order(out.shape[0], heads)])

    def grouped(self, name: str) -> GroupedWeight | None:
        from gguf.constants import GGMLQuantizationType as Type

        tensor = self._tensors[name]
        if tensor.type not in (Type.Q4_0, Type.Q4_1, Type.Q8_0) or len(tensor.shape) != 2:
            return None
        with self._path.open("rb") as file:
            raw = _read_rows(file, tensor, 0, tensor.shape[0])
        blocks = raw.view(tensor.shape[0], tensor.shape[1] // GROUP, -1)
        scales, codes, minimums = _halves(blocks[..., :2]), blocks[..., 2:], None
        if tensor.type == Type.Q8_0:
            codes = codes.view(torch.int8)
        else:
            if tensor.type == Type.Q4_1:
                minimums, codes = _halves(codes[..., :2]), codes[..., 2:]
            else:
                minimums = -8 * scales
            codes = torch.cat((codes & 15, codes >> 4), dim=2)
        weight = GroupedWeight(codes.flatten(1), scales, minimums, tensor.shape[1])
        heads = self._permuted_heads(name)
        return weight.rows(_huggingface_order(tensor.shape[0], heads)) if heads else weight

    def embedding(self, name: str, dtype: torch.dtype) -> Embedding:
        from gguf.constants import GGMLQuantizationType as Type

        tensor = self._tensors[name]
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tensor.shape != expected:
            raise ModelError(f"{name}: shape {list(tensor.shape)} in the file, {list(expected)} by its metadata")
        with self._path.open("rb") as file:
            raw = _read_rows(file, tensor, 0, tensor.shape[0])
        if tensor.type == Type.Q8_0:
            return Embedding(raw, dtype, widen_q8_0)
        return Embedding(raw, dtype, lambda rows: _widen(rows, tensor))

    def _permuted_heads(self, name: str) -> int:
        """The number of heads whose channels llama.cpp has reordered in this tensor; 0 where it has not."""
        if self.config.architecture not in ("llama", "mistral"):
            return 0
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0

    def _copy(self, tensor: _Tensor, out: torch.Tensor) -> None:
        rows, columns = out.view(-1, out.shape[-1]).shape
        step = max(1, _VALUES_AT_A_TIME // columns)
        flat = out.view(rows, columns)
        with self._path.open("rb") as file:
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                flat[start:stop] = _widen(_read_rows(file, tensor, start, stop), tensor)


def _huggingface_order(rows: int, heads: int) -> torch.Tensor:
    """Where each row of a tensor is stored: llama.cpp turns neighbouring channels (2i, 2i + 1) of a head where Hugging
    Face turns i and i + head_dim / 2."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 2] as float16 [...]."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def _widen(rows: torch.Tensor, tensor: _Tensor) -> torch.Tensor:
    """Rows of `tensor` as stored, uint8 [T, bytes a row], as float32 [T, values a row]."""
    from gguf.quants import dequantize

    try:
        return torch.from_numpy(dequantize(rows.numpy(), _type(tensor)))
    except NotImplementedError as error:
        raise ModelError(f"{tensor.name}: tensors of type {_type(tensor).name} cannot be dequantized") from error


def _read_rows(file: BinaryIO, tensor: _Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop` of a tensor as they lie in the file: uint8 [rows, bytes a row]."""
    row_bytes = _row_bytes(tensor)
    raw = torch.empty(stop - start, row_bytes, dtype=torch.uint8)
    file.seek(tensor.offset + start * row_bytes)
    if file.readinto(raw.numpy()) != raw.numel():
        raise _incomplete(tensor)
    return raw


def _row_bytes(tensor: _Tensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block_values, block_bytes = GGML_QUANT_SIZES[_type(tensor)]
    return (tensor.shape or (1,))[-1] // block_values * block_bytes


def _incomplete(tensor: _Tensor) -> ModelError:
    return ModelError(f"{tensor.name}: the file ends before it does; the file is incomplete")


def _type(tensor: _Tensor) -> GGMLQuantizationType:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(tensor.type)
    except ValueError as error:
        raise ModelError(f"{tensor.name}: its type {tensor.type} is not one that the gguf package knows") from error


def _huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and part in _IN_A_LAYER:
        return f"model.layers.{layer}.{_IN_A_LAYER[part]}.{suffix}"
    return name


def _own_dtype(tensors: dict[str, _Tensor]) -> torch.dtype:
    """The dtype of the file's matrices where they all share one of torch's; bfloat16 for quantized ones."""
    from gguf.constants import GGMLQuantizationType as Type

    plain = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
    types = {tensor.type for tensor in tensors.values() if len(tensor.shape) > 1}
    return plain.get(types.pop(), torch.bfloat16) if len(types) == 1 else torch.bfloat16


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """Metadata (without arrays of strings: the vocabulary is the tokenizer's business) and tensors by name."""
    if file.read(4) != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file")
    version, tensor_count, value_count = _unpack(file, "<IQQ")
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} is not one of {', '.join(map(str, _VERSIONS))}")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = _read_string(file)
        metadata[key] = _read_value(file, _unpack(file, "<I")[0])
    described: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name = _read_string(file)
        (axes,) = _unpack(file, "<I")
        shape = _unpack(file, f"<{axes}Q")
        described[name] = (shape[::-1], *_unpack(file, "<IQ"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    data = math.ceil(file.tell() / alignment) * alignment
    tensors = {n: _Tensor(n, shape, kind, data + offset) for n, (shape, kind, offset) in described.items()}
    return metadata, tensors


def _unpack(file: BinaryIO, format: str) -> tuple[Any, ...]:
    return struct.unpack(format, file.read(struct.calcsize(format)))


def _read_string(file: BinaryIO) -> str:
    return file.read(_unpack(file, "<Q")[0]).decode("utf-8")


def _read_value(file: BinaryIO, kind: int) -> Any:
    """One metadata value; None for an array of strings or of arrays, which is walked over."""
    if kind == _STRING:
        return _read_string(file)
    if kind in _SCALARS:
        return _unpack(file, f"<{_SCALARS[kind]}")[0]
    if kind != _ARRAY:
        raise ModelError(f"{file.name}: a metadata value of type {kind}, which GGUF does not have")
    kind, length = _unpack(file, "<IQ")
    if kind in _SCALARS:
        return list(_unpack(file, f"<{length}{_SCALARS[kind]}"))
    for _ in range(length):
        _read_value(file, kind)
    return None

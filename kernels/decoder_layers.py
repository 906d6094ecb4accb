"""All layers of a Llama-family decoder in one native call (`native_decoder.cpp`), for float32 activations on a CPU.

It computes what `ifb_handler.models.decoder` does operation by operation, with the same kernels and so to the same
bits, without the cost of calling some nine of them a layer from Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from ifb_kernels import native
from ifb_kernels.layout import LayerKV, RaggedLayout


class NativeLinear(ctypes.Structure):
    """How native code multiplies by one linear's weights.

    multiply    void (*)(weights, y, x, x_stride, rows, threads): y [rows, out] = x W^T + b in float32, as `ifb_linear`
    weights     what `multiply` takes first; whoever made this keeps it alive
    """

    _fields_ = (("multiply", c_void_p), ("weights", c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("qkv", NativeLinear),
        ("attention_out", NativeLinear),
        ("gate_up", NativeLinear),
        ("down", NativeLinear),
        ("window", c_int64),
    )


class _Pages(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("key_scales", c_void_p), ("value_scales", c_void_p))


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("norm", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_double),
        ("scale", c_double),
    )


class _Queries(ctypes.Structure):
    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_rows", c_int64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("hidden", c_void_p),
        ("output", c_void_p),
        ("workspace", c_void_p),
        ("pages", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("wanted", c_void_p),
        ("queries", _Queries),
        ("wanted_queries", _Queries),
        ("num_tokens", c_int64),
        ("num_wanted", c_int64),
        ("half", c_int64),
        ("block_size", c_int64),
        ("page_type", c_int64),
        ("threads", c_int64),
        ("gemm_seconds", c_double),
        ("attention_seconds", c_double),
    )


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms are float32 and contiguous; those of queries and keys, and the window, may be None."""

    attention_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    feed_forward_norm: torch.Tensor
    qkv: NativeLinear
    attention_out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    window: int | None


class DecoderLayers:
    """A stack of layers and the norm after them. Holds the tensors that it was given."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        norm: torch.Tensor,
        eps: float,
        *,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """`norm` float32 [hidden_size]. Raises RuntimeError without the native library."""
        library = native.library()
        if library is None:
            raise RuntimeError("the native library did not build here")
        self._run = library.ifb_decoder_layers
        self._kept = (layers, norm)
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._model = _Model(
            layers=ctypes.addressof(self._layers),
            norm=norm.data_ptr(),
            num_layers=len(layers),
            hidden_size=len(norm),
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=eps,
            scale=head_dim**-0.5,
        )
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        self._workspace_floats = 2 * len(norm) + 3 * queries + 3 * keys + 3 * intermediate_size
        self._workspace = torch.empty(0)
        self._pages: list[LayerKV] | None = None

    def __call__(
        self,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        layout: RaggedLayout,
        pages: list[LayerKV],
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """-> the hidden states after the last norm, float32 [S, hidden_size]; seconds in `gemm` and in `attention`.

        embedded          float32 [T, hidden_size], contiguous; overwritten
        cos, sin          float32 [P, rot / 2], contiguous; positions int64 [T] below P (see `rotary_embedding.py`)
        layout, pages     as the `cpu` attention backend takes them; every token's keys and values are written
        wanted            int64 [S], rising: the tokens whose hidden states are asked for; None: all
        """
        tokens = embedded.shape[0]
        if pages is not self._pages:
            self._pages = pages
            self._page_addresses = (_Pages * len(pages))(*map(_pages, pages))
        size = tokens * self._workspace_floats
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size)
        wanted_layout = layout if wanted is None else layout.only(wanted)
        num_wanted = tokens if wanted is None else len(wanted)
        output = embedded.new_empty(num_wanted, embedded.shape[1])
        step = _Step(
            hidden=embedded.data_ptr(),
            output=output.data_ptr(),
            workspace=self._workspace.data_ptr(),
            pages=ctypes.addressof(self._page_addresses),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            positions=positions.data_ptr(),
            slots=layout.slot_mapping.data_ptr(),
            wanted=_address(wanted),
            queries=_queries(layout),
            wanted_queries=_queries(wanted_layout),
            num_tokens=tokens,
            num_wanted=num_wanted,
            half=cos.shape[1],
            block_size=pages[0].keys.shape[3],
            page_type=native.PAGE_TYPES[pages[0].keys.dtype],
            threads=torch.get_num_threads(),
        )
        self._run(ctypes.byref(self._model), ctypes.byref(step))
        return output, {"gemm": step.gemm_seconds, "attention": step.attention_seconds}


def _layer(layer: LayerWeights) -> _Layer:
    return _Layer(
        attention_norm=layer.attention_norm.data_ptr(),
        query_norm=_address(layer.query_norm),
        key_norm=_address(layer.key_norm),
        feed_forward_norm=layer.feed_forward_norm.data_ptr(),
        qkv=layer.qkv,
        attention_out=layer.attention_out,
        gate_up=layer.gate_up,
        down=layer.down,
        window=layer.window or 0,
    )


def _pages(layer: LayerKV) -> _Pages:
    tensors: tuple[Any, ...] = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return _Pages(*map(_address, tensors))


def _queries(layout: RaggedLayout) -> _Queries:
    return _Queries(
        query_starts=layout.query_starts.data_ptr(),
        context_lens=layout.context_lens.data_ptr(),
        block_tables=layout.block_tables.data_ptr(),
        table_stride=layout.block_tables.stride(0),
        num_rows=len(layout.context_lens),
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

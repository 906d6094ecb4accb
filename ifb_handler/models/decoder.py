"""The decoder of the Llama family, on one flat axis of tokens.

Llama 2 and 3, Mistral, Qwen2 and Qwen3 differ only in what `DecoderConfig` says. The decoder knows nothing of requests:
T tokens of any number of sequences lie one after another, and attention alone is told, by `RaggedLayout`, which are
whose (selective batching, Orca, Yu et al. 2022).

    x = embedding[token_ids]
    for each layer:   x = x + attention(norm(x));   x = x + feed_forward(norm(x))
    hidden = norm(x);   logits = hidden @ output^T

The additions are fused into the norm that follows them, so a layer passes on (what to add, the sum so far).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ifb_handler.models.decoder_config import DecoderConfig
from ifb_handler.models.embedding import Embedding
from ifb_handler.models.linear import Linear
from ifb_handler.models.rope import RotaryTable
from ifb_handler.models.stopwatch import Stopwatch
from ifb_kernels.backend import AttentionBackend
from ifb_kernels.cpu_backend import CpuBackend
from ifb_kernels.decoder_layers import DecoderLayers, LayerWeights
from ifb_kernels.layout import LayerKV, RaggedLayout
from ifb_kernels.rms_norm import rms_norm
from ifb_kernels.rotary_embedding import rotary_embedding
from ifb_kernels.silu_and_mul import silu_and_mul


@dataclass
class DecoderLayer:
    """The weights of one layer. `qkv` yields all query heads, then key heads, then value heads; `gate_up` both halves.

    query_norm, key_norm    [head_dim], None unless the architecture has them
    """

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    sliding_window: int | None


class Decoder:
    """Runs ragged batches. `stopwatch` sums the seconds of `gemm` (all matrix products) and `attention`.

    native_layers    runs all layers in one call where native code can; None: one operation at a time, as written here
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        output: Linear,
        backend: AttentionBackend,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = output
        self.backend = backend
        self.rotary = RotaryTable(config.rope, config.head_dim, config.max_model_len, norm.device)
        self.stopwatch = Stopwatch()
        self.native_layers = _native_layers(config, layers, norm, backend)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: RaggedLayout,
        pages: list[LayerKV],
        rope_lengths: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`token_ids` and `positions`, int64 [T] -> the hidden states after the last norm, [S, hidden_size].

        Every token's keys and values are written to `pages`, one LayerKV a layer, before its layer attends.
        `rope_lengths`, int64 [T]: see `RotaryTable.of_tokens`; None where no token's is above the trained length.
        `wanted`, int64 [S], rising: the tokens whose hidden states are asked for; None: all. Of the others the last
        layer computes keys and values only.
        """
        config, eps = self.config, self.config.rms_norm_eps
        tokens = token_ids.shape[0]
        if rope_lengths is None:
            cos, sin = self.rotary.upto(layout.max_context_len)
        else:
            cos, sin = self.rotary.of_tokens(positions, rope_lengths)
            positions = torch.arange(tokens, device=positions.device)

        if wanted is not None and len(wanted) == tokens:
            wanted = None
        x, residual = self.embedding(token_ids), None
        if self.native_layers is not None:
            hidden, seconds = self.native_layers(x, cos, sin, positions, layout, pages, wanted)
            for section, taken in seconds.items():
                self.stopwatch.add(section, taken)
            return hidden
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            normed, residual = rms_norm(x, layer.attention_norm, eps, residual)
            qkv = self._multiply(layer.qkv, normed).view(tokens, -1, config.head_dim)
            q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            if layer.query_norm is not None and layer.key_norm is not None:
                q, k = rms_norm(q, layer.query_norm, eps)[0], rms_norm(k, layer.key_norm, eps)[0]
            rotary_embedding(q, k, cos, sin, positions)
            self._write(k, v, layer_pages, layout)
            if wanted is not None and layer is self.layers[-1]:
                if not len(wanted):
                    return residual[wanted]
                q, residual, layout = q[wanted], residual[wanted], layout.only(wanted)
            attended = self._attend(layer, q, layer_pages, layout)
            x = self._multiply(layer.attention_out, attended.flatten(1))

            normed, residual = rms_norm(x, layer.feed_forward_norm, eps, residual)
            x = self._multiply(layer.down, silu_and_mul(self._multiply(layer.gate_up, normed)))
        return rms_norm(x, self.norm, eps, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [S, hidden_size], rows of `forward`'s result -> float32 [S, vocab]."""
        return self._multiply(self.output, hidden).float()

    def _multiply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        y = linear(x)
        self.stopwatch.add("gemm", time.perf_counter() - started)
        return y

    def _write(self, k: torch.Tensor, v: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
        started = time.perf_counter()
        self.backend.write(k, v, pages, layout)
        self.stopwatch.add("attention", time.perf_counter() - started)

    def _attend(self, layer: DecoderLayer, q: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> torch.Tensor:
        started = time.perf_counter()
        attended = self.backend.attend(q, pages, layout, self.config.head_dim**-0.5, layer.sliding_window)
        self.stopwatch.add("attention", time.perf_counter() - started)
        return attended


def _native_layers(
    config: DecoderConfig, layers: list[DecoderLayer], norm: torch.Tensor, backend: AttentionBackend
) -> DecoderLayers | None:
    """All layers as one native call, where the native kernels can do all of it: on a CPU, in float32."""
    if not isinstance(backend, CpuBackend) or norm.dtype != torch.float32:
        return None
    weights = []
    for layer in layers:
        linears = [linear.native() for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)]
        if None in linears:
            return None
        norms = (layer.attention_norm, layer.query_norm, layer.key_norm, layer.feed_forward_norm)
        weights.append(LayerWeights(*norms, *linears, layer.sliding_window))
    return DecoderLayers(
        weights,
        norm,
        config.rms_norm_eps,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )

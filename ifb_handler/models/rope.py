"""Rotary position embedding (RoFormer, Su et al. 2021): tables of cosines and sines, and how contexts stretch them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ifb_handler.models.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")

# Rows that a table starts with; it doubles when a longer context comes.
_FIRST_ROWS = 2048


@dataclass(frozen=True)
class RopeParameters:
    """How fast each pair of channels turns.

    type                 default; linear (every frequency divided by `factor`); llama3 (Llama 3.1: long wavelengths
                         divided by `factor`, short ones kept, those between interpolated); yarn (Peng et al. 2023:
                         the same, with the border where a channel turns `beta_slow` to `beta_fast` times over the
                         trained context, and cosines and sines multiplied by `attention_factor`); dynamic (NTK-aware
                         scaling: theta grows with the length of the sequence beyond the trained one, see
                         `RotaryTable.of_tokens`)
    frequency_factors    divisors of each frequency, as a GGUF file states them in `rope_freqs.weight`; () for none
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ModelError(f"rope_type: {self.type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", *_YARN):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"rope {name}: {value!r} is not a number above 0")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope high_freq_factor: {self.high_freq_factor} is not above low_freq_factor ({self.low_freq_factor})"
            )


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of channels: float32 [head_dim / 2], computed as `transformers` does."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.frequency_factors:
        if len(rope.frequency_factors) != head_dim // 2:
            raise ModelError(
                f"rope_freqs.weight: {len(rope.frequency_factors)} factors for {head_dim // 2} frequencies"
            )
        frequencies = frequencies / torch.tensor(rope.frequency_factors)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    trained, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (trained / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelengths > trained / low, frequencies / rope.factor, between)
    return torch.where(wavelengths < trained / high, frequencies, stretched)


def _yarn(frequencies: torch.Tensor, rope: RopeParameters, head_dim: int) -> torch.Tensor:
    def channel(turns: float) -> float:
        """The pair of channels that turns so often over the trained context."""
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN multiplies cosines and sines by, if the checkpoint does not say: it sharpens attention."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


def dynamic_frequencies(rope: RopeParameters, head_dim: int, lengths: torch.Tensor) -> torch.Tensor:
    """Radians a position where sequences of `lengths` [N] are scaled dynamically: float32 [N, head_dim / 2]."""
    trained = rope.original_max_position_embeddings
    growth = rope.factor * lengths.clamp(min=trained).float() / trained - (rope.factor - 1)
    theta = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=lengths.device) / head_dim
    return 1.0 / theta[:, None] ** exponents


class RotaryTable:
    """cos and sin of position * frequency, float32 [rows, head_dim / 2] each, grown as contexts grow."""

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int, device: torch.device) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._max_positions = max_positions
        self._scale = rope.attention_factor
        self._tabulate(min(_FIRST_ROWS, max_positions))

    def upto(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of at least `positions` rows: every position below `positions` may be looked up."""
        rows = self._cos.shape[0]
        if positions > rows:
            self._tabulate(max(positions, min(2 * rows, self._max_positions)))
        return self._cos, self._sin

    def of_tokens(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token at `positions` [T] of sequences of `lengths` [T], with dynamic scaling.

        Hugging Face's `generate` turns all of a prompt by the prompt's length and each later token by the length at its
        time, and keeps the keys: so a token's length is that of the prompt, or its position + 1 if that is more.
        """
        angles = positions[:, None].float() * dynamic_frequencies(self._rope, self._head_dim, lengths)
        return angles.cos() * self._scale, angles.sin() * self._scale

    def _tabulate(self, rows: int) -> None:
        positions = torch.arange(rows, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        self._cos, self._sin = angles.cos() * self._scale, angles.sin() * self._scale

"""What a file of weights looks like to the loader, whatever its format: named tensors, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ifb_handler.models.decoder_config import DecoderConfig
from ifb_handler.models.embedding import Embedding
from ifb_kernels.grouped_linear import GroupedWeight


class Checkpoint(ABC):
    """Tensors go by the names that Hugging Face's Llama, Mistral, Qwen2 and Qwen3 give them.

    config          as the checkpoint states it
    tensor_names    all it holds, save those that hold no weights
    """

    config: DecoderConfig
    tensor_names: set[str]

    @abstractmethod
    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (any dtype, any device) with the tensor. No more than one tensor's memory is used meanwhile.

        Raises ModelError, naming the tensor, when the shape is not out's.
        """

    @abstractmethod
    def embedding(self, name: str, dtype: torch.dtype) -> Embedding:
        """The table `name` [vocab_size, hidden_size] on the CPU as it is stored, with a lookup that yields `dtype`."""

    def grouped(self, name: str) -> GroupedWeight | None:
        """The matrix `name` in the codes that it is stored in, where they are those of a GroupedWeight; else None."""
        return None

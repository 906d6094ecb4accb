"""Reads a Hugging Face folder: config.json, and model.safetensors or the shards that an index.json lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ifb_handler.models.checkpoint import Checkpoint
from ifb_handler.models.decoder_config import config_from_huggingface
from ifb_handler.models.embedding import Embedding
from ifb_handler.models.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Tables of angles that early Llama checkpoints carry beside their weights; ours are computed.
_NOT_WEIGHTS = ".rotary_emb.inv_freq"


class SafetensorsFolder(Checkpoint):
    """A file is mapped only while one of its tensors is copied, so that its pages do not add up in memory."""

    def __init__(self, folder: Path) -> None:
        self.config = config_from_huggingface(read_json(folder / "config.json"))
        self._files = {n: f for n, f in _locate_tensors(folder).items() if not n.endswith(_NOT_WEIGHTS)}
        self.tensor_names = set(self._files)

    def read(self, name: str, out: torch.Tensor) -> None:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            shape = tuple(file.get_slice(name).get_shape())
            if shape != tuple(out.shape):
                raise ModelError(f"{name}: shape {list(shape)} in the checkpoint, {list(out.shape)} by its config")
            out.copy_(file.get_tensor(name))

    def embedding(self, name: str, dtype: torch.dtype) -> Embedding:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            stored = file.get_tensor(name).dtype
        narrow = stored if stored.itemsize < dtype.itemsize else dtype
        table = torch.empty(self.config.vocab_size, self.config.hidden_size, dtype=narrow)
        self.read(name, table)
        return Embedding(table, dtype)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ModelError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    from safetensors import safe_open

    if (folder / INDEX_FILE).exists():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{folder / INDEX_FILE}: has no weight_map")
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = [folder / SINGLE_FILE]
    located: dict[str, Path] = {}
    for path in files:
        if not path.exists():
            raise ModelError(f"{path}: missing; the checkpoint is incomplete")
        try:
            with safe_open(path, framework="pt") as file:
                located.update(dict.fromkeys(file.keys(), path))
        except Exception as error:
            raise ModelError(f"{path}: cannot be read as safetensors: {error}") from error
    return located

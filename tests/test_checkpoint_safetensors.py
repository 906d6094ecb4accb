"""Hugging Face folders: what is in them, what may be wrong with them, and which tokens end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_oracle import load, make_checkpoint

from ifb_handler.models.errors import ModelError
from ifb_handler.models.loading import load_model
from ifb_handler.models.source import resolve
from ifb_kernels.backend import select_backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama", {})
    return tmp_path


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.2.mlp.down_proj.weight": None})
    with pytest.raises(
        ModelError, match=r"model.layers.2.mlp.down_proj.weight: missing from the checkpoint .1 tensors"
    ):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.q_proj.bias: in the checkpoint"):
        load(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.1.self_attn.k_proj.weight": torch.zeros(8, 48)})
    with pytest.raises(ModelError, match=r"layers.1.self_attn.k_proj.weight: shape \[8, 48\] .*, \[16, 48\] by"):
        load(folder)


def test_frequencies_that_early_llama_checkpoints_carry_are_passed_over(folder: Path) -> None:
    edit_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {}, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}: missing; the checkpoint is incomplete"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", "garbage", "model.safetensors: cannot be read as safetensors"),
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", "[]", "config.json: holds no JSON object"),
        ("model.safetensors.index.json", "{}", "index.json: has no weight_map"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json eos_token_id: 'x' is neither"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str, message: str, folder: Path) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(7, [5, 6], (5, 6)), (7, 5, (5,)), ([3, 4, 3], None, (3, 4)), (None, None, ()), (7, None, (7,))],
)
def test_the_generation_config_says_which_tokens_end_an_answer(
    in_config: Any, in_generation_config: Any, expected: tuple[int, ...], folder: Path
) -> None:
    edit_json(folder / "config.json", {"eos_token_id": in_config})
    edit_json(folder / "generation_config.json", {"eos_token_id": in_generation_config})
    assert load(folder).eos_token_ids == expected
    if in_generation_config is None:
        (folder / "generation_config.json").unlink()
        assert load(folder).eos_token_ids == expected


def test_loading_tells_how_far_it_is(folder: Path) -> None:
    told: list[tuple[int, int, str]] = []
    cpu = torch.device("cpu")
    load_model(
        resolve(str(folder)),
        dtype="auto",
        device=cpu,
        backend=select_backend(cpu),
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    done = [step[0] for step in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert told[-1] == (30, 30, "loading weights")  # 3 layers of 9 tensors, embedding, last norm, output


def test_auto_dtype_is_float32_on_a_cpu_whatever_the_checkpoint_holds(folder: Path) -> None:
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    edit_tensors(folder, narrow)
    edit_json(folder / "config.json", {"dtype": "bfloat16"})
    model = load(folder, "auto")
    assert model.config.dtype == torch.float32
    assert model.decoder.embedding.table.dtype == torch.bfloat16
    assert model.decoder.embedding(torch.tensor([1, 2])).equal(narrow["model.embed_tokens.weight"][1:3].float())


def test_an_unknown_dtype_is_an_error(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype: 'int8' is not one of auto, float32, bfloat16, float16"):
        load(folder, "int8")

"""Weights in groups of 8- and 4-bit codes: against double precision, and the blocks of GGUF files as they are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from ragged import RaggedRunner
from row_bits import assert_rows_keep_their_bits
from test_checkpoint_gguf import VOCAB, random_tensors, write_gguf
from test_models_oracle import CPU, sequences

from ifb_handler.models.gguf_file import GGUFFile
from ifb_handler.models.loading import LoadedModel, load_model
from ifb_handler.models.source import resolve
from ifb_kernels import native
from ifb_kernels.backend import select_backend
from ifb_kernels.grouped_linear import GROUP, GroupedLinear, quantize_in_groups
from ifb_kernels.packed_linear import PackedLinear

SHAPES = [(1, 1), (3, 100), (48, 70), (577, 5), (576, 960), (1536, 576)]


def random_layer(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("native_kernel", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_product_is_that_of_the_weights_that_the_codes_stand_for(
    inputs: int, outputs: int, bits: int, native_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    weight, bias = random_layer(inputs, outputs)
    grouped, x = quantize_in_groups(weight, bits), torch.randn(64, inputs)
    linear = GroupedLinear(grouped, bias)
    expected = torch.nn.functional.linear(x.double(), grouped.dequantize().double(), bias.double())
    for rows in (0, 1, 2, 3, 4, 5, 8, 9, 64):
        y = linear(x[:rows])
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), expected[:rows], rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize(("bits", "name"), [(8, "Q8_0"), (4, "Q4_1")])
def test_codes_are_as_near_as_those_of_a_gguf_file(bits: int, name: str) -> None:
    weight, _ = random_layer(320, 50)
    kind = gguf.GGMLQuantizationType[name]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    ours = quantize_in_groups(weight, bits).dequantize()
    assert (ours - weight).norm() < 1.01 * (theirs - weight).norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_constant_groups_are_exact_and_a_last_group_may_be_cut_short(bits: int) -> None:
    weight = torch.zeros(3, GROUP + 5)
    weight[1], weight[2, GROUP:] = 0.5, 2.0
    assert torch.allclose(quantize_in_groups(weight, bits).dequantize(), weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_the_same_bits_whoever_its_neighbours_are_and_however_many_threads_there_are(bits: int) -> None:
    if native.library() is None:
        pytest.skip("the native library did not build here")
    weight, bias = random_layer(1200, 200)
    x = torch.randn(64, 1200)
    assert_rows_keep_their_bits(GroupedLinear(quantize_in_groups(weight, bits), bias), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_may_be_strided_and_in_half_precision(dtype: torch.dtype) -> None:
    weight, bias = random_layer(64, 50)
    linear, x = GroupedLinear(quantize_in_groups(weight, 4), bias), torch.randn(9, 80)
    assert torch.equal(linear(x[:, 3:67]), linear(x[:, 3:67].contiguous()))
    assert torch.equal(linear(x[:, :64].t().contiguous().t()), linear(x[:, :64]))
    half = x[:, :64].to(dtype)
    assert torch.equal(linear(half), linear(half.float()).to(dtype))


def test_a_weight_takes_its_bits_and_those_of_its_scales() -> None:
    weight = torch.randn(960, 576)
    assert GroupedLinear(quantize_in_groups(weight, 8)).num_bytes == 960 * 576 * 8.5 / 8
    assert GroupedLinear(quantize_in_groups(weight, 4)).num_bytes == 960 * 576 * 5 / 8


def load(path: Path, quantization: str | None) -> LoadedModel:
    return load_model(
        resolve(str(path)), dtype="float32", device=CPU, backend=select_backend(CPU), quantization=quantization
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 100), (1536, 48), (71, 50)])
def test_products_with_codes_are_to_the_bit_those_with_the_floats_they_stand_for(
    bits: int, inputs: int, outputs: int
) -> None:
    if native.library() is None:
        pytest.skip("the native library did not build here")
    grouped, x = quantize_in_groups(torch.randn(outputs, inputs), bits), torch.randn(203, inputs)
    floats = PackedLinear(grouped.dequantize().contiguous())
    for rows in (1, 2, 3, 5, 8, 9, 16, 33, 70, 203):
        assert torch.equal(GroupedLinear(grouped)(x[:rows]), floats(x[:rows])), f"{rows} rows"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("stored", "quantization"),
    [("Q4_0", "int4_weight_only"), ("Q4_1", "int4_weight_only"), ("Q8_0", "int8_weight_only"), ("Q4_1", None)],
)
def test_a_gguf_files_codes_are_kept_as_they_are(
    tmp_path: Path, stored: str, quantization: str | None, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(tied=tied), quantization=stored)
    prompts = sequences([40, 9], VOCAB)
    kept = load(path, quantization)
    monkeypatch.setattr(GGUFFile, "grouped", lambda self, name: None)
    floats = load(path, None)
    if native.library() is not None:
        assert kept.weight_bytes < 0.6 * floats.weight_bytes
        assert torch.equal(run(kept, prompts), run(floats, prompts))
    else:
        assert (run(kept, prompts) - run(floats, prompts)).abs().max() < 1e-4


def run(model: LoadedModel, prompts: list[list[int]]) -> torch.Tensor:
    return torch.cat(RaggedRunner(model, prompts).run([13, 1]))


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"])
def test_codes_stand_for_the_values_that_gguf_gives_them(tmp_path: Path, stored: str, name: str) -> None:
    file = GGUFFile(write_gguf(tmp_path / "model.gguf", random_tensors(), quantization=stored))
    kept = file.grouped(name)
    assert kept is not None
    values = torch.empty(kept.out_features, kept.in_features)
    file.read(name, values)
    torch.testing.assert_close(kept.dequantize(), values, rtol=1e-6, atol=1e-7)


def test_codes_that_cannot_be_kept_are_made_anew(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = random_tensors()
    prompts = sequences([40], VOCAB)
    for stored, quantization in (("Q8_0", "int4_weight_only"), ("Q5_0", "int8_weight_only"), ("F16", "int8")):
        path = write_gguf(tmp_path / f"{stored}.gguf", tensors, quantization=stored)
        (exact,) = RaggedRunner(load(path, None), prompts).run([40])
        (ours,) = RaggedRunner(load(path, quantization), prompts).run([40])
        distance = (ours - exact).norm() / exact.norm()
        assert 1e-4 < distance < (0.5 if quantization == "int4_weight_only" else 0.05)

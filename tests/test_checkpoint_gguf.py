"""GGUF files, written here by the `gguf` package and read by transformers as the oracle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import RaggedRunner
from test_models_oracle import load, make_checkpoint, oracle_logits, sequences

from ifb_handler.models.errors import ModelError
from ifb_handler.models.gguf_file import GGUFFile
from ifb_handler.models.source import resolve

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 131


def head_dim_of(architecture: str) -> int:
    """transformers reads no head size from a Qwen3 file: it takes each to have 128."""
    return 128 if architecture == "qwen3" else HEAD_DIM


def tensor_shapes(architecture: str, tied: bool) -> dict[str, tuple[int, ...]]:
    head_dim = head_dim_of(architecture)
    query, key_value = HEADS * head_dim, KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (query, HIDDEN),
            f"blk.{layer}.attn_k.weight": (key_value, HIDDEN),
            f"blk.{layer}.attn_v.weight": (key_value, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, query),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
        if architecture == "qwen2":
            shapes |= {f"blk.{layer}.attn_q.bias": (query,)}
            shapes |= {f"blk.{layer}.attn_{part}.bias": (key_value,) for part in "kv"}
        if architecture == "qwen3":
            shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (head_dim,) for part in "qk"}
    return shapes


def random_tensors(architecture: str = "llama", tied: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(1.0 if "norm" in name else 0.0, 0.15, shape).astype(np.float32)
        for name, shape in tensor_shapes(architecture, tied).items()
    }


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    quantization: str = "F32",
    **metadata: Any,
) -> Path:
    """Matrices are stored as `quantization`, vectors as float32. `metadata` adds or replaces values, None removes."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    values = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INTERMEDIATE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.key_length": head_dim_of(architecture),
        f"{architecture}.rope.dimension_count": head_dim_of(architecture),
        f"{architecture}.vocab_size": VOCAB,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 20_000.0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": ["<s>", "ö", ""],
    } | metadata
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and quantization != "F32":
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_agrees_with_transformers(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32").eval()
    prompts = sequences([40, 9], VOCAB)
    for prompt, logits in zip(prompts, RaggedRunner(load(path), prompts).run([13, 1]), strict=True):
        assert (logits - oracle_logits(reference, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_storage_type_is_read_as_transformers_reads_it(quantization: str, tmp_path: Path) -> None:
    assert_agrees_with_transformers(write_gguf(tmp_path / "m.gguf", random_tensors(), quantization=quantization))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_is_read_as_transformers_reads_it(architecture: str, tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_tensors(architecture, tied), architecture, quantization="Q8_0")
    assert_agrees_with_transformers(path)


def test_an_untied_llama_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    assert_agrees_with_transformers(write_gguf(tmp_path / "m.gguf", random_tensors(tied=False), quantization="Q4_0"))


def llama_cpp_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


def test_a_converted_llama_3_with_stretched_rotation_answers_as_its_original(tmp_path: Path) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    options = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 20_000.0, **rope},
    }
    reference = make_checkpoint(tmp_path / "original", "llama", options)
    tensors = {}
    for name, weight in reference.state_dict().items():
        array = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            # As llama.cpp's converter: channels i and i + head_dim / 2 become neighbours.
            array = array.reshape(-1, 2, HEAD_DIM // 2, HIDDEN).swapaxes(1, 2).reshape(array.shape).copy()
        tensors[llama_cpp_name(name)] = array
    # And the divisors that it writes for Llama 3.1 (generate_extra_tensors).
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 20_000.0 ** (i / HEAD_DIM)
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        short, long = wavelength < 64 / 4.0, wavelength > 64 / 1.0
        factors.append(1.0 if short else 8.0 if long else 1.0 / ((1 - smooth) / 8.0 + smooth))
    tensors["rope_freqs.weight"] = np.array(factors, dtype=np.float32)
    prompts = sequences([120], VOCAB)
    (logits,) = RaggedRunner(load(write_gguf(tmp_path / "m.gguf", tensors)), prompts).run([50])
    assert (logits - oracle_logits(reference, prompts[0])).abs().max() < 1e-4


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    more = {
        "general.name": "naïve",
        "a.flag": True,
        "a.list": [1, 2, 3],
        "a.words": ["x", "yz"],
        "general.alignment": 64,
    }
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), quantization="Q8_0", **more)
    ours, theirs = GGUFFile(path), GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF.") and key not in ("a.words", "tokenizer.ggml.tokens"):
            assert ours.metadata[key] == field.contents(), key
    assert ours.config.eos_token_ids == (2,)
    for tensor in theirs.tensors:
        if tensor.name.startswith("blk.0.ffn_") and "norm" not in tensor.name:
            name = tensor.name.replace("blk.0.ffn", "model.layers.0.mlp").replace(".weight", "_proj.weight")
            stored = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            out = torch.empty(stored.shape)
            ours.read(name.replace("mlp_", "mlp."), out)
            assert torch.equal(out, stored)


def test_k_quants_are_read_as_the_gguf_package_reads_them(tmp_path: Path) -> None:
    """Their blocks of 256 values are made by hand: the package has no quantizer for them."""
    import gguf

    rng = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    for key in ("embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 256)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kinds = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}
    # Bytes under 0x3c, so that wherever a block keeps its float16 scales, they are finite.
    raw = {kind: rng.integers(0, 0x3C, (6, size), dtype=np.uint8) for kind, size in kinds.items()}
    for kind, data in raw.items():
        writer.add_tensor(kind, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("token_embd.weight", np.zeros((8, 256), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    for kind, data in raw.items():
        out = torch.empty(6, 256)
        file.read(kind, out)
        assert np.array_equal(out.numpy(), gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture: 'gemma3' is not supported; supported are llama"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn' is not one of none, linear"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: 8 is not the head size 16"),
        ({"llama.expert_count": 4}, "llama.expert_count: 4; mixtures of experts are not supported"),
        ({"llama.block_count": None}, "llama.block_count: missing"),
        ({"split.count": 3}, "one of 3 pieces"),
    ],
)
def test_a_file_that_cannot_be_served_is_an_error_that_names_why(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "m.gguf", random_tensors(), **metadata))


def test_tensors_that_do_not_fit_are_errors_that_name_them(tmp_path: Path) -> None:
    tensors = random_tensors()
    lacking = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight: missing"):
        load(write_gguf(tmp_path / "lacking.gguf", lacking))
    with pytest.raises(ModelError, match=r"blk.0.attn_sinks.weight: in the checkpoint .1 such tensors., but not"):
        load(write_gguf(tmp_path / "more.gguf", tensors | {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}))
    misshapen = tensors | {"blk.0.attn_k.weight": np.zeros((8, HIDDEN), dtype=np.float32)}
    with pytest.raises(ModelError, match=r"k_proj.weight: shape \[8, 64\] in the file, \[32, 64\] by its metadata"):
        load(write_gguf(tmp_path / "misshapen.gguf", misshapen))


def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", random_tensors()).read_bytes()
    for length, message in ((2, "not a GGUF file"), (100, "cannot be read as GGUF"), (len(whole) - 9, "incomplete")):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match=message):
            load(tmp_path / "cut.gguf")
    (tmp_path / "length.gguf").write_bytes(whole[:24] + b"\xff" * 8 + whole[32:])
    with pytest.raises(ModelError, match=r"length.gguf: cannot be read as GGUF"):
        load(tmp_path / "length.gguf")
    (tmp_path / "old.gguf").write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ModelError, match="GGUF version 1 is not one of 2, 3"):
        load(tmp_path / "old.gguf")


def test_a_storage_type_that_cannot_be_widened_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", random_tensors(), quantization="Q8_0").read_bytes()
    described = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    assert whole[described] == 8
    for kind, message in ((250, "type 250 is not one that the gguf package knows"), (15, "Q8_K cannot be dequantized")):
        (tmp_path / "other.gguf").write_bytes(whole[:described] + bytes([kind]) + whole[described + 1 :])
        with pytest.raises(ModelError, match=f"blk.0.ffn_up.weight: .*{message}"):
            load(tmp_path / "other.gguf")


def test_smollm2_logits_agree_with_transformers() -> None:
    """To 1e-4 at logits of up to 35, where float32's own rounding through 30 layers shows: hence the relative part."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve("smollm2-135m").path
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = ["The capital of France is", "def fibonacci(n):\n    ", Path(__file__).read_text()[:700]]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for prompt, logits in zip(prompts, RaggedRunner(load("smollm2-135m"), prompts).run([5, 1, 64]), strict=True):
        torch.testing.assert_close(logits, oracle_logits(reference, prompt), rtol=1e-5, atol=1e-4)

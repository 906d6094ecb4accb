"""The Triton kernels compute what they should (in Triton's interpreter) and compile for the GPUs we name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ifb_kernels.backend import select_backend

CASES = Path(__file__).with_name("triton_interpreter_cases.py")

# As the launcher's `tile_sizes` reads them: head size, query heads to a KV head, dtype, longest row of queries.
SHAPES = [
    (64, 3, torch.float32, 1),
    (64, 8, torch.bfloat16, 100),
    (80, 1, torch.float16, 100),
    (96, 4, torch.bfloat16, 1),
    (128, 4, torch.float16, 100),
    (256, 2, torch.bfloat16, 100),
    (256, 2, torch.float32, 100),
    (256, 1, torch.float32, 1),
]
# (backend, architecture, threads of a warp) and the shared memory a program may have there, in bytes.
TARGETS = [("cuda", 80, 32, 163 * 1024), ("cuda", 90, 32, 227 * 1024), ("hip", "gfx942", 64, 64 * 1024)]
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8"}
POINTERS[torch.uint8] = "*u8"
# Pages as narrow as the queries, or of codes.
PAGES = [*((shape, None) for shape in SHAPES), *((SHAPES[i], torch.int8) for i in (0, 4))]
PAGES += [(SHAPES[i], torch.uint8) for i in (1, 2, 5)]


def test_the_kernels_agree_with_the_definition_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=CASES.parent.parent,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def compile_ahead(kernel: object, types: dict[str, str], constants: dict[str, int], target: tuple) -> object:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # What the launcher finds out by itself: torch's memory is aligned, and a token's stride in it a multiple of 16.
    aligned = [
        index
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("query_stride", "key_stride", "value_stride")
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*target[:3]), options={"num_warps": 4, "num_stages": 2})


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
@pytest.mark.parametrize(("shape", "codes"), PAGES)
def test_paged_attention_compiles_without_a_gpu(target: tuple, shape: tuple, codes: torch.dtype | None) -> None:
    import triton

    from ifb_kernels import triton_paged_attention as module

    head_dim, group, dtype, max_query_len = shape
    scales = torch.bfloat16 if codes else dtype  # where there are none, the pages stand in for them
    block_m, block_n = module.tile_sizes(group, head_dim, dtype, max_query_len)
    types = {
        **dict.fromkeys(("output", "queries"), POINTERS[dtype]),
        **dict.fromkeys(("key_pages", "value_pages"), POINTERS[codes or dtype]),
        **dict.fromkeys(("key_scales", "value_scales"), POINTERS[scales]),
        **dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i32"),
        **dict.fromkeys(("num_rows", "query_stride", "table_stride", "window"), "i32"),
        "partials": "*fp32",
        "scale": "fp32",
    }
    constants = {
        "NUM_KV_HEADS": 2,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "PAGE_TOKENS": 16,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SPLIT": module.SPLIT_TOKENS,
        "NUM_SPLITS": 4,
        "WIDEN": False,
        "QUANTIZED": codes is not None,
    }
    compiled = compile_ahead(module.paged_attention_kernel, types, constants, target)
    assert compiled.asm["hsaco" if target[0] == "hip" else "cubin"]
    assert compiled.metadata.shared <= target[3]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
@pytest.mark.parametrize("head_dim", [80, 128])
def test_merging_splits_and_the_cache_write_compile_without_a_gpu(target: tuple, head_dim: int) -> None:
    import triton

    from ifb_kernels import triton_kv_cache_write, triton_paged_attention

    merge_types = {
        **dict.fromkeys(("query_starts", "context_lens"), "*i32"),
        "output": "*bf16",
        "partials": "*fp32",
        "window": "i32",
    }
    merge_constants = {
        "NUM_HEADS": 8,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "SPLIT": triton_paged_attention.SPLIT_TOKENS,
        "NUM_SPLITS": 4,
    }
    write_types = {
        **dict.fromkeys(("keys", "values", "key_pages", "value_pages"), "*bf16"),
        "slot_mapping": "*i64",
        "key_stride": "i32",
        "value_stride": "i32",
    }
    write_constants = {
        "NUM_KV_HEADS": 3,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": 16,
        "BLOCK": triton.next_power_of_2(3 * head_dim),
    }
    for kernel, types, constants in (
        (triton_paged_attention.merge_splits_kernel, merge_types, merge_constants),
        (triton_kv_cache_write.kv_cache_write_kernel, write_types, write_constants),
    ):
        assert compile_ahead(kernel, types, constants, target).asm["hsaco" if target[0] == "hip" else "cubin"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
@pytest.mark.parametrize(("codes", "dtype"), [(torch.int8, torch.float32), (torch.uint8, torch.bfloat16)])
def test_the_quantized_cache_write_compiles_without_a_gpu(
    target: tuple, codes: torch.dtype, dtype: torch.dtype
) -> None:
    from ifb_kernels.triton_kv_cache_write import quantized_kv_cache_write_kernel

    types = {
        **dict.fromkeys(("keys", "values"), POINTERS[dtype]),
        **dict.fromkeys(("key_pages", "value_pages"), POINTERS[codes]),
        **dict.fromkeys(("key_scales", "value_scales"), "*bf16"),
        "slot_mapping": "*i64",
        "key_stride": "i32",
        "value_stride": "i32",
    }
    constants = {"NUM_KV_HEADS": 3, "HEAD_DIM": 80, "PADDED_DIM": 128, "PAGE_TOKENS": 16}
    compiled = compile_ahead(quantized_kv_cache_write_kernel, types, constants, target)
    assert compiled.asm["hsaco" if target[0] == "hip" else "cubin"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on CPU")
def test_triton_is_refused_on_cpu_outside_the_interpreter() -> None:
    with pytest.raises(ValueError, match="'triton' cannot run on cpu"):
        select_backend(torch.device("cpu"), "triton")


def test_the_cpu_path_does_not_import_triton() -> None:
    script = (
        "import sys, torch\n"
        "from ifb_kernels.backend import select_backend\n"
        "before = 'triton' in sys.modules\n"
        "select_backend(torch.device('cpu'))\n"
        "assert ('triton' in sys.modules) == before\n"
        "assert not any(name.startswith('ifb_kernels.triton') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)

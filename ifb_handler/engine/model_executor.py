"""The executor that serves: a decoder with real weights on one device, and the pool's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.errors import ConfigError
from ifb_handler.engine.executor import Executor
from ifb_handler.models.loading import load_model
from ifb_handler.models.progress import Progress
from ifb_handler.models.source import ModelFiles
from ifb_kernels.backend import AttentionBackend, select_backend
from ifb_kernels.kv_quantization import page_bytes
from ifb_kernels.layout import RaggedLayout

_GIB = 1 << 30
_KV_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}  # auto: the model's own
_DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


class ModelExecutor(Executor):
    """Loads `files` as `config` says. Raises ConfigError, and what loading raises."""

    def __init__(self, config: EngineConfig, files: ModelFiles, progress: Progress | None = None) -> None:
        self.device = _device(config.device)
        if config.num_threads is not None:
            cores = os.cpu_count() or 1
            if config.num_threads > cores:
                raise ConfigError(f"num_threads: {config.num_threads} is more than this machine's {cores} cores")
            torch.set_num_threads(config.num_threads)
        self.backend = _backend(self.device, config.attention_backend)
        if config.quantization is not None and self.device.type != "cpu":
            raise ConfigError(
                f"quantization: {config.quantization!r} needs device: cpu, and the device is {self.device}"
            )
        self.model = load_model(
            files,
            dtype=config.dtype,
            device=self.device,
            backend=self.backend,
            quantization=config.quantization,
            progress=progress,
        )
        shape = self.model.config
        self.vocab_size = shape.vocab_size
        self.eos_token_ids = self.model.eos_token_ids
        self.sliding_window = shape.sliding_window
        self.weight_bytes = self.model.weight_bytes
        self.max_model_len = _max_model_len(config.max_model_len, shape.max_model_len)
        self.max_num_batched_tokens = _DEFAULT_BATCHED_TOKENS[self.device.type]
        kv_dtype = _KV_DTYPES.get(config.kv_cache_dtype, shape.dtype)
        page = page_bytes(shape.num_layers, config.block_size, shape.num_kv_heads, shape.head_dim, kv_dtype)
        useful = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        self.num_blocks = config.num_gpu_blocks_override or min(useful, self._memory_for_pages(config) // page)
        if self.num_blocks < 1:
            raise ConfigError(f"the KV pool has no room for one page of {page} bytes beside the weights")
        self._page_bytes = page
        self.pool_bytes = self.num_blocks * page
        with _fitting(_pool_option(config, self.device), self.pool_bytes, self.device):
            self.pages = self.backend.allocate(
                shape.num_layers,
                self.num_blocks,
                config.block_size,
                shape.num_kv_heads,
                shape.head_dim,
                kv_dtype,
                self.device,
            )

    def _memory_for_pages(self, config: EngineConfig) -> int:
        if self.device.type == "cpu":
            return int(config.cpu_kv_cache_gib * _GIB)
        free, total = torch.cuda.mem_get_info(self.device)
        # The weights are loaded: what is used by now, with a tenth of it for the step's activations, is not for pages.
        return int(total * config.gpu_memory_utilization) - int((total - free) * 1.1)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> torch.Tensor:
        counts = batch.query_starts[1:] - batch.query_starts[:-1]
        layout = RaggedLayout(
            query_starts=self._put(batch.query_starts),
            context_lens=self._put(batch.context_lens),
            block_tables=self._put(batch.block_tables),
            slot_mapping=self._put(batch.slot_mapping),
            max_query_len=int(counts.max()),
            max_context_len=int(batch.context_lens.max()),
        )
        decoder = self.model.decoder
        self._hidden = decoder.forward(self._put(batch.token_ids), self._put(batch.positions), layout, self.pages)
        return self.logits_at(batch.sample_tokens)

    @torch.inference_mode()
    def logits_at(self, places: np.ndarray) -> torch.Tensor:
        return self.model.decoder.logits(self._hidden[self._put(places)])

    @torch.inference_mode()
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        source, target = self._put(np.ascontiguousarray(np.array(pairs, np.int64).T))
        for layer in self.pages:
            for tensor in layer.tensors():
                values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # float8 is not always supported
                values.index_copy_(0, target, values.index_select(0, source))

    def allocate_swap_space(self, num_bytes: int) -> int:
        num_pages = num_bytes // self._page_bytes
        if num_pages:
            pinned = self.device.type != "cpu"
            with _fitting("swap_space", num_bytes, torch.device("cpu")):
                self._host = [
                    torch.empty((num_pages, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
                    for layer in self.pages
                    for tensor in layer.tensors()
                ]
        return num_pages

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        self._move(pairs, out=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self._move(pairs, out=False)

    @torch.inference_mode()
    def _move(self, pairs: list[tuple[int, int]], out: bool) -> None:
        source, target = torch.tensor(pairs).T
        pool = (tensor for layer in self.pages for tensor in layer.tensors())
        for ours, host in zip(pool, self._host, strict=True):
            if out:
                host[target] = ours[source.to(self.device)].to("cpu")
            else:
                ours[target.to(self.device)] = host[source].to(self.device)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def is_usable(self) -> bool:
        """After some faults, such as an illegal address, every use of a CUDA device fails until the process ends."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def take_seconds(self) -> dict[str, float]:
        return self.model.decoder.stopwatch.take()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: {name!r} asks for a GPU, and torch finds none here")
    return torch.device(name)


def _backend(device: torch.device, name: str) -> AttentionBackend:
    try:
        return select_backend(device, None if name == "auto" else name)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}") from error


def _pool_option(config: EngineConfig, device: torch.device) -> str:
    """The option that the pool's size comes from."""
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    return "cpu_kv_cache_gib" if device.type == "cpu" else "gpu_memory_utilization"


@contextmanager
def _fitting(option: str, num_bytes: int, device: torch.device) -> Iterator[None]:
    """Raises ConfigError naming `option` if the `num_bytes` to be allocated within are more than there is.

    A system that overcommits hands out more than it has, and kills the process when it is used.
    """
    wanted = f"{option}: asks for {num_bytes / _GIB:.1f} GiB on {device}"
    if device.type == "cpu" and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if num_bytes > memory:
            raise ConfigError(f"{wanted}, which has {memory / _GIB:.1f}")
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
        raise ConfigError(f"{wanted}, which cannot be allocated: {error}") from error


def _max_model_len(wanted: int | None, trained: int) -> int:
    if wanted is not None and wanted > trained:
        raise ConfigError(f"max_model_len: {wanted} is more than the {trained} that the model was made for")
    return wanted or trained

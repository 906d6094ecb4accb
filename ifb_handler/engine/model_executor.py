"""The executor that serves: a decoder with real weights on one device, perhaps a draft model, and the pool's memory."""

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
from ifb_handler.engine.paged_model import PagedModel
from ifb_handler.models.loading import load_model
from ifb_handler.models.progress import Progress
from ifb_handler.models.source import ModelFiles, resolve
from ifb_kernels.backend import AttentionBackend, select_backend

_GIB = 1 << 30
_DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


class ModelExecutor(Executor):
    """Loads `files` as `config` says. Raises ConfigError, and what loading raises."""

    def __init__(self, config: EngineConfig, files: ModelFiles, progress: Progress | None = None) -> None:
        self.device = _device(config.device)
        self.device_type = self.device.type
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
        self.target = self._load(config, files, progress)
        self.model = self.target.model
        self.vocab_size = self.model.config.vocab_size
        self.dtype = str(self.model.config.dtype).removeprefix("torch.")
        self.eos_token_ids = self.model.eos_token_ids
        self.max_model_len = _max_model_len(config.max_model_len, self.model.config.max_model_len)
        self.max_num_batched_tokens = _DEFAULT_BATCHED_TOKENS[self.device.type]
        self.draft: PagedModel | None = None
        if config.speculative_model is not None:
            self.draft = self._load(config, resolve(config.speculative_model, progress), progress)
            self._check_draft(self.draft.model.config.vocab_size, self.draft.model.config.max_model_len)
        self._models = [self.target] if self.draft is None else [self.target, self.draft]
        windows = [each.model.config.sliding_window for each in self._models]
        self.sliding_window = None if None in windows else max(windows)
        trained = [each.dynamic_from for each in self._models if each.dynamic_from is not None]
        self.max_shared_prompt_len = min(trained, default=None)
        self.weight_bytes = sum(each.model.weight_bytes for each in self._models)
        self._page_bytes = page = sum(each.page_bytes for each in self._models)
        useful = config.max_num_seqs * -(-self.max_model_len // config.block_size)
        self.num_blocks = config.num_gpu_blocks_override or min(useful, self._memory_for_pages(config) // page)
        if self.num_blocks < 1:
            raise ConfigError(f"the KV pool has no room for one page of {page} bytes beside the weights")
        self.pool_bytes = self.num_blocks * page
        with _fitting(_pool_option(config, self.device), self.pool_bytes, self.device):
            for each in self._models:
                each.allocate(self.num_blocks)

    def _load(self, config: EngineConfig, files: ModelFiles, progress: Progress | None) -> PagedModel:
        model = load_model(
            files,
            dtype=config.dtype,
            device=self.device,
            backend=self.backend,
            quantization=config.quantization,
            progress=progress,
        )
        return PagedModel(model, self.device, config.block_size, config.kv_cache_dtype)

    def _check_draft(self, vocab_size: int, max_model_len: int) -> None:
        if vocab_size != self.vocab_size:
            raise ConfigError(f"speculative_model: has {vocab_size} token ids, and the model {self.vocab_size}")
        if max_model_len < self.max_model_len:
            raise ConfigError(
                f"speculative_model: was made for {max_model_len} tokens, and max_model_len is {self.max_model_len}"
            )

    def _memory_for_pages(self, config: EngineConfig) -> int:
        if self.device.type == "cpu":
            return int(config.cpu_kv_cache_gib * _GIB)
        free, total = torch.cuda.mem_get_info(self.device)
        # The weights are loaded: what is used by now, with a tenth of it for the step's activations, is not for pages.
        return int(total * config.gpu_memory_utilization) - int((total - free) * 1.1)

    def execute(self, batch: Batch) -> torch.Tensor:
        self.target.forward(batch, batch.logit_tokens)
        return self.logits_at(batch.sample_tokens)

    def logits_at(self, places: np.ndarray) -> torch.Tensor:
        return self.target.logits_at(places)

    def execute_draft(self, batch: Batch) -> torch.Tensor | None:
        if self.draft is None:
            return super().execute_draft(batch)
        self.draft.forward(batch, batch.sample_tokens)
        return self.draft.logits_at(batch.sample_tokens) if len(batch.sample_tokens) else None

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        for each in self._models:
            each.copy_pages(pairs)

    def allocate_swap_space(self, num_bytes: int) -> int:
        num_pages = num_bytes // self._page_bytes
        if num_pages:
            with _fitting("swap_space", num_bytes, torch.device("cpu")):
                for each in self._models:
                    each.allocate_host_pages(num_pages)
        return num_pages

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        for each in self._models:
            each.swap(pairs, out=True)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        for each in self._models:
            each.swap(pairs, out=False)

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

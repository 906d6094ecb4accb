"""What is measured: a model loaded once, in as many engine cores as a benchmark needs, one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from ifb_handler.cli.bench_replay import replay
from ifb_handler.cli.errors import UsageError
from ifb_handler.cli.options import ModelChoice
from ifb_handler.cli.workloads import WORKLOADS, Job, Workload, longest
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Vocabulary


class Subject:
    """Weights and KV memory. `jobs`: the pool holds as many of the longest of them as a batch may have."""

    def __init__(self, choice: ModelChoice, jobs: Sequence[Job]) -> None:
        from ifb_handler.engine.model_executor import ModelExecutor
        from ifb_handler.models.source import resolve
        from ifb_handler.models.tokenizer import load_tokenizer

        self._options = {**choice.options, "model": choice.model}
        config = EngineConfig.from_mapping(self._options)
        if config.num_gpu_blocks_override is None:
            most = heapq.nlargest(config.max_num_seqs, longest(jobs))
            # The longest token of an answer is never written, but the page for it is taken all the same; one page more
            # a row, which `max_utilization` leaves free for those that run.
            self._options["num_gpu_blocks_override"] = sum(-(-n // config.block_size) + 1 for n in most)
        files = resolve(config.model)
        self._executor = ModelExecutor(EngineConfig.from_mapping(self._options), files)
        self.model_name = self._executor.model.name
        self.pool_tokens = self._executor.num_blocks * config.block_size
        self.vocabulary = Vocabulary(load_tokenizer(files, config.tokenizer))
        replay(self.core({}), [Job([1] * 16, 4)], self.vocabulary)  # what is made at first use is made now

    def core(self, options: Mapping[str, object]) -> EngineCore:
        """A fresh engine core with `options` over those that were asked for. Only one is used at a time."""
        return EngineCore(self._executor, EngineConfig.from_mapping({**self._options, **options}))


def workload_named(name: str) -> Workload:
    """UsageError if there is none."""
    if name not in WORKLOADS:
        raise UsageError(f"--workload: {name!r} is not one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]

"""The scheduler's policies, one a file, to be read side by side: each is one choice that serving systems differ in.

batching            continuous.py (Orca, vLLM, ...), static.py (Hugging Face generate, TorchServe's batchSize)
scheduling_policy   fcfs.py, priority.py, longest_prefix_match.py (SGLang), shortest_job_first.py
prefill_priority    decode_first.py (Sarathi-Serve, FastGen), prefill_first.py (early vLLM, TGI)
capacity            max_utilization.py, guaranteed_no_evict.py (both TensorRT-LLM's names)
kv_reservation      on_demand.py (PagedAttention), max_length.py (Orca)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ifb_handler.engine.policies.base import Batching, Capacity, KVReservation, Ordering, PrefillPriority
from ifb_handler.engine.policies.continuous import Continuous
from ifb_handler.engine.policies.decode_first import DecodeFirst
from ifb_handler.engine.policies.fcfs import FirstComeFirstServed
from ifb_handler.engine.policies.guaranteed_no_evict import GuaranteedNoEvict
from ifb_handler.engine.policies.longest_prefix_match import LongestPrefixMatch
from ifb_handler.engine.policies.max_length import MaxLength
from ifb_handler.engine.policies.max_utilization import MaxUtilization
from ifb_handler.engine.policies.on_demand import OnDemand
from ifb_handler.engine.policies.prefill_first import PrefillFirst
from ifb_handler.engine.policies.priority import Priority
from ifb_handler.engine.policies.shortest_job_first import ShortestJobFirst
from ifb_handler.engine.policies.static import Static

BATCHING: dict[str, type[Batching]] = {"continuous": Continuous, "static": Static}
SCHEDULING_POLICY: dict[str, type[Ordering]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "longest_prefix_match": LongestPrefixMatch,
    "shortest_job_first": ShortestJobFirst,
}
PREFILL_PRIORITY: dict[str, type[PrefillPriority]] = {"decode_first": DecodeFirst, "prefill_first": PrefillFirst}
CAPACITY: dict[str, type[Capacity]] = {"max_utilization": MaxUtilization, "guaranteed_no_evict": GuaranteedNoEvict}
KV_RESERVATION: dict[str, type[KVReservation]] = {"on_demand": OnDemand, "max_length": MaxLength}


@dataclass(frozen=True)
class Policies:
    """One of each; the defaults are those of the engine."""

    batching: Batching = field(default_factory=Continuous)
    ordering: Ordering = field(default_factory=FirstComeFirstServed)
    prefill_priority: PrefillPriority = field(default_factory=DecodeFirst)
    capacity: Capacity = field(default_factory=MaxUtilization)
    kv_reservation: KVReservation = field(default_factory=OnDemand)
    enable_chunked_prefill: bool = True

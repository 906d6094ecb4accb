"""Each scheduling policy by what it does to a few requests, read off the records of the steps."""

from __future__ import annotations

from recall_executor import RecallExecutor, expected_answer
from test_engine_invariants import queue
from test_in_flight import run

import ifb_handler.engine.policies as policies
from ifb_handler.engine.config import CHOICES, EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.outputs import StepRecord
from ifb_handler.engine.policies.base import MOST_PASSED_OVER

BLOCK_SIZE = 4


def make(num_blocks: int = 100, **options: object) -> EngineCore:
    executor = RecallExecutor(num_blocks, BLOCK_SIZE)
    defaults = {"block_size": BLOCK_SIZE, "max_num_seqs": 4, "enable_prefix_caching": False}
    return EngineCore(executor, EngineConfig.from_mapping({**defaults, **options}))


def order_of_admission(records: list[StepRecord]) -> list[str]:
    return list(dict.fromkeys(request_id for record in records for request_id, _ in record.prefill))


def test_every_choice_of_the_configuration_has_its_policy() -> None:
    for name in ("batching", "scheduling_policy", "prefill_priority", "capacity", "kv_reservation"):
        assert set(getattr(policies, name.upper())) == set(CHOICES[name])


def test_a_static_batch_lets_nobody_in_until_all_have_ended_and_carries_the_ended_as_padding() -> None:
    core = make(batching="static", max_num_seqs=2)
    for request_id, num_tokens in (("0", 2), ("1", 10), ("2", 3)):
        queue(core, request_id, [int(request_id)] * 6, num_tokens)
    core.step()
    core.step()
    assert [r.request_id for r in core.scheduler.ended] == ["0"]
    padded = core.schedule()
    assert len(padded.num_tokens) == 2, "a row for the one that has ended"
    core.run(padded)
    held = core.pool.num_used
    assert held == 2 * core.pool.pages_for(6 + 2), "its pages are held"
    records = run(core)
    joined = next(record for record in records if ("2", 6) in record.prefill)
    left = next(record for record in records if "1" in record.finished)
    assert joined.step == left.step + 1
    assert core.pool.num_used == 0


def test_a_static_batch_comes_in_whole_though_its_prompts_exceed_the_budget() -> None:
    core = make(batching="static", max_num_batched_tokens=8)
    for i in range(4):
        queue(core, str(i), [i] * 10, 20)
    core.step()
    assert len(core.scheduler.running) == 4


def test_priority_admits_the_lower_value_first_and_preempts_the_higher() -> None:
    core = make(scheduling_policy="priority", max_num_seqs=1)
    for request_id, priority in (("0", 0), ("1", 5), ("2", -1), ("3", 5)):
        queue(core, request_id, [int(request_id)] * 6, 4)
        core.requests[request_id].priority = priority
    assert order_of_admission(run(core)) == ["2", "0", "1", "3"]

    core = make(num_blocks=8, scheduling_policy="priority")
    for request_id, priority in (("0", 7), ("1", 0)):
        queue(core, request_id, [int(request_id)] * 6, 20)
        core.requests[request_id].priority = priority
    preempted = [request_id for record in run(core) for request_id in record.preempted]
    assert set(preempted) == {"0"}, "though it arrived first"


def test_shortest_job_first_admits_by_the_tokens_still_to_compute() -> None:
    core = make(scheduling_policy="shortest_job_first", max_num_seqs=1)
    for request_id, prompt_len, num_tokens in (("0", 6, 30), ("1", 20, 2), ("2", 5, 3), ("3", 6, 20)):
        queue(core, request_id, [int(request_id)] * prompt_len, num_tokens)
    assert order_of_admission(run(core)) == ["2", "1", "3", "0"]


def test_longest_prefix_match_admits_what_the_cache_knows_best() -> None:
    core = make(scheduling_policy="longest_prefix_match", max_num_seqs=1, enable_prefix_caching=True)
    common = list(range(20))
    queue(core, "0", common, 2)
    run(core)
    queue(core, "1", [50] * 12, 2)
    queue(core, "2", [*common[:8], 60, 61], 2)
    queue(core, "3", [*common, 60, 61], 2)
    assert order_of_admission(run(core)) == ["3", "2", "1"]


def test_a_request_that_has_been_passed_over_often_enough_is_next() -> None:
    for policy in ("shortest_job_first", "priority", "longest_prefix_match"):
        core = make(scheduling_policy=policy, max_num_seqs=1, enable_prefix_caching=True)
        queue(core, "0", [1] * 8, 1)
        queue(core, "1", [7] * 20, 50)
        core.requests["1"].priority = 9
        arrival = 2
        admitted: list[str] = []
        while "1" not in admitted:
            queue(core, str(arrival), [1] * 8, 1)
            arrival += 1
            admitted += [request_id for request_id, _ in core.step().record.prefill]
            assert arrival < 2 * MOST_PASSED_OVER + 10, f"{policy} starves"
        assert admitted.index("1") >= MOST_PASSED_OVER // 2


def test_prefill_first_lets_prompts_stall_the_running_answers_and_decode_first_does_not() -> None:
    stalled = {}
    for choice in ("decode_first", "prefill_first"):
        core = make(prefill_priority=choice, max_num_batched_tokens=8)
        queue(core, "0", [1] * 6, 30)
        run(core, steps=2)
        queue(core, "1", [2] * 40, 3)
        records = run(core, steps=4)
        stalled[choice] = sum("0" not in record.decode for record in records)
    assert stalled == {"decode_first": 0, "prefill_first": 4}


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    core = make(enable_chunked_prefill=False, max_num_batched_tokens=32)
    for request_id, length in (("0", 20), ("1", 20), ("2", 100)):
        queue(core, request_id, [int(request_id)] * length, 4)
    records = run(core)
    chunks = [chunk for record in records for chunk in record.prefill]
    assert sorted(chunks) == [("0", 20), ("1", 20), ("2", 100)]


def test_prefill_first_without_chunks_never_mixes_the_two_in_a_step() -> None:
    core = make(prefill_priority="prefill_first", enable_chunked_prefill=False)
    for i in range(6):
        queue(core, str(i), [i] * 20, 5 + i)
    assert all(not (record.prefill and record.decode) for record in run(core))


def test_guaranteed_no_evict_never_preempts_where_max_utilization_does() -> None:
    preemptions, mean_rows = {}, {}
    for choice in CHOICES["capacity"]:
        core = make(num_blocks=20, capacity=choice)
        for i in range(8):
            queue(core, str(i), [i] * 6, 30)
        records = run(core)
        preemptions[choice] = core.num_preemptions
        mean_rows[choice] = sum(len(r.decode) + len(r.prefill) for r in records) / len(records)
    assert preemptions["guaranteed_no_evict"] == 0
    assert preemptions["max_utilization"] > 0
    assert mean_rows["max_utilization"] > mean_rows["guaranteed_no_evict"]


def test_max_length_reservation_holds_pages_for_the_longest_answer_from_the_start() -> None:
    core = make(kv_reservation="max_length")
    queue(core, "0", [1] * 6, 30)
    core.step()
    assert core.pool.num_used == core.pool.pages_for(36)
    core = make(kv_reservation="on_demand")
    queue(core, "0", [1] * 6, 30)
    core.step()
    assert core.pool.num_used == core.pool.pages_for(6)


def test_nobody_is_preempted_over_and_over() -> None:
    core = make(num_blocks=14, max_num_seqs=8)
    prompts = {str(i): [i + 1] * 9 for i in range(8)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 30)
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    times: dict[str, int] = dict.fromkeys(prompts, 0)
    while core.has_work:
        result = core.step()
        core.check()
        for request_id in result.record.preempted:
            times[request_id] += 1
        for output in result.outputs:
            answers[output.request_id] += output.token_ids
    assert answers == {request_id: expected_answer(prompt, 30) for request_id, prompt in prompts.items()}
    assert 0 < max(times.values()) <= 3

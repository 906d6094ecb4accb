"""Who is in the batch at each step, by the records of a core that is stepped by hand."""

from __future__ import annotations

from recall_executor import RecallExecutor
from test_engine_invariants import queue

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.outputs import StepRecord


def run(core: EngineCore, steps: int | None = None) -> list[StepRecord]:
    records = []
    while core.has_work and (steps is None or len(records) < steps):
        records.append(core.step().record)
        core.check()
    return records


def test_a_short_request_joins_a_running_batch_at_the_very_next_step_and_finishes_first() -> None:
    core = EngineCore(RecallExecutor(200), EngineConfig(block_size=16, max_num_seqs=8))
    queue(core, "0", [1] * 20, 100)
    before = run(core, steps=10)
    assert all(record.prefill == () for record in before[1:]), "the long request decodes"
    queue(core, "1", [2] * 9, 3)
    after = run(core)
    assert after[0].step == before[-1].step + 1
    assert after[0].prefill == (("1", 9),)
    assert after[0].decode == ("0",)
    ends = {request_id: record.step for record in after for request_id in record.finished}
    assert ends["1"] == after[0].step + 2
    assert ends["0"] == 99


def test_a_finished_request_leaves_room_at_once_for_the_next_in_the_queue() -> None:
    core = EngineCore(RecallExecutor(200), EngineConfig(block_size=16, max_num_seqs=2, enable_prefix_caching=False))
    for request_id, max_tokens in (("0", 3), ("1", 10), ("2", 4)):
        queue(core, request_id, [7] * 5, max_tokens)
    records = run(core)
    left = next(record.step for record in records if "0" in record.finished)
    joined = next(record.step for record in records if ("2", 5) in record.prefill)
    assert joined == left + 1


def test_every_running_request_gets_its_token_at_every_step_while_a_long_prompt_prefills() -> None:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    core = EngineCore(RecallExecutor(400, max_model_len=4096), config)
    for i in range(5):
        queue(core, str(i), [i + 1] * 10, 200)
    run(core, steps=3)
    queue(core, "5", [3] * 2000, 5)
    chunks = []
    while core.requests["5"].num_generated == 0:
        result = core.step()
        chunks += [count for _, count in result.record.prefill]
        assert set(result.record.decode) == {"0", "1", "2", "3", "4"}
        answered = {output.request_id for output in result.outputs if output.token_ids}
        assert answered >= {"0", "1", "2", "3", "4"}
        assert len(result.record.decode) + sum(n for _, n in result.record.prefill) <= 64
    assert sum(chunks) == 2000
    assert len(chunks) == -(-2000 // 59)


def test_a_short_prompt_does_not_wait_for_the_end_of_very_long_ones() -> None:
    core = EngineCore(RecallExecutor(900, max_model_len=8192), EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    for request_id, length in (("0", 6000), ("1", 5000), ("2", 20)):
        queue(core, request_id, [int(request_id)] * length, 3)
    records = run(core)
    first_token = {}
    for record in records:
        for request_id in record.decode:
            first_token.setdefault(request_id, record.step)
    assert first_token["2"] <= 5
    assert first_token["0"] < first_token["1"], "long ones are still served in turn"
    assert sum(count for record in records for _, count in record.prefill) == 11_020


def test_decode_rows_and_prefill_chunks_share_one_step_and_one_token_budget() -> None:
    core = EngineCore(RecallExecutor(200), EngineConfig(block_size=16, max_num_seqs=8, max_num_batched_tokens=32))
    queue(core, "0", [1] * 30, 50)
    run(core, steps=1)
    for request_id in ("1", "2", "3"):
        queue(core, request_id, [int(request_id) + 1] * 20, 50)
    record = run(core, steps=1)[0]
    assert record.decode == ("0",)
    assert record.prefill == (("1", 20), ("2", 11)), "the last prompt is cut to what is left of the budget"
    assert record.waiting == ("3",)
    record = run(core, steps=1)[0]
    assert record.decode == ("0", "1")
    assert record.prefill == (("2", 9), ("3", 20))

"""Random arrivals, lengths, cancels and pool sizes: whatever comes, the books add up and every answer is right."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from recall_executor import VOCAB_SIZE, RecallExecutor, expected_answer
from speculators import KnowingProposer, speculate

from ifb_handler.engine.config import CHOICES, EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.draft_model import DraftModelProposer
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler

BLOCK_SIZE = 4
MODES = ("preemption_mode", "batching", "scheduling_policy", "prefill_priority", "capacity", "kv_reservation")


def queue(core: EngineCore, request_id: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    limit = min(max_tokens, core.max_request_len - len(prompt))
    text = OutputAssembler(params, core.executor.eos_token_ids, limit, Detokenizer(Vocabulary(None)))
    arrival = int(request_id)
    core.add(Request(GenerationRequest(request_id, prompt, params), arrival, seed=0, text=text))


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps after the arrival before
        st.integers(0, 50),  # how much of its beginning the prompt has in common with all others
        st.integers(1, 20),  # the prompt's own end
        st.integers(1, 30),  # max_tokens
        st.one_of(st.none(), st.none(), st.integers(0, 20)),  # cancelled so many steps after it came
    ),
    min_size=1,
    max_size=20,
)


def forget_free_pages(core: EngineCore) -> None:
    core.executor.forget((core.pool.ref_counts == 0) & ~core.pool.in_cache)


@settings(max_examples=400, deadline=None)
@given(
    arrivals=arrivals,
    caching=st.booleans(),
    swap_pages=st.sampled_from([0, 3, 30]),
    modes=st.fixed_dictionaries({}, optional={name: st.sampled_from(CHOICES[name]) for name in MODES}),
    chunked=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 40)),
    num_blocks=st.integers(2, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 48),
    wrong_drafts=st.sampled_from([None, 0.0, 0.3, 1.0, "model"]),
    seed=st.integers(0, 1000),
)
def test_every_request_ends_with_its_own_answer_and_every_page_comes_back(
    arrivals: list[tuple[int, int, int, int, int | None]],
    caching: bool,
    swap_pages: int,
    modes: dict[str, str],
    chunked: bool,
    window: int | None,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    wrong_drafts: float | str | None,
    seed: int,
) -> None:
    randomness = random.Random(seed)
    eos = [randomness.randrange(VOCAB_SIZE)]
    executor = RecallExecutor(num_blocks, BLOCK_SIZE, eos=eos, sliding_window=window)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        swap_space=swap_pages / 1024,
        enable_chunked_prefill=chunked,
        **modes,
    )
    core = EngineCore(executor, config)
    if wrong_drafts == "model":
        speculate(core, DraftModelProposer(executor, core.sampler, core.pool))
    elif wrong_drafts is not None:
        known: dict[str, list[int]] = {}

        def answer(request: Request) -> list[int]:
            if request.request_id not in known:
                known[request.request_id] = expected_answer(prompts[request.request_id], 30)
            return known[request.request_id]

        speculate(core, KnowingProposer(answer, VOCAB_SIZE, wrong_drafts))
    plan, cancels, prompts, limits = {}, {}, {}, {}
    at = 0
    common = [randomness.randrange(VOCAB_SIZE) for _ in range(50)]
    for i, (wait, common_len, own_len, max_tokens, cancel_after) in enumerate(arrivals):
        at += wait
        request_id = str(i)
        prompt = common[:common_len] + [randomness.randrange(3) for _ in range(own_len)]
        prompts[request_id] = prompt = prompt[: core.max_request_len - 1]
        limits[request_id] = min(max_tokens, core.max_request_len - len(prompt))
        plan.setdefault(at, []).append((request_id, max_tokens))
        if cancel_after is not None:
            cancels.setdefault(at + cancel_after, []).append(request_id)
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    ends: dict[str, FinishReason] = {}
    first_scheduled: list[str] = []
    step = 0
    while plan or cancels or core.has_work:
        for request_id, max_tokens in plan.pop(step, []):
            queue(core, request_id, prompts[request_id], max_tokens)
        for request_id in cancels.pop(step, []):
            ended = core.abort(request_id)
            if ended is not None:
                ends[request_id] = ended.finish_reason
            core.check()
        padding = list(core.scheduler.ended)
        result = core.step()
        core.check()
        forget_free_pages(core)
        if result is not None:
            assert result.record.used_blocks <= num_blocks
            if chunked:
                assert len(result.record.decode) + sum(n for _, n in result.record.prefill) <= budget
                assert len(executor.batch.token_ids) - len(padding) <= budget
            for request_id, _ in result.record.prefill:
                if request_id not in first_scheduled:
                    first_scheduled.append(request_id)
            for output in result.outputs:
                assert output.request_id not in ends, "news of a request that has ended"
                answers[output.request_id] += output.token_ids
                if output.finished:
                    ends[output.request_id] = output.finish_reason
        else:
            assert not core.has_work, "requests are alive and none is scheduled"
        step += 1
        assert step < 20_000, "a request never ends"
    assert core.pool.num_used == 0
    if wrong_drafts == "model" and not caching:
        stats = core.stats()
        assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens, "its memory is as good"
    assert set(ends) == set(prompts)
    # With caching a later request may pass one that waits for its prefix to be computed; in a static batch one that is
    # not prefilled yet may lose its pages to an earlier one.
    fcfs = modes.get("scheduling_policy", "fcfs") == "fcfs" and modes.get("batching") != "static"
    if fcfs and not caching:
        assert first_scheduled == sorted(first_scheduled, key=int), "first come, first served"
    for request_id, prompt in prompts.items():
        expected = expected_answer(prompt, limits[request_id], eos, window)
        if ends[request_id] is FinishReason.ABORT:
            assert answers[request_id] == expected[: len(answers[request_id])]
        else:
            assert answers[request_id] == expected


def test_a_pool_that_is_too_small_for_all_preempts_the_latest_arrival_and_no_token_changes() -> None:
    core = EngineCore(RecallExecutor(8, BLOCK_SIZE), EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=4))
    prompts = {str(i): [i + 1] * 5 for i in range(3)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 20)
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    preempted: list[str] = []
    while core.has_work:
        running = {r.request_id for r in core.scheduler.running}
        result = core.step()
        for request_id in result.record.preempted:
            assert int(request_id) >= max(int(r) for r in running - set(result.record.preempted)), "not the latest"
        preempted += result.record.preempted
        for output in result.outputs:
            answers[output.request_id] += output.token_ids
        core.check()
    assert preempted
    assert "0" not in preempted
    assert core.num_preemptions == len(preempted)
    assert answers == {request_id: expected_answer(prompt, 20) for request_id, prompt in prompts.items()}

"""Beam search gives the sequences and scores of Hugging Face `generate`, and its beams share their pages."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greedy_oracle import generate_alone, load_folder, load_smollm2
from recall_executor import VOCAB_SIZE, SpreadExecutor
from test_engine_invariants import forget_free_pages
from test_engine_thread import GatedExecutor
from test_exactness import tiny as tiny_config
from tiny_llama import write_tiny_llama, write_tokenizer

from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.beam_search import BeamSearch, Candidates, rank
from ifb_handler.engine.config import CHOICES, EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler
from ifb_handler.engine.structured import StructuredOutput

BEAMS = SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=12)


def beams(**more: Any) -> SamplingParams:
    return dataclasses.replace(BEAMS, **more)


# Against Hugging Face.


@dataclasses.dataclass(frozen=True)
class Case:
    prompt: list[int]
    params: SamplingParams
    answers: list[list[int]]
    scores: list[float]


def oracle(model: Any, prompt: list[int], params: SamplingParams, **more: Any) -> Case:
    ids, eos = torch.tensor([prompt]), list(params.stop_token_ids)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.best_of,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=eos or None,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    answers = found.sequences[:, len(prompt) :].tolist()
    ends = [next((i for i, token in enumerate(answer, 1) if token in eos), len(answer)) for answer in answers]
    answers = [answer[:end] for answer, end in zip(answers, ends, strict=True)]
    return Case(prompt, params, answers, found.sequences_scores.tolist())


def same(outputs: list[RequestOutput], cases: list[Case]) -> bool:
    """Whether the outputs are the cases' answers and scores."""
    assert [output.index for output in outputs] == [i for case in cases for i in range(case.params.n)]
    assert [output.token_ids for output in outputs] == [answer for case in cases for answer in case.answers]
    assert [output.score for output in outputs] == pytest.approx([s for case in cases for s in case.scores], abs=1e-3)
    return True


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cases(tiny: Path) -> list[Case]:
    model, draw = load_folder(tiny), random.Random(5)
    found = []
    for i in range(32):
        width = draw.randint(2, 6)
        params = SamplingParams(
            use_beam_search=True,
            n=draw.randint(1, width),
            best_of=width,
            max_tokens=draw.randint(1, 20),
            length_penalty=draw.choice([1.0, 0.0, -1.0, 2.0]),
            early_stopping=[True, False, "never"][i % 3],
            ignore_eos=True,
            stop_token_ids=draw.choice([[], [1], draw.sample(range(2, 390), 6), draw.sample(range(2, 390), 80)]),
        )
        prompt = [draw.randrange(3, 390) for _ in range(round(1.13**i))]
        found.append(oracle(model, prompt, params))
    draw.shuffle(found)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False, "block_size": 4},
        {"max_num_batched_tokens": 7, "block_size": 1, "max_num_seqs": 6},
        {"prefill_priority": "prefill_first", "enable_chunked_prefill": False},
        {"capacity": "guaranteed_no_evict", "num_gpu_blocks_override": 70, "block_size": 4},
        {"kv_reservation": "max_length", "num_gpu_blocks_override": 70, "block_size": 4},
        {"num_gpu_blocks_override": 64, "block_size": 4, "scheduling_policy": "shortest_job_first"},
        {"num_gpu_blocks_override": 64, "block_size": 4, "enable_prefix_caching": False, "max_num_batched_tokens": 9},
        {"num_gpu_blocks_override": 64, "block_size": 4, "swap_space": 0.01, "preemption_mode": "swap"},
        {"num_gpu_blocks_override": 64, "block_size": 4, "speculative_method": "ngram"},
    ],
    ids=str,
)
def test_answers_and_scores_are_those_of_hugging_face_among_all_kinds_of_neighbours(
    tiny: Path, cases: list[Case], options: dict[str, Any]
) -> None:
    with Engine(str(tiny), **{"max_num_seqs": 16, **options}) as engine:
        others = [SamplingParams(temperature=t, seed=1, max_tokens=30) for t in (0.0, 1.0)] * 6
        alone = engine.generate([[i] * 20 for i in range(12)], others)
        prompts = [case.prompt for case in cases] + [[i] * 20 for i in range(12)]
        outputs = engine.generate(prompts, [case.params for case in cases] + others)
        assert same(outputs[:-12], cases)
        assert [o.token_ids for o in outputs[-12:]] == [o.token_ids for o in alone]
        if options.get("num_gpu_blocks_override") == 64:
            assert engine.stats().num_preemptions
        engine.check()
        assert engine.stats().used_blocks == 0


def test_logit_edits_change_log_probabilities_as_in_hugging_face(tiny: Path) -> None:
    model, draw = load_folder(tiny), random.Random(2)
    prompt = [draw.randrange(3, 390) for _ in range(40)]
    own = beams(max_tokens=24, ignore_eos=True, stop_token_ids=[1, *range(100, 150)])
    plain = oracle(model, prompt, own)
    allowed, first = [1, *range(100, 250)], plain.answers[0]
    edited = [
        ({"repetition_penalty": 1.4}, {}),
        ({"min_tokens": 23}, {"min_new_tokens": 23}),
        ({"logit_bias": {first[0]: -9.5, 7: 3}}, {"sequence_bias": [[[first[0]], -9.5], [[7], 3.0]]}),
        ({"allowed_token_ids": allowed}, {"prefix_allowed_tokens_fn": lambda *_: allowed}),
        ({"bad_words": [first[:1], first[1:3]]}, {"bad_words_ids": [first[:1], first[1:3]]}),
    ]
    cases = [plain]
    for ours, theirs in edited:
        changes = theirs or ours
        cases.append(oracle(model, prompt, dataclasses.replace(own, **ours), **changes))
        assert cases[-1].answers != plain.answers
    with Engine(str(tiny), max_num_seqs=12) as engine:
        assert same(engine.generate([prompt] * len(cases), [case.params for case in cases]), cases)


def test_beams_of_a_sliding_window_are_those_of_hugging_face_and_leave_pages_behind(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("Mistral", sliding_window=24)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model, draw = load_folder(tmp_path), random.Random(3)
    params = beams(max_tokens=40, ignore_eos=True, stop_token_ids=[2, *range(50, 60)], early_stopping="never")
    cases = [oracle(model, [draw.randrange(3, 320) for _ in range(size)], params) for size in (5, 23, 61, 130)]
    for options in ({"block_size": 4}, {"block_size": 8, "enable_prefix_caching": False}):
        with Engine(str(tmp_path), max_num_seqs=8, max_num_batched_tokens=24, **options) as engine:
            assert same(engine.generate([case.prompt for case in cases], params), cases)
            assert max(record.used_blocks for record in engine.steps()) < 2 * (130 + 40) // options["block_size"]
            engine.check()
            assert engine.stats().used_blocks == 0


def test_smollm2_gives_the_beams_of_hugging_face() -> None:
    model = load_smollm2()
    with Engine("smollm2-135m", max_num_seqs=8) as engine:
        texts = ["The capital of France is", "Once upon a time, in a land far away, there lived"]
        params = beams(max_tokens=12, stop_token_ids=[2], early_stopping=True)
        cases = [oracle(model, engine.tokenizer.encode(text), params) for text in texts]
        outputs = engine.generate(texts, params)
        assert same(outputs, cases)
        for output in outputs:
            assert output.text == engine.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_one_beam_is_the_greedy_answer(tiny: Path) -> None:
    prompt = [5, 6, 7]
    with Engine(str(tiny), max_num_seqs=2) as engine:
        (output,) = engine.generate([prompt], SamplingParams(use_beam_search=True, max_tokens=9, ignore_eos=True))
    assert output.token_ids == generate_alone(load_folder(tiny), prompt, 9)


# The search alone.


def step_of(*continuations: tuple[int, int, float]) -> Candidates:
    columns = zip(*continuations, strict=True)
    return Candidates(*(np.array(column) for column in columns))


END = 9


def test_only_the_best_beams_of_a_step_may_end_and_the_others_take_their_place() -> None:
    search = BeamSearch(2, frozenset([END]), 5)
    assert search.advance(step_of((0, END, -1.0), (0, 4, -2.0), (0, 5, -3.0))) == [0, 0]
    assert search.advance(step_of((1, 3, -4.0), (0, 6, -5.0), (1, END, -5.5), (0, 7, -6.0))) == [1, 0]
    assert [path.token_ids for path in search.running] == [[5, 3], [4, 6]]
    assert [hypothesis.path.token_ids for hypothesis in search.hypotheses] == [[END]]
    assert not search.done


@pytest.mark.parametrize(("early_stopping", "goes_on"), [(True, False), (False, False), ("never", True)])
def test_early_stopping_decides_whether_a_better_answer_is_waited_for(
    early_stopping: bool | str, goes_on: bool
) -> None:
    search = BeamSearch(1, frozenset([END]), 8, length_penalty=1.0, early_stopping=early_stopping)
    search.advance(step_of((0, END, -1.0), (0, 4, -2.0)))
    assert search.done is not goes_on


def test_what_is_impossible_is_no_candidate_and_equals_come_in_order() -> None:
    logprobs = torch.tensor([[-torch.inf, -1.0, -1.0, -torch.inf], [-torch.inf, -0.5, -torch.inf, -2.0]])
    searches = [BeamSearch(3, frozenset(), 5) for _ in range(2)]
    searches[0].advance(step_of((0, 1, -1.0), (0, 2, -1.5)))
    (found,) = rank(logprobs, searches[:1])
    assert list(zip(found.beams.tolist(), found.token_ids.tolist(), found.scores.tolist(), strict=True)) == [
        (0, 1, -2.0),
        (0, 2, -2.0),
        (1, 1, -2.0),
        (1, 3, -3.5),
    ]
    logprobs[1, 1] = torch.nan
    assert rank(logprobs, searches[:1]) == [None]
    two = rank(torch.cat([logprobs[:1], logprobs[1:], logprobs[:1]]), [searches[0], searches[1]])
    assert two[0] is None
    assert two[1].token_ids.tolist() == [1, 2]


# Among random neighbours.

BLOCK_SIZE = 4
MODES = ("preemption_mode", "scheduling_policy", "prefill_priority", "capacity", "kv_reservation")


def new_core(num_blocks: int, eos: list[int], window: int | None = None, **options: Any) -> EngineCore:
    executor = SpreadExecutor(num_blocks, BLOCK_SIZE, eos=eos, sliding_window=window)
    return EngineCore(executor, EngineConfig(block_size=BLOCK_SIZE, **options))


def queue(core: EngineCore, number: int, prompt: list[int], width: int, max_tokens: int) -> None:
    """A beam search whose answers are all told or, with `width` 0, a greedy request."""
    length = core.max_beam_len(len(prompt), max(width, 1))
    params = SamplingParams(temperature=0.0, max_tokens=min(max_tokens, length - len(prompt)))
    if width:
        params = dataclasses.replace(params, n=width, use_beam_search=True)
    request = GenerationRequest(str(number), prompt, params)
    eos = core.executor.eos_token_ids
    texts = [OutputAssembler(params, eos, params.max_tokens, Detokenizer(Vocabulary(None))) for _ in range(params.n)]
    core.add(BeamRequest(request, number, texts, eos) if width else Request(request, number, 0, texts[0]))


@pytest.mark.parametrize("seed", range(24))
def test_every_search_ends_with_its_own_answers_and_every_page_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    eos = draw.sample(range(VOCAB_SIZE), draw.choice([0, 1, 5]))
    num_blocks, budget, chunked = draw.randint(14, 28), draw.randint(4, 32), draw.random() < 0.7
    window = draw.choice([None, None, 3, 9])
    core = new_core(
        num_blocks,
        eos,
        window,
        max_num_seqs=draw.randint(6, 16),
        max_num_batched_tokens=budget,
        enable_prefix_caching=draw.random() < 0.5,
        swap_space=draw.choice([0, 3, 30]) / 1024,
        enable_chunked_prefill=chunked,
        **{name: draw.choice(CHOICES[name]) for name in MODES},
    )
    common = [draw.randrange(VOCAB_SIZE) for _ in range(10)]
    plan: dict[int, list[tuple[int, list[int], int, int]]] = {}
    cancels: dict[int, list[str]] = {}
    expected: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    cancelled: set[str] = set()
    arrivals = sorted(draw.randrange(30) for _ in range(12))
    for number, at in enumerate(arrivals):
        prompt = common[: draw.randrange(10)] + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 5))]
        asked = number, prompt, draw.choice([0, 1, 2, 3, 4]), draw.randint(4, 20)
        plan.setdefault(at, []).append(asked)
        if draw.random() < 0.2:
            cancels.setdefault(at + draw.randrange(30), []).append(str(number))
        alone = new_core(num_blocks, eos, window, max_num_seqs=4)
        queue(alone, *asked)
        while alone.has_work:
            note(alone.step().outputs, expected)
        assert alone.num_preemptions == 0
    step = 0
    while plan or cancels or core.has_work:
        for asked in plan.pop(step, []):
            queue(core, *asked)
        for request_id in cancels.pop(step, []):
            if core.abort(request_id) is not None:
                cancelled.add(request_id)
            core.check()
        result = core.step()
        core.check()
        forget_free_pages(core)
        if result is not None:
            note(result.outputs, answers)
            if chunked:
                assert len(result.record.decode) + sum(n for _, n in result.record.prefill) <= budget
        else:
            assert not core.has_work, "requests are alive and none is scheduled"
        step += 1
        assert step < 5_000, "a request never ends"
    assert core.pool.num_used == 0
    for request_id, answer in expected.items():
        if request_id not in cancelled:
            assert answers[request_id] == answer


def note(outputs: list[RequestOutput], answers: dict[str, Any]) -> None:
    for output in outputs:
        assert output.error is None
        if output.beams is None:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        else:
            answers[output.request_id] = [(beam.token_ids, beam.score) for beam in output.beams]


# Pages.


def test_beams_share_the_pages_of_what_they_have_in_common() -> None:
    copies: list[int] = []

    class Counting(SpreadExecutor):
        def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
            copies.append(len(pairs))
            super().copy_pages(pairs)

    width, prompt = 4, [(7 * i) % VOCAB_SIZE for i in range(101)]
    core = EngineCore(
        Counting(200, BLOCK_SIZE), EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=4, enable_prefix_caching=False)
    )
    queue(core, 0, prompt, width, 20)
    prefilled = sum(tokens for _, tokens in core.step().record.prefill)
    assert core.pool.num_used == 26
    answers: dict[str, Any] = {}
    for generated in range(1, 20):
        copies.clear()
        record = core.step()
        note(record.outputs, answers)
        prefilled += sum(tokens for _, tokens in record.record.prefill)
        core.check()
        if core.has_work:
            (request,) = core.scheduler.running
            rows = len(request.rows)
            assert rows <= width
            assert (core.pool.ref_counts[core.pool.tables[request.rows[0].slot, :25]] == rows).all()
            assert core.pool.num_used <= 25 + width * -(-(1 + generated) // BLOCK_SIZE)
            assert sum(copies) == 0 if (100 + generated) % BLOCK_SIZE == 0 else sum(copies) < width
    assert prefilled == len(prompt)
    assert core.pool.num_used == 0
    assert len(answers["0"]) == width


def test_a_prompt_that_is_known_is_not_computed_for_beams_either() -> None:
    with Engine.with_executor(SpreadExecutor(200, 4), block_size=4) as engine:
        prompt = list(range(50))
        first = engine.generate([prompt], BEAMS)
        again = engine.generate([prompt], BEAMS)
        assert [o.token_ids for o in again] == [o.token_ids for o in first]
        assert {o.num_cached_tokens for o in again} == {49}
        assert {o.num_prompt_tokens for o in again} == {50}


# The door, and what goes wrong.


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"logprobs": 0}, "logprobs"),
        ({"stop": "end"}, "stop"),
        ({"structured": StructuredOutput("json_object", field="response_format")}, "response_format"),
        ({"best_of": 1}, "best_of"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": True}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"early_stopping": []}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
    ids=str,
)
def test_a_parameter_that_means_nothing_to_a_beam_search_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: ") as refused:
        beams(**more)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("options", "params", "field"),
    [
        ({"max_num_seqs": 3}, BEAMS, "best_of: 4 beams are more than max_num_seqs, 3"),
        ({"max_num_seqs": 3}, beams(n=4, best_of=None), "n: 4 beams are more than max_num_seqs, 3"),
        ({"max_num_batched_tokens": 3}, BEAMS, "best_of: 4 beams are more than max_num_batched_tokens, 3"),
        ({"batching": "static"}, BEAMS, "use_beam_search: true needs"),
        ({}, beams(best_of=50), "best_of: 50 beams after a prompt of 40 tokens are more than the KV pool holds"),
        ({}, beams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids: "),
    ],
)
def test_beams_that_can_never_run_are_refused_at_once(
    options: dict[str, Any], params: SamplingParams, field: str
) -> None:
    options = {"block_size": 4, **options}
    with Engine.with_executor(SpreadExecutor(40, 4), **options) as engine, pytest.raises(RequestError, match=field):
        engine.generate([[1] * 40], params)


def test_an_answer_ends_where_all_beams_would_just_fit_into_the_pool() -> None:
    with Engine.with_executor(SpreadExecutor(40, 4), block_size=4) as engine:
        outputs = engine.generate([[1] * 40], beams(max_tokens=None, n=4, length_penalty=0.0))
        assert {len(output.token_ids) for output in outputs} == {(10 + 30 // 4) * 4 - 40}
        assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
        assert engine.stats().num_preemptions == 0


def test_too_few_possible_answers_are_an_error_that_names_what_forbids_the_others() -> None:
    executor = SpreadExecutor(40, 4, eos=[0])
    context = next([i] for i in range(1, 50) if executor.logits_after(np.array([i]))[0] > -torch.inf)
    with Engine.with_executor(executor, block_size=4) as engine:
        (one,) = engine.generate([context], beams(allowed_token_ids=[0], n=1))
        assert one.token_ids == [0]
        first, second = engine.generate([context], beams(allowed_token_ids=[0]))
        assert first.finish_reason is second.finish_reason is FinishReason.ERROR
        assert first.error_param == "allowed_token_ids"
        assert "leaves 1 answers" in first.error
        engine.check()


def test_a_beam_without_numbers_ends_its_own_request_only() -> None:
    with Engine.with_executor(SpreadExecutor(80, 4), block_size=4) as engine:
        best = engine.generate([[1, 2, 3]], BEAMS)[0].token_ids
    fatal = [1, 2, 3, *best[:5]]

    class Fatal(SpreadExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            logits = super().logits_after(context)
            return logits.fill_(torch.nan) if context.tolist() == fatal else logits

    with Engine.with_executor(Fatal(80, 4), block_size=4) as engine:
        outputs = engine.generate([[1, 2, 3], [4, 5]], [BEAMS, BEAMS])
        assert [output.finish_reason for output in outputs] == ["error", "error", "length", "length"]
        assert "no usable logits" in outputs[0].error
        engine.check()
        assert engine.stats().used_blocks == 0


def test_a_failed_step_ends_a_search_once() -> None:
    executor = SpreadExecutor(80, 4)
    core = EngineCore(executor, EngineConfig(block_size=4))
    queue(core, 0, [1, 2, 3], 3, 10)
    core.step()
    core.step()
    executor.fail_next = True
    (output,) = core.step().outputs
    assert output.finish_reason is FinishReason.ERROR
    core.check()
    assert not core.has_work
    assert core.pool.num_used == 0


def test_cancelling_a_search_gives_all_its_pages_back_and_ends_each_answer() -> None:
    executor = GatedExecutor(64)
    with Engine.with_executor(executor, max_num_seqs=4) as engine:
        mailbox = Mailbox()
        engine.submit(GenerationRequest("beams", [1] * 20, beams(max_tokens=200, best_of=3)), mailbox)
        for _ in range(5):
            executor.entered.acquire()
            executor.gate.release()
        executor.entered.acquire()
        engine.cancel("beams")
        executor.open_for_good()
        outputs = mailbox.collect(timeout=30)
        assert [(o.request_id, o.index, o.finish_reason) for o in outputs] == [
            ("beams", 0, FinishReason.ABORT),
            ("beams", 1, FinishReason.ABORT),
        ]
        engine.check()
        assert engine.stats().used_blocks == 0
        assert engine.stats().request_success["abort"] == 1


def test_a_stream_has_each_answer_as_one_piece_at_the_end() -> None:
    with Engine.with_executor(SpreadExecutor(80, 4), block_size=4) as engine:
        outputs = list(engine.stream([1, 2, 3], beams(prompt_logprobs=1)))
        assert [(output.index, len(output.token_ids)) for output in outputs] == [(0, 12), (1, 12)]
        assert outputs[0].score > outputs[1].score
        assert all(len(output.prompt_logprobs) == 3 for output in outputs)

"""Beam search gives the sequences and scores of Hugging Face `generate`, and its beams share their pages."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_oracle import load_folder
from recall_executor import VOCAB_SIZE, SpreadExecutor
from tiny_llama import write_tiny_llama

from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.config import CHOICES, EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler

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


# Among random neighbours.

BLOCK_SIZE = 4
MODES = ("preemption_mode", "scheduling_policy", "prefill_priority", "capacity", "kv_reservation")


def new_core(num_blocks: int, eos: list[int], **options: Any) -> EngineCore:
    executor = SpreadExecutor(num_blocks, BLOCK_SIZE, eos=eos)
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
    core = new_core(
        num_blocks,
        eos,
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
        alone = new_core(num_blocks, eos, max_num_seqs=4)
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

"""Beam search gives the sequences and scores of Hugging Face `generate`, in whatever company."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beams import beams
from greedy_oracle import generate_alone, load_folder, load_smollm2
from test_exactness import tiny as tiny_config
from tiny_llama import write_tiny_llama, write_tokenizer

from ifb_handler.engine.beam_search import BeamSearch, Candidates, rank
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.sampling_params import SamplingParams


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

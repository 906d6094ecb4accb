"""The promise: a greedy answer is what Hugging Face `generate` gives that prompt alone, whatever happens around it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_oracle import Case, generate_alone, load_folder, load_smollm2, make_cases
from speculators import KnowingProposer, speculate
from tiny_llama import write_tokenizer

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler
from ifb_handler.models.source import resolve

BLOCK_SIZE = 16
AMPLE = 32 * -(-800 // BLOCK_SIZE)


def run_at_random(
    executor: ModelExecutor,
    cases: list[Case],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    seed: int,
    wrong_drafts: float | None = None,
    **modes: Any,
) -> EngineCore:
    """Let the cases arrive at random steps and hold each answer against its oracle. -> the core, for its counters

    wrong_drafts    share of wrong tokens in what a speculator, that knows the answers, drafts; None: there is none
    """
    source = random.Random(seed)
    executor.num_blocks = num_blocks
    options = {"block_size": BLOCK_SIZE, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, **modes}
    core = EngineCore(executor, EngineConfig.from_mapping(options))
    if wrong_drafts is not None:
        proposer = KnowingProposer(lambda r: cases[int(r.request_id)].answer, executor.vocab_size, wrong_drafts)
        speculate(core, proposer)
    arrivals = sorted((source.randint(0, 40), i) for i in range(len(cases)))
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(cases))}
    step = 0
    while arrivals or core.has_work:
        while arrivals and (arrivals[0][0] <= step or not core.has_work):
            _, i = arrivals.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=cases[i].num_tokens, ignore_eos=True)
            text = OutputAssembler(params, (), cases[i].num_tokens, Detokenizer(Vocabulary(None)))
            core.add(Request(GenerationRequest(str(i), cases[i].prompt, params), len(cases) - len(arrivals), 0, text))
        result = core.step()
        core.check()
        for output in result.outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
        step += 1
    assert core.pool.num_used == 0
    wrong = [i for i, case in enumerate(cases) if answers[str(i)] != case.answer]
    assert not wrong, f"of {len(cases)} answers these differ from the oracle's: {wrong}"
    return core


@pytest.fixture(scope="module")
def smollm2_cases_and_logits() -> tuple[list[Case], list[torch.Tensor]]:
    """The cases, and the logits after the prompt of each, float32 [vocabulary]."""
    model = load_smollm2()
    cases = make_cases(model, 32, 5, 700, most_tokens=40, vocab_size=49_152)
    with torch.inference_mode():
        logits = [model(torch.tensor([case.prompt])).logits[0, -1].clone() for case in cases]
    del model
    gc.collect()
    return cases, logits


@pytest.fixture(scope="module")
def smollm2_cases(smollm2_cases_and_logits: tuple[list[Case], list[torch.Tensor]]) -> list[Case]:
    return smollm2_cases_and_logits[0]


@pytest.fixture(scope="module")
def smollm2(smollm2_cases: list[Case]) -> ModelExecutor:
    config = EngineConfig(dtype="float32", num_gpu_blocks_override=AMPLE)
    return ModelExecutor(config, resolve(config.model))


@pytest.mark.parametrize("budget", [16, 64, 256])
@pytest.mark.parametrize("max_num_seqs", [1, 7, 32])
def test_smollm2_answers_as_generate_does_alone(
    smollm2: ModelExecutor, smollm2_cases: list[Case], max_num_seqs: int, budget: int
) -> None:
    run_at_random(smollm2, smollm2_cases, AMPLE, max_num_seqs, budget, seed=budget + max_num_seqs)


def test_smollm2_logits_agree_to_1e_4_however_the_prompts_are_cut(
    smollm2: ModelExecutor,
    smollm2_cases_and_logits: tuple[list[Case], list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases, expected = smollm2_cases_and_logits
    first: dict[str, torch.Tensor] = {}
    execute = smollm2.execute

    def watch(batch: Batch) -> torch.Tensor:
        logits = execute(batch)
        for i, row in enumerate(batch.sample_rows.tolist()):
            first.setdefault(batch.requests[row].request_id, logits[i].clone())
        return logits

    monkeypatch.setattr(smollm2, "execute", watch)
    run_at_random(smollm2, cases, AMPLE, max_num_seqs=32, budget=64, seed=4)
    differences = [float((first[str(i)] - logits).abs().max()) for i, logits in enumerate(expected)]
    assert max(differences) < 1e-4


@pytest.mark.parametrize(("wrong_drafts", "num_blocks"), [(0.2, -(-730 // BLOCK_SIZE)), (1.0, AMPLE)])
def test_smollm2_answers_as_generate_does_alone_whatever_is_drafted(
    smollm2: ModelExecutor, smollm2_cases: list[Case], wrong_drafts: float, num_blocks: int
) -> None:
    core = run_at_random(smollm2, smollm2_cases, num_blocks, 7, 64, seed=5, wrong_drafts=wrong_drafts)
    assert core.stats().spec_decode_num_draft_tokens > 0
    assert (core.stats().spec_decode_num_accepted_tokens > 0) == (wrong_drafts < 1)


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(7, 64), (32, 256)])
def test_smollm2_answers_as_generate_does_alone_though_the_pool_forces_preemption(
    smollm2: ModelExecutor, smollm2_cases: list[Case], max_num_seqs: int, budget: int
) -> None:
    num_blocks = -(-730 // BLOCK_SIZE)
    core = run_at_random(smollm2, smollm2_cases, num_blocks, max_num_seqs, budget, seed=1)
    assert core.num_preemptions > 0


def tiny(name: str, **changes: Any) -> Any:
    """A transformers configuration of a few thousand weights."""
    import transformers

    shape = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return getattr(transformers, f"{name}Config")(**{**shape, **changes})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}

ARCHITECTURES = {
    "llama": lambda: tiny("Llama"),
    "llama, tied": lambda: tiny("Llama", tie_word_embeddings=True),
    "llama, llama3 rope": lambda: tiny("Llama", rope_parameters=LLAMA3_ROPE),
    "llama, one kv head": lambda: tiny("Llama", num_key_value_heads=1),
    "llama, wide heads": lambda: tiny("Llama", head_dim=80),
    "mistral, sliding window": lambda: tiny("Mistral", sliding_window=37),
    "mistral, no window": lambda: tiny("Mistral", sliding_window=None),
    "qwen2": lambda: tiny("Qwen2"),
    "qwen2, tied": lambda: tiny("Qwen2", tie_word_embeddings=True),
    "qwen2, yarn": lambda: tiny("Qwen2", rope_parameters=YARN_ROPE),
    "qwen3": lambda: tiny("Qwen3", head_dim=32),
}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[request.param]())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.25)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_cases(tiny_model: Path) -> list[Case]:
    return make_cases(load_folder(tiny_model), 32, 5, 300, most_tokens=64, vocab_size=320)


@pytest.fixture(scope="module")
def tiny_executor(tiny_model: Path) -> ModelExecutor:
    config = EngineConfig(model=str(tiny_model), dtype="float32", num_gpu_blocks_override=AMPLE)
    return ModelExecutor(config, resolve(config.model))


@pytest.mark.parametrize(("max_num_seqs", "budget", "num_blocks"), [(1, 16, AMPLE), (7, 64, 24), (32, 256, 40)])
def test_every_architecture_answers_as_generate_does_alone(
    tiny_executor: ModelExecutor, tiny_cases: list[Case], max_num_seqs: int, budget: int, num_blocks: int
) -> None:
    core = run_at_random(tiny_executor, tiny_cases, num_blocks, max_num_seqs, budget, seed=2)
    small = num_blocks < AMPLE and tiny_executor.sliding_window is None  # a window's pages always find room here
    assert (core.num_preemptions > 0) == small


# Pairwise: any two choices of any two modes meet in one of these rows. The last is the share of wrong drafts.
MODES = [
    ("continuous", "fcfs", "decode_first", True, "max_utilization", "on_demand", True, None),
    ("continuous", "priority", "prefill_first", False, "guaranteed_no_evict", "max_length", False, None),
    ("static", "fcfs", "prefill_first", False, "max_utilization", "on_demand", False, 0.3),
    ("static", "priority", "decode_first", True, "guaranteed_no_evict", "max_length", True, None),
    ("continuous", "longest_prefix_match", "decode_first", False, "guaranteed_no_evict", "on_demand", True, 0.3),
    ("static", "longest_prefix_match", "prefill_first", True, "max_utilization", "max_length", False, None),
    ("continuous", "shortest_job_first", "prefill_first", True, "guaranteed_no_evict", "on_demand", False, None),
    ("static", "shortest_job_first", "decode_first", False, "max_utilization", "max_length", True, 0.3),
    ("continuous", "fcfs", "decode_first", True, "guaranteed_no_evict", "max_length", False, 0.3),
    ("continuous", "priority", "prefill_first", True, "max_utilization", "on_demand", True, 0.3),
    ("static", "priority", "decode_first", True, "max_utilization", "on_demand", True, 0.3),
]


@pytest.fixture(scope="module")
def llama_and_cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelExecutor, list[Case]]:
    """A third of the prompts begin like one another, so that there is something to find in the prefix cache."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(tiny("Llama")).save_pretrained(folder)
    model = load_folder(folder)
    cases = make_cases(model, 20, 5, 200, most_tokens=48, vocab_size=320)
    longest = max(cases, key=lambda case: len(case.prompt)).prompt
    for cut in (16, 40, 100, 144, 199):
        prompt = [*longest[:cut], 7, 8, 9]
        cases.append(Case(prompt, generate_alone(model, prompt, 30)))
    config = EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=AMPLE)
    return ModelExecutor(config, resolve(config.model)), cases


@pytest.mark.parametrize("num_blocks", [AMPLE, 24])
@pytest.mark.parametrize("modes", MODES, ids=lambda modes: "-".join(str(mode) for mode in modes))
def test_answers_are_exact_in_every_mode(
    llama_and_cases: tuple[ModelExecutor, list[Case]], modes: tuple[str | bool, ...], num_blocks: int
) -> None:
    names = ("batching", "scheduling_policy", "prefill_priority", "enable_chunked_prefill", "capacity")
    chosen = dict(zip((*names, "kv_reservation", "enable_prefix_caching", "wrong_drafts"), modes, strict=True))
    run_at_random(*llama_and_cases, num_blocks, max_num_seqs=6, budget=48, seed=3, **chosen)


@pytest.mark.parametrize("wrong_drafts", [None, 0.3])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_are_exact_when_preempted_requests_are_swapped(
    llama_and_cases: tuple[ModelExecutor, list[Case]], enable_prefix_caching: bool, wrong_drafts: float | None
) -> None:
    modes: dict[str, Any] = {"swap_space": 0.01, "preemption_mode": "swap", "wrong_drafts": wrong_drafts}
    modes["enable_prefix_caching"] = enable_prefix_caching
    core = run_at_random(*llama_and_cases, 17, max_num_seqs=8, budget=64, seed=7, **modes)
    assert core.num_swapped_pages > 0


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Iterator[Path]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = write_tokenizer(tmp_path)
    AutoModelForCausalLM.from_config(tiny("Llama", vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    return tmp_path


def test_a_seeded_request_draws_the_same_tokens_alone_in_company_and_when_preempted(tiny_llama: Path) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=40, ignore_eos=True)
    others = SamplingParams(temperature=1.3, max_tokens=30, ignore_eos=True)
    prompt = list(range(3, 60))
    with Engine(str(tiny_llama), num_gpu_blocks_override=64) as engine:
        (alone,) = engine.generate([prompt], seeded)
        assert len(set(alone.token_ids)) > 5, "drawn, not stuck"
    with Engine(str(tiny_llama), num_gpu_blocks_override=14, max_num_batched_tokens=16) as engine:
        prompts = [list(range(i, i + 30)) for i in range(8)]
        outputs = engine.generate([*prompts[:4], prompt, *prompts[4:]], [*[others] * 4, seeded, *[others] * 4])
        assert engine.stats().num_preemptions > 0
        assert outputs[4].token_ids == alone.token_ids


def test_every_eos_id_of_the_generation_config_ends_an_answer(tiny_llama: Path) -> None:
    model = load_folder(tiny_llama)
    prompt = [5, 6, 7]
    answer = generate_alone(model, prompt, 20)
    second = answer[6]
    model.generation_config.eos_token_id = [2, second]
    model.save_pretrained(tiny_llama)
    with Engine(str(tiny_llama), num_gpu_blocks_override=64) as engine:
        first_at = answer.index(second)
        (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=20))
        assert output.token_ids == answer[: first_at + 1]
        assert output.finish_reason is FinishReason.STOP
        late = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=first_at + 2)
        (output,) = engine.generate([prompt], late)
        assert len(output.token_ids) >= first_at + 2
        (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert output.token_ids == answer

"""A draft model changes how long an answer takes and nothing else; its memory goes wherever the model's own goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_oracle import load_folder, make_cases
from recall_executor import VOCAB_SIZE, RecallExecutor, SpreadExecutor
from speculators import EagerSpeculator, KnowingProposer, deciding, make_core, make_request, run, speculate, tokens
from test_exactness import BLOCK_SIZE, run_at_random, tiny
from tiny_llama import write_tiny_llama

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.draft_model import DraftModelProposer
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import ConfigError
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.models.source import resolve
from ifb_kernels.kv_quantization import page_bytes


def with_itself(executor: RecallExecutor, **options: Any) -> EngineCore:
    core = make_core(executor, speculative_method="draft_model", speculative_model="itself", **options)
    assert isinstance(core.speculator.proposer, DraftModelProposer)
    speculate(core, core.speculator.proposer)
    return core


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
        {"temperature": 1.0, "logit_bias": {3: 4.0}, "min_tokens": 10, "logprobs": 2},
    ],
    ids=str,
)
def test_all_that_the_model_itself_drafts_is_accepted_greedy_or_drawn(settings: dict[str, Any]) -> None:
    executor = SpreadExecutor(400)
    plain = make_core(executor)
    requests = [(str(i), [i] * (5 + 30 * i), SamplingParams(seed=i, max_tokens=40, **settings)) for i in range(4)]
    expected, plain_steps = run(plain, *(make_request(*request) for request in requests))
    core = with_itself(executor, max_num_batched_tokens=48)
    outputs, steps = run(core, *(make_request(*request) for request in requests))
    assert {key: tokens(each) for key, each in outputs.items()} == {key: tokens(each) for key, each in expected.items()}
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 80
    assert steps < plain_steps


def test_what_the_prefix_cache_gives_serves_the_draft_model_too() -> None:
    executor = RecallExecutor(400)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    core = with_itself(executor)
    beginning = list(range(70))
    outputs, _ = run(core, make_request("0", beginning, params))
    conversation = beginning + tokens(outputs["0"]) + [5, 6]
    before = core.stats()
    outputs, _ = run(core, make_request("1", conversation, params))
    assert outputs["1"][0].num_cached_tokens >= 96
    after = core.stats()
    accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
    assert accepted == after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens > 20


def test_a_request_that_is_not_drafted_for_still_leaves_whole_pages_to_the_draft_model() -> None:
    executor = RecallExecutor(400)
    core = make_core(
        executor, speculative_method="draft_model", speculative_model="itself", enable_prefix_caching=False
    )
    core.speculator._choose = lambda *args: {}
    request = make_request("0", list(range(50)), SamplingParams(temperature=0.0, max_tokens=80))
    core.add(request)
    while core.has_work:
        core.step()
        if request.slot is not None:
            full = request.num_computed // 16
            pages = core.pool.tables[request.slot, :full]
            memory, draft_memory = executor.pages()
            assert (draft_memory[pages] == memory[pages]).all()
    assert core.stats().spec_decode_num_draft_tokens == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The weights of two models of one vocabulary, the second smaller and with nothing in common."""
    from transformers import AutoModelForCausalLM

    both = []
    for seed, changes in enumerate(({}, {"num_hidden_layers": 1, "hidden_size": 32, "num_key_value_heads": 1})):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("model")
        AutoModelForCausalLM.from_config(tiny("Llama", **changes)).save_pretrained(folder)
        both.append(folder)
    return both[0], both[1]


def load(model: Path, draft: Path, **options: Any) -> ModelExecutor:
    config = EngineConfig(
        model=str(model), speculative_method="draft_model", speculative_model=str(draft), dtype="float32", **options
    )
    return ModelExecutor(config, resolve(config.model))


MODES = [
    {"num_blocks": 800},
    {"num_blocks": 24},
    {"num_blocks": 24, "enable_prefix_caching": False},
    {"num_blocks": 17, "swap_space": 0.01, "preemption_mode": "swap"},
    {"num_blocks": 24, "batching": "static"},
]


@pytest.mark.parametrize("own", [True, False], ids=["itself", "a stranger"])
def test_answers_are_those_of_generate_in_every_mode(
    folders: tuple[Path, Path], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "_make_speculator", _eager)
    cases = make_cases(load_folder(folders[0]), 16, 5, 200, most_tokens=40, vocab_size=320)
    executor = load(folders[0], folders[0] if own else folders[1], num_gpu_blocks_override=800)
    for seed, mode in enumerate(MODES):
        core = run_at_random(executor, cases, max_num_seqs=6, budget=48, seed=seed, **mode)
        stats = core.stats()
        assert stats.spec_decode_num_draft_tokens > 100
        if own:
            assert stats.spec_decode_num_accepted_tokens > 0.95 * stats.spec_decode_num_draft_tokens
        else:
            assert stats.spec_decode_num_accepted_tokens < 0.5 * stats.spec_decode_num_draft_tokens


def _eager(core: EngineCore, config: EngineConfig) -> EagerSpeculator:
    return EagerSpeculator(DraftModelProposer(core.executor, core.sampler, core.pool), 5, core.pool)


def test_the_pool_and_the_weights_are_those_of_both_models(folders: tuple[Path, Path]) -> None:
    both = load(*folders, cpu_kv_cache_gib=0.001, max_num_seqs=64)
    shapes = [each.model.config for each in (both.target, both.draft)]
    pages = [page_bytes(s.num_layers, BLOCK_SIZE, s.num_kv_heads, s.head_dim, torch.float32) for s in shapes]
    assert both.num_blocks == int(0.001 * 2**30) // sum(pages)
    assert both.pool_bytes == both.num_blocks * sum(pages)
    assert both.weight_bytes == both.target.model.weight_bytes + both.draft.model.weight_bytes
    held = sum(t.nbytes for each in (both.target, both.draft) for layer in each.pages for t in layer.tensors())
    assert held == both.pool_bytes


def test_a_draft_model_that_does_not_fit_is_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name, changes, match in (
        ("words", {"vocab_size": 321}, "speculative_model: has 321 token ids, and the model 320"),
        ("short", {"max_position_embeddings": 512}, "speculative_model: was made for 512 tokens"),
    ):
        AutoModelForCausalLM.from_config(tiny("Llama", **changes)).save_pretrained(tmp_path / name)
        with pytest.raises(ConfigError, match=match):
            load(folders[0], tmp_path / name)
    load(folders[0], tmp_path / "short", max_model_len=512, num_gpu_blocks_override=8)


def test_a_draft_model_of_other_words_is_refused_by_one_of_them(tmp_path: Path) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        folder.mkdir()
        write_tiny_llama(folder)
    saved = draft / "tokenizer.json"
    saved.write_text(saved.read_text().replace('"<s>"', '"<begin>"'))
    options = {"speculative_method": "draft_model", "speculative_model": str(draft), "num_gpu_blocks_override": 64}
    with pytest.raises(ConfigError, match="speculative_model: 'draft' has another vocabulary: '<"):
        Engine(str(model), **options)


def test_a_draft_model_that_is_not_there_or_cannot_be_read_is_named_as_that(tmp_path: Path) -> None:
    model, broken = tmp_path / "model", tmp_path / "broken"
    for folder in (model, broken):
        folder.mkdir()
        write_tiny_llama(folder)
    (broken / "config.json").write_text("{")
    for draft in (tmp_path / "nowhere", broken):
        options = {"speculative_method": "draft_model", "speculative_model": str(draft), "num_gpu_blocks_override": 64}
        with pytest.raises(ConfigError, match=r"^speculative_model: "):
            Engine(str(model), **options)


def told(output: RequestOutput) -> tuple[Any, ...]:
    return output.text, output.token_ids, output.finish_reason, output.stop_reason, output.logprobs


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_texts_stop_strings_and_logprobs_are_the_same_through_the_engine(tmp_path: Path, method: str) -> None:
    folder = write_tiny_llama(tmp_path)
    prompts = ["Once upon a time", "The quick brown fox jumps over the lazy dog; the quick brown fox"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, logprobs=1),
        SamplingParams(temperature=0.9, seed=4, max_tokens=60),
        SamplingParams(temperature=0.0, max_tokens=60, presence_penalty=0.5),
    ]
    with Engine(str(folder), num_gpu_blocks_override=200) as engine:
        expected = [engine.generate(prompts, each) for each in params]
        text = expected[0][0].text
        stopping = SamplingParams(temperature=0.0, max_tokens=60, stop=[text[20:23]])
        (stopped,) = engine.generate(prompts[:1], stopping)
        assert stopped.stop_reason == text[20:23]
    options = {"speculative_model": str(folder)} if method == "draft_model" else {"prompt_lookup_min": 1}
    with Engine(str(folder), num_gpu_blocks_override=200, speculative_method=method, **options) as engine:
        engine._core.speculator = speculator = EagerSpeculator(engine._core.speculator.proposer, 5, engine._core.pool)
        for each, answers in zip(params, expected, strict=True):
            for found, answer in zip(engine.generate(prompts, each), answers, strict=True):
                assert told(found) == told(answer)
        (found,) = engine.generate(prompts[:1], stopping)
        assert told(found) == told(stopped)
        streamed = list(engine.stream(prompts[0], params[0]))
        assert "".join(output.text for output in streamed) == text
        assert max(len(output.token_ids) for output in streamed) > 1
        assert streamed[-1].num_generated_tokens == 60
        assert speculator.num_accepted_tokens > (20 if method == "draft_model" else 0)
        engine.check()


def test_a_request_whose_draft_model_gives_no_number_is_answered_all_the_same() -> None:
    class Broken(RecallExecutor):
        def execute_draft(self, batch: Any) -> torch.Tensor:
            return torch.full((len(batch.sample_tokens), VOCAB_SIZE), torch.nan)

    params = SamplingParams(temperature=0.0, max_tokens=20)
    core = with_itself(Broken(400, block_size=4), block_size=4)
    plain = make_core(RecallExecutor(400))
    outputs, _ = run(core, make_request("0", [1, 2], params))
    expected, _ = run(plain, make_request("0", [1, 2], params))
    assert tokens(outputs["0"]) == tokens(expected["0"])
    assert core.stats().spec_decode_num_draft_tokens == 0


def test_drafting_stops_where_the_draft_model_is_never_right() -> None:
    """Its rounds take a tenth of a step each, so that even one of two right would pay."""
    core = make_core(RecallExecutor(400))
    proposer = KnowingProposer(lambda request: [88] * 400, VOCAB_SIZE)
    proposer.seconds_per_round = 0.1
    core.speculator = speculator = deciding(per_token=0.01)
    speculator.proposer, speculator._pool, speculator.observe = proposer, core.pool, lambda *args: None
    run(core, make_request("0", [1, 2], SamplingParams(temperature=0.0, max_tokens=400)))
    assert 0 < speculator.num_draft_tokens < 60

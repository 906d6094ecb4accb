"""Log probabilities against transformers' own logits, and the same however a request came to be computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greedy_oracle import load_folder
from recall_executor import VOCAB_SIZE, RecallExecutor, SpreadExecutor
from tiny_llama import write_tiny_llama

from ifb_handler.engine.engine import Engine
from ifb_handler.engine.logprobs import token_logprobs
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from ifb_handler.engine.sampling_params import MAX_LOGPROBS, SamplingParams


def check(told: list[TokenLogprobs | None], logits: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Hold what was told of `token_ids` against the logits, [len(token_ids), V], that a model has before each."""
    assert len(told) == len(token_ids)
    right = logits.double().log_softmax(-1)
    for one, row, token_id in zip(told, right, token_ids, strict=True):
        assert one.token_id == token_id
        assert one.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert len(one.top) == num_top
        best = row.topk(num_top)
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        for top_id, logprob in one.top:
            assert logprob == pytest.approx(row[top_id].item(), abs=1e-4)


def test_a_row_is_told_as_torch_has_it_whatever_is_asked_of_its_neighbours() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 3
    logprobs, ids, num_top = logits.log_softmax(-1), [5, 4999, 0, 7, 8, 9], [0, 1, 2, 5, MAX_LOGPROBS, 3]
    told = list(token_logprobs(logprobs, ids, num_top))
    for row in range(6):
        check([told[row]], logits[row : row + 1], [ids[row]], num_top[row])
        assert list(token_logprobs(logprobs[row : row + 1], [ids[row]], [num_top[row]])) == [told[row]]


def test_equally_likely_tokens_come_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, -torch.inf]])
    (told,) = token_logprobs(logits.log_softmax(-1), [5], [6])
    assert [token_id for token_id, _ in told.top] == [1, 3, 2, 4, 0, 5]
    assert told.logprob == -torch.inf == told.top[-1][1]


PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(5 + 9 * i)] for i in range(8)]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, prompt_logprobs=2),
    SamplingParams(seed=5, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(seed=6, max_tokens=20, logprobs=20, prompt_logprobs=0, presence_penalty=1, top_k=5),
] * 2


def spread(**options: Any) -> Engine:
    return Engine.with_executor(SpreadExecutor(options.pop("num_blocks", 400), 4), block_size=4, **options)


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """Each request alone, its prompt in one piece."""
    outputs = []
    for prompt, params in zip(PROMPTS, ASKED, strict=True):
        with spread(max_num_seqs=1, enable_prefix_caching=False) as engine:
            outputs += engine.generate([prompt], params)
    return outputs


def test_chosen_tokens_and_prompts_are_told_from_the_raw_logits(plain: list[RequestOutput]) -> None:
    executor = SpreadExecutor(1)

    def logits_before_each(tokens: list[int]) -> torch.Tensor:
        """Before each of `tokens` but the first."""
        return torch.stack([executor.logits_after(np.array(tokens[:i])) for i in range(1, len(tokens))])

    for prompt, params, output in zip(PROMPTS, ASKED, plain, strict=True):
        logits = logits_before_each([*prompt, *output.token_ids])
        if params.logprobs is None:
            assert output.logprobs is None
        else:
            check(output.logprobs, logits[len(prompt) - 1 :], output.token_ids, params.logprobs)
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs[0] is None
            check(output.prompt_logprobs[1:], logits[: len(prompt) - 1], prompt[1:], params.prompt_logprobs)


def same(outputs: list[RequestOutput], plain: list[RequestOutput]) -> bool:
    return [(o.token_ids, o.logprobs, o.prompt_logprobs) for o in outputs] == [
        (o.token_ids, o.logprobs, o.prompt_logprobs) for o in plain
    ]


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_chunks_of_prompts_and_neighbours_change_nothing(plain: list[RequestOutput], budget: int) -> None:
    with spread(max_num_seqs=8, max_num_batched_tokens=budget) as engine:
        assert same(engine.generate(PROMPTS, ASKED), plain)


def test_a_preempted_request_tells_of_each_token_once(plain: list[RequestOutput]) -> None:
    with spread(num_blocks=30, max_num_seqs=8, max_num_batched_tokens=24) as engine:
        assert same(engine.generate(PROMPTS, ASKED), plain)
        assert engine.stats().num_preemptions > 0


def test_prompts_are_told_whole_though_the_prefix_cache_holds_them(plain: list[RequestOutput]) -> None:
    with spread(max_num_seqs=8) as engine:
        engine.generate(PROMPTS, SamplingParams(max_tokens=1))
        assert same(engine.generate(PROMPTS, ASKED), plain)
        hits = engine.stats().prefix_cache_hits
        assert hits > 0, "those that ask for no prompt_logprobs use the cache"
        asks = [i for i, params in enumerate(ASKED) if params.prompt_logprobs is not None]
        engine.generate([PROMPTS[i] for i in asks], [ASKED[i] for i in asks])
        assert engine.stats().prefix_cache_hits == hits


def test_streamed_they_come_with_their_tokens_and_the_prompts_with_the_first(plain: list[RequestOutput]) -> None:
    with spread(max_num_seqs=4, max_num_batched_tokens=16) as engine:
        for prompt, params, whole in zip(PROMPTS, ASKED, plain, strict=True):
            news = list(engine.stream(prompt, params))
            assert all(len(one.token_ids) == len(one.logprobs or one.token_ids) for one in news)
            if params.logprobs is not None:
                assert [lp for one in news for lp in one.logprobs] == whole.logprobs
            assert news[0].prompt_logprobs == whole.prompt_logprobs
            assert all(one.prompt_logprobs is None for one in news[1:])


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    with spread(max_num_seqs=1) as engine:
        (output,) = engine.generate([[3]], SamplingParams(max_tokens=2, prompt_logprobs=5))
        assert output.prompt_logprobs == [None]


def test_impossible_tokens_have_a_logprob_of_minus_infinity() -> None:
    class Few(RecallExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            return torch.full((VOCAB_SIZE,), -torch.inf).index_fill_(0, torch.tensor([2, 7]), 0.0)

    with Engine.with_executor(Few(10)) as engine:
        asked = SamplingParams(temperature=0.0, max_tokens=3, logprobs=4, prompt_logprobs=1)
        (output,) = engine.generate([[1, 2, 3]], asked)
    half, never = pytest.approx(np.log(0.5)), -torch.inf
    assert [one.logprob for one in output.prompt_logprobs[1:]] == [half, never]
    assert output.logprobs[0].top == ((2, half), (7, half), output.logprobs[0].top[2], output.logprobs[0].top[3])
    assert [logprob for _, logprob in output.logprobs[0].top[2:]] == [never, never]


def test_a_row_that_gives_no_token_ends_its_request_only_and_tells_nothing_of_it() -> None:
    class Broken(SpreadExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            logits = super().logits_after(context)
            return logits.fill_(torch.nan) if context[0] == 88 and len(context) > 4 else logits

    with Engine.with_executor(Broken(50)) as engine:
        asked = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
        broken, fine = engine.generate([[88, 1], [1, 88]], asked)
    assert broken.finish_reason is FinishReason.ERROR
    assert len(broken.logprobs) == len(broken.token_ids) == 3
    assert len(fine.logprobs) == len(fine.token_ids) == 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return folder, load_folder(folder)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 16}], ids=str)
@torch.inference_mode()
def test_a_real_model_agrees_with_transformers(tiny: tuple[Path, Any], options: dict) -> None:
    folder, oracle = tiny
    prompts = [[(11 * i + j) % 300 + 2 for j in range(3 + 17 * i)] for i in range(6)]
    asked = SamplingParams(seed=1, max_tokens=60, ignore_eos=True, logprobs=5, prompt_logprobs=2, min_p=0.02)
    with Engine(str(folder), **{"num_gpu_blocks_override": 128, **options}) as engine:
        outputs = engine.generate(prompts, asked)
        assert (engine.stats().num_preemptions > 0) == ("max_num_batched_tokens" in options)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.token_ids]
        logits = oracle(torch.tensor([tokens])).logits[0, :-1]
        check(output.prompt_logprobs[1:], logits[: len(prompt) - 1], prompt[1:], 2)
        check(output.logprobs, logits[len(prompt) - 1 :], output.token_ids, 5)

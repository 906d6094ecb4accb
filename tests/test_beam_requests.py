"""What a beam search may ask for, what its answers look like, and what happens when something goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from beams import BEAMS, beams, queue
from recall_executor import VOCAB_SIZE, SpreadExecutor
from test_engine_thread import GatedExecutor

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.request import GenerationRequest
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.structured import StructuredOutput


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

"""Beam searches for the tests: what they ask for, in an engine's core and told apart by their answers."""

from __future__ import annotations

import dataclasses
from typing import Any

from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler

BEAMS = SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=12)


def beams(**more: Any) -> SamplingParams:
    return dataclasses.replace(BEAMS, **more)


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


def note(outputs: list[RequestOutput], answers: dict[str, Any]) -> None:
    """Add to each request's answer in `answers` what the outputs say: tokens, or whole beams with their scores."""
    for output in outputs:
        assert output.error is None
        if output.beams is None:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        else:
            answers[output.request_id] = [(beam.token_ids, beam.score) for beam in output.beams]

"""Pool, prefix cache and scheduler under random commands, in random modes, against oracles that keep no books.

After every command the books add up, the tree is that of a brute-force model (`radix_model.py`), free pages are
overwritten, and at the end every answer is the one that the request gets alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radix_model import RadixModel
from recall_executor import VOCAB_SIZE, SpreadExecutor
from speculators import KnowingProposer, speculate
from test_engine_invariants import forget_free_pages

from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.config import CHOICES, EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler

BLOCK_SIZE = 4
MODES = ("batching", "scheduling_policy", "prefill_priority", "capacity", "kv_reservation", "preemption_mode")
_SOURCE = random.Random(0)
BEGINNINGS = [[_SOURCE.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(3)]
EOS = (7,)


def request_of(core: EngineCore, asked: GenerationRequest, number: int) -> Request:
    params = asked.params
    texts = [OutputAssembler(params, EOS, params.max_tokens, Detokenizer(Vocabulary(None))) for _ in range(params.n)]
    if params.use_beam_search:
        return BeamRequest(asked, number, texts, EOS)
    return Request(asked, number, params.seed or 0, texts[0])


def told(output: RequestOutput) -> list[list[int]]:
    return [beam.token_ids for beam in output.beams] if output.beams else []


class Engine(RuleBasedStateMachine):
    """asked    every request by id; answers, beams: what was told of it; ends: how those ended that have"""

    @initialize(
        modes=st.fixed_dictionaries({}, optional={name: st.sampled_from(CHOICES[name]) for name in MODES}),
        caching=st.sampled_from([True, True, False]),
        swap_pages=st.sampled_from([0, 4, 30]),
        chunked=st.sampled_from([True, True, False]),
        window=st.sampled_from([None, None, 2, 6, 13, 30]),
        num_blocks=st.integers(6, 40),
        max_num_seqs=st.integers(3, 8),
        budget=st.integers(3, 40),
        drafts=st.booleans(),
    )
    def start(
        self,
        modes: dict[str, str],
        caching: bool,
        swap_pages: int,
        chunked: bool,
        window: int | None,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        drafts: bool,
    ) -> None:
        self.window = window
        self.core = self.new_core(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            swap_space=swap_pages / 1024,
            **modes,
        )
        self.radix = RadixModel(self.core) if caching else None
        self.asked: dict[str, GenerationRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.beams: dict[str, list[list[int]]] = {}
        self.ends: dict[str, FinishReason] = {}
        if drafts:
            speculate(self.core, KnowingProposer(lambda r: self.alone(r.request_id)[0], VOCAB_SIZE, wrong=0.3), most=3)

    def new_core(self, num_blocks: int, **options: Any) -> EngineCore:
        executor = SpreadExecutor(num_blocks, BLOCK_SIZE, eos=EOS, sliding_window=self.window)
        return EngineCore(executor, EngineConfig(block_size=BLOCK_SIZE, **options))

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        common=st.integers(0, 60),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        max_tokens=st.integers(1, 25),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(-1, 1),
        count=st.sampled_from([1, 1, 1, 2, 3]),
        kind=st.sampled_from(["greedy", "greedy", "drawn", "beams", "prompt_logprobs"]),
    )
    def submit(
        self,
        beginning: list[int],
        common: int,
        own: list[int],
        max_tokens: int,
        salt: str | None,
        priority: int,
        count: int,
        kind: str,
    ) -> None:
        """As `Engine.submit`: `count` answers to one prompt are so many sequences, or the beams of one."""
        core = self.core
        prompt = [*beginning[:common], *own]
        width = min(count + 1, core.max_num_seqs) if kind == "beams" else 1
        if kind == "beams" and (core.max_num_batched_tokens < width or self.is_static):
            return
        longest = core.max_beam_len(len(prompt), width) if kind == "beams" else core.max_request_len
        room = longest - len(prompt)
        if room < 1:  # refused at the door
            return
        params = SamplingParams(temperature=0.0, max_tokens=min(max_tokens, room))
        if kind == "beams":
            params = dataclasses.replace(params, n=width, use_beam_search=True)
        elif kind == "prompt_logprobs":
            params = dataclasses.replace(params, prompt_logprobs=0)
        for _ in range(1 if kind == "beams" else count):
            number = len(self.asked)
            if kind == "drawn":
                params = dataclasses.replace(params, temperature=1.0, seed=number)
            asked = GenerationRequest(str(number), prompt, params, priority, salt)
            self.asked[asked.request_id] = asked
            self.answers[asked.request_id] = []
            core.add(request_of(core, asked, number))

    @property
    def is_static(self) -> bool:
        return self.core.scheduler.policies.batching.keeps_ended

    @precondition(lambda self: self.core.requests)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        alive = list(self.core.requests)
        self.take([self.core.abort(alive[which % len(alive)])])

    @precondition(lambda self: self.core.requests)
    @rule(count=st.sampled_from([1, 1, 2, 5, 12]))
    def step(self, count: int) -> None:
        for _ in range(count):
            result = self.core.step()
            if result is None:
                assert not self.core.has_work, "requests are alive and none is scheduled"
                break
            self.take(result.outputs)
            self.core.check()

    @precondition(lambda self: self.core.requests)
    @rule()
    def fail(self) -> None:
        self.core.executor.fail_next = True
        self.take(self.core.step().outputs)
        assert not self.core.executor.fail_next

    @rule()
    def drain(self) -> None:
        for _ in range(20_000):
            if not self.core.has_work:
                break
            self.step(1)
        assert not self.core.has_work, "a request never ends"
        assert self.core.pool.num_used == 0

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "news of a request that has ended"
            self.answers[output.request_id] += output.token_ids
            if output.finished:
                self.ends[output.request_id] = output.finish_reason
                self.beams[output.request_id] = told(output)

    def alone(self, request_id: str) -> tuple[list[int], list[list[int]]]:
        """What the request is answered, by an engine that has nothing else to do and all the memory it needs."""
        asked = self.asked[request_id]
        if asked.params.greedy and not asked.params.use_beam_search:
            return self.greedy_answer(asked), []
        core = self.new_core(400, max_num_seqs=8, enable_prefix_caching=False)
        core.add(request_of(core, dataclasses.replace(asked, request_id="alone"), 0))
        answer: list[int] = []
        beams: list[list[int]] = []
        while core.has_work:
            for output in core.step().outputs:
                answer += output.token_ids
                beams = told(output)
        return answer, beams

    def greedy_answer(self, asked: GenerationRequest) -> list[int]:
        context = list(asked.prompt_token_ids)
        for _ in range(asked.params.max_tokens):
            seen = context if self.window is None else context[-self.window :]
            context.append(int(self.core.executor.logits_after(seen).argmax()))
            if context[-1] in EOS:
                break
        return context[len(asked.prompt_token_ids) :]

    @invariant()
    def books_add_up(self) -> None:
        self.core.check()
        if self.radix is not None:
            self.radix.check()
        forget_free_pages(self.core)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.drain()
        self.books_add_up()
        assert set(self.ends) == set(self.asked)
        for request_id, end in self.ends.items():
            answer, beams = self.alone(request_id)
            if end in (FinishReason.ABORT, FinishReason.ERROR):
                assert self.answers[request_id] == answer[: len(self.answers[request_id])]
            else:
                assert (self.answers[request_id], self.beams[request_id]) == (answer, beams)


Engine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
TestAnyCommandsInAnyMode = Engine.TestCase

"""`ifb demo`: watch requests of different lengths join and leave a running batch, served by TorchServe."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

import httpx
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ifb_handler.cli import options
from ifb_handler.cli.chat import Question, Reply, ask
from ifb_handler.cli.console import console, phases, stop_signals_interrupt
from ifb_handler.cli.errors import CliError
from ifb_handler.cli.java import find_java
from ifb_handler.cli.ports import Ports
from ifb_handler.cli.serve import archive_to_serve
from ifb_handler.cli.server import ServerOptions, TorchServe
from ifb_handler.cli.timeline import State, Step, Timeline, legend

# Small enough that a newcomer sees requests wait, a prompt cut into chunks, and the pool fill and empty.
_ENGINE = {"max_num_seqs": 6, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 96}
_POLL_SECONDS = 0.15
_LONGEST_RUN_SECONDS = 600.0

# Who asks next waits for so much of the first answer, not for seconds: on a quick machine, too, they meet in one batch.
_TURN_SECONDS = 0.005

_INVENTORY = "; ".join(f"shelf {n}: {3 * n % 17 + 2} books, {n * n % 11 + 1} maps" for n in range(1, 41))
_QUESTIONS = [
    Question("story", "Tell me a story about a lighthouse keeper who finds a map.", 110, 0),
    Question("sky", "Why is the sky blue?", 48, 15),
    Question("haiku", "Write a haiku about rain.", 20, 30),
    Question("shelves", f"A library holds this: {_INVENTORY}. What kind of things are on the shelves?", 40, 45),
    Question("capital", "What is the capital of France?", 12, 60),
    Question("recipe", "How do I bake bread at home? Give me the steps.", 90, 75),
    Question("python", "Write a Python function that returns the larger of two numbers.", 60, 95),
    Question("colours", "Name three colours.", 16, 115),
    Question("moon", "Explain to a child why the moon changes its shape.", 72, 135),
    Question("letter", "Write a short letter that thanks a neighbour for feeding the cat.", 56, 155),
]


def demo(
    model: options.Model = options.DEFAULT_MODEL,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    settings: options.Settings = None,
) -> None:
    """Serve a model on free ports, send it ten questions a few words apart, and draw the batch at every step.

    Exit status 0 only if every answer arrived whole. The engine is small on purpose (max_num_seqs 6, 128 tokens a
    step, a pool of 96 pages) unless options say otherwise.
    """
    choice = options.choose_model(
        model, settings, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, dtype=dtype, device=device,
    )  # fmt: skip
    choice = options.ModelChoice(choice.model, {**_ENGINE, **choice.options})
    java = find_java()
    with stop_signals_interrupt():
        try:
            with archive_to_serve(None, choice, None) as (archive, name):
                served = ServerOptions(archive, name, Ports.from_first(0, "127.0.0.1"), java)
                with TorchServe(served) as server:
                    with phases() as begin:
                        server.wait_ready(begin)
                    run = DemoRun([Reply(question) for question in _QUESTIONS], server.model_url)
                    asyncio.run(run.watch())
                    run.report()
                    run.check()
        except KeyboardInterrupt:
            raise CliError("stopped before every answer had arrived") from None


class DemoRun:
    """The questions in flight and the steps that answer them."""

    def __init__(self, replies: list[Reply], model_url: str) -> None:
        self.replies = replies
        self.timeline = Timeline()
        self.seconds = 0.0
        self._model_url = model_url
        self._told: dict[str, State | None] = {}

    async def watch(self) -> None:
        """Ask all questions, each in its turn, and draw until the last has its answer."""
        async with httpx.AsyncClient(timeout=httpx.Timeout(120.0), trust_env=False) as client:
            started = time.monotonic()
            first = asyncio.create_task(ask(client, self._model_url, self.replies[0]))
            asked = [first, *(asyncio.create_task(self._join(first, client, reply)) for reply in self.replies[1:])]
            picture = Live(get_renderable=self._picture, console=console, transient=True, refresh_per_second=8)
            with picture if console.is_terminal else nullcontext():
                while not all(task.done() for task in asked):
                    if time.monotonic() - started > _LONGEST_RUN_SECONDS:
                        raise CliError(f"the answers took longer than {_LONGEST_RUN_SECONDS:.0f} s")
                    await asyncio.wait(asked, timeout=_POLL_SECONDS)
                    await self._look(client)
            await asyncio.gather(*asked)
            await self._look(client)
            if not console.is_terminal:
                self._tell_end()
            self.seconds = max((reply.arrivals[-1] - started for reply in self.replies if reply.arrivals), default=0.0)

    async def _join(self, first: asyncio.Task[None], client: httpx.AsyncClient, reply: Reply) -> None:
        while len(self.replies[0].text) < reply.question.after and not first.done():
            await asyncio.sleep(_TURN_SECONDS)
        await ask(client, self._model_url, reply)

    async def _look(self, client: httpx.AsyncClient) -> None:
        """Fetch the steps since the last look; on a log, tell who changed state."""
        try:
            answer = await client.get(f"{self._model_url}/engine/steps/{self.timeline.last_step}")
            answer.raise_for_status()
        except httpx.HTTPError:
            return  # the picture waits; what is wrong with the server, the answers tell
        steps = self.timeline.add(answer.json()["steps"])
        if not console.is_terminal:
            for step in steps:
                self._tell(step)

    def _tell(self, step: Step) -> None:
        changes = []
        for i, request in enumerate(self.timeline.requests):
            state = step.states.get(request)
            if state != self._told.get(request):
                self._told[request] = state
                changes.append(f"{self._names.get(request, f'#{i + 1}')} {state.name.lower() if state else 'done'}")
        if changes:
            console.print(f"step {step.number:4d}  {_batch(step)}  {', '.join(changes)}", markup=False)

    def _tell_end(self) -> None:
        """Nobody ran after the last step, so no step tells who left with it."""
        left = [request for request, state in self._told.items() if state]
        if left:
            names = [f"{self._names.get(request, request)} done" for request in left]
            console.print(f"after step {self.timeline.last_step}  {', '.join(names)}", markup=False)

    @property
    def _names(self) -> dict[str, str]:
        return {reply.request_id: reply.question.name for reply in self.replies if reply.request_id}

    def _picture(self) -> Group:
        steps = self.timeline.steps
        done = sum(reply.closed for reply in self.replies)
        head = f"step {steps[-1].number}  {_batch(steps[-1])}  done {done} of {len(self.replies)}" if steps else "..."
        drawing = self.timeline.draw(self._names, console.width, plain=False, whole=False)
        return Group(Text(head), Text(), drawing, Text(), legend(plain=False))

    def report(self) -> None:
        """The whole run in one picture, then its figures; nothing if nothing ran."""
        if not self.timeline.steps or not self.seconds:
            return
        plain = not console.is_terminal
        console.print("\nThe whole run, from left to right (a column holds several steps where they would not fit):\n")
        console.print(self.timeline.draw(self._names, console.width, plain=plain, whole=True))
        console.print(legend(plain), end="\n\n")
        table = Table(box=None, pad_edge=False)
        table.add_column("request", no_wrap=True)
        for heading in ("prompt", "answer", "TTFT s", "ITL p50 ms", "p99 ms"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("end", no_wrap=True)
        table.add_column("begins with", no_wrap=True, overflow="ellipsis", max_width=max(12, console.width - 64))
        for reply in self.replies:
            table.add_row(*_figures(reply))
        console.print(table)
        tokens = sum(reply.completion_tokens for reply in self.replies)
        gaps = [gap for reply in self.replies for gap in reply.gaps]
        first = [reply.time_to_first_token for reply in self.replies if reply.arrivals]
        steps = self.timeline.steps
        console.print(
            f"\n{tokens} tokens in {self.seconds:.1f} s: {tokens / self.seconds:.1f} tokens/s, "
            f"TTFT p50 {_percentile(first, 50):.2f} s, p99 {_percentile(first, 99):.2f} s, "
            f"inter-token latency p50 {1e3 * _percentile(gaps, 50):.0f} ms, p99 {1e3 * _percentile(gaps, 99):.0f} ms; "
            f"{len(steps)} steps, {sum(step.num_running for step in steps) / len(steps):.1f} requests in each"
        )

    def check(self) -> None:
        """CliError unless every answer arrived whole."""
        broken = [reply for reply in self.replies if not reply.complete]
        if broken:
            what = ", ".join(f"{reply.question.name} ({reply.error or 'the stream broke off'})" for reply in broken)
            raise CliError(f"{len(broken)} of {len(self.replies)} answers did not arrive whole: {what}")
        console.print(f"All {len(self.replies)} answers arrived whole.")


def _batch(step: Step) -> str:
    waiting = sum(state in (State.WAITING, State.PREEMPTED) for state in step.states.values())
    return f"running {step.num_running}  waiting {waiting}  pool {step.pool_share:4.0%}"


def _figures(reply: Reply) -> tuple[str, ...]:
    name = reply.question.name
    if not reply.arrivals:
        return name, "-", "-", "-", "-", "-", reply.error or "no answer", ""
    return (
        name,
        f"{reply.prompt_tokens}",
        f"{reply.completion_tokens}",
        f"{reply.time_to_first_token:.2f}",
        f"{1e3 * _percentile(reply.gaps, 50):.0f}",
        f"{1e3 * _percentile(reply.gaps, 99):.0f}",
        reply.finish_reason or "broken off",
        " ".join(reply.text.split()),
    )


def _percentile(values: list[float], percent: int) -> float:
    """The smallest value that `percent` of them do not exceed; 0 for none."""
    ordered = sorted(values) or [0.0]
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

"""What a client asked for, and its answer as it grows: as server-sent events or as one JSON body."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ifb_handler.api import sse
from ifb_handler.api.errors import APIError
from ifb_handler.api.prompts import Prompt
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Asked:
    """One generation request as its client put it, checked field by field; only the prompt's tokens are unknown yet."""

    prompt: Prompt
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False


class Answer(ABC):
    """One request's answer. Feed it every output once, in order, by `stream` or by `add`.

    id_prefix   what the answer's id begins with, before the request's own id
    """

    id_prefix = ""

    def __init__(self, asked: Asked, request_id: str, model_name: str) -> None:
        self.asked = asked
        self.id = f"{self.id_prefix}{request_id}"
        self.model_name = model_name
        self.created = int(time.time())
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.last: RequestOutput | None = None
        self._opened = False

    def add(self, output: RequestOutput) -> None:
        """Take an output into the whole. Raises the APIError that the client must hear if it says that all is lost."""
        if output.finish_reason is FinishReason.ERROR:
            raise APIError(500, f"generation failed: {output.error or 'the engine gave no reason'}")
        if output.finish_reason is FinishReason.ABORT:
            raise APIError(503, "generation was aborted: the engine is stopping", code="engine_stopped")
        self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.last = output

    def stream(self, outputs: Sequence[RequestOutput]) -> str:
        """The events for these outputs as one piece of text; empty when they say nothing that a client would see.

        Outputs that arrive together make one event. Raises like `add`.
        """
        for output in outputs:
            self.add(output)
        text = "".join(output.text for output in outputs)
        token_ids = [token for output in outputs for token in output.token_ids]
        finished = outputs[-1].finished
        events: list[dict[str, Any]] = []
        if not self._opened and (opening := self._opening()):
            events.append(opening)
        self._opened = True
        if finished or self._worth_saying(text, token_ids):
            events.append(self._delta(text, token_ids))
        if finished and self.asked.include_usage and (closing := self._closing()):
            events.append(closing)
        return "".join(map(sse.event, events)) + (sse.DONE if finished else "")

    def whole(self) -> str:
        """The one JSON body, once the last output has been added."""
        return sse.compact(self._body("".join(self.text), self.token_ids))

    @property
    def finish_reason(self) -> str | None:
        return str(self.last.finish_reason) if self.last and self.last.finish_reason else None

    @property
    def stop_reason(self) -> int | str | None:
        return self.last.stop_reason if self.last else None

    @property
    def usage(self) -> dict[str, int]:
        prompt = self.last.num_prompt_tokens if self.last else 0
        generated = self.last.num_generated_tokens if self.last else 0
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _opening(self) -> dict[str, Any] | None:
        """The event before the first token, where the form has one."""
        return None

    def _closing(self) -> dict[str, Any] | None:
        """The event after the last token when usage was asked for, where the form has one."""
        return None

    def _worth_saying(self, text: str, token_ids: list[int]) -> bool:
        return bool(text)

    @abstractmethod
    def _delta(self, text: str, token_ids: list[int]) -> dict[str, Any]: ...

    @abstractmethod
    def _body(self, text: str, token_ids: list[int]) -> dict[str, Any]: ...

"""Text Generation Inference's `generate`, `generate_stream` and `info`, as its clients know them.

Differences of TGI's sampling from OpenAI's: it is greedy unless something asks for chance; a stop string is part of the
answer; `truncate` keeps the prompt's end. Its errors are a text and a kind, under statuses of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ifb_handler.api import structured_output
from ifb_handler.api.answer import Answer, Asked, Choice, Part
from ifb_handler.api.errors import APIError, bad_field, shown
from ifb_handler.api.fields import Fields, flag, integer, names_no_length, sampling_params, section, text
from ifb_handler.api.limits import check_sampling, handling
from ifb_handler.api.logprobs import finite
from ifb_handler.api.prompts import Prompt, TextPrompt, TruncatedPrompt
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.sampling_params import MAX_SEED, SamplingParams

DEFAULT_NEW_TOKENS = 100
_SECTION = "parameters"

# What our names are in TGI.
_RENAMED = {"max_tokens": "max_new_tokens", "n": "best_of", "logprobs": "top_n_tokens"}
# HTTP status -> TGI's status and its word for the kind of error.
_ERRORS = {
    400: (422, "validation"),
    500: (424, "generation"),
    503: (429, "overloaded"),
    504: (504, "timeout"),
}


@dataclass(frozen=True, kw_only=True)
class TGIAsked(Asked):
    """details        the tokens with their log probabilities are wanted
    prefill        the prompt's, too
    full_text      the prompt stands before its answer
    """

    details: bool = False
    prefill: bool = False
    full_text: bool = False


def read(fields: Fields, model: ServedModel) -> TGIAsked:
    """Raises APIError or RequestError naming the field at fault."""
    given = section(fields, _SECTION)
    stream = flag(fields, "stream")
    prompt = text(fields, "inputs")
    if not prompt:
        raise bad_field("inputs", "is missing" if prompt is None else "is empty")
    prefill = _flag(given, "decoder_input_details")
    if prefill and stream:
        raise bad_field(f"{_SECTION}.decoder_input_details", "is not given with a stream")
    best_of = _integer(given, "best_of") or 1
    if best_of > 1 and stream:
        raise bad_field(f"{_SECTION}.best_of", f"{best_of} is not given with a stream")
    top = integer(given, "top_n_tokens", 0, f"{_SECTION}.top_n_tokens") or 0
    details = _flag(given, "details")
    params = _params(given, model, best_of, top if details or stream else None, 0 if prefill else None)
    cut = names_no_length(given, "max_new_tokens")
    return TGIAsked(
        parts=[Part(_truncated(TextPrompt(prompt, "inputs"), _integer(given, "truncate")), params, cut)],
        stream=stream,
        **handling(fields, model.config),
        details=details,
        prefill=prefill,
        full_text=_flag(given, "return_full_text"),
    )


def read_one_shot(fields: Fields, model: ServedModel) -> TGIAsked:
    return read({**fields, "stream": False}, model)


def read_stream(fields: Fields, model: ServedModel) -> TGIAsked:
    return read({**fields, "stream": True}, model)


def info(model: ServedModel) -> dict[str, Any]:
    """`GET info`, by TGI's names."""
    config = model.config
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": model.dtype,
        "model_device_type": model.device_type,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": config.max_num_seqs + config.max_num_waiting,
        "max_best_of": config.max_n,
        "max_stop_sequences": config.max_stop_sequences,
        "max_input_tokens": model.max_prompt_tokens,
        "max_total_tokens": min(config.max_total_tokens or model.max_model_len, model.max_model_len),
        "max_client_batch_size": config.max_client_batch_size,
        "validation_workers": 1,
        "router": "torchserve-ifb",
    }


def _params(
    given: Fields, model: ServedModel, best_of: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    _refuse_unserved(given)
    fields = {name: given.get(name) for name in ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed")}
    fields |= {"stop": given.get("stop"), "temperature": given.get("temperature"), "include_stop_str_in_output": True}
    fields["max_tokens"] = given.get("max_new_tokens")
    sampled = _flag(given, "do_sample") or given.get("temperature") not in (None, 1) or bool(given.get("top_k"))
    if not sampled and given.get("top_p") in (None, 1):
        if best_of > 1:
            raise bad_field(f"{_SECTION}.best_of", f"{best_of} answers would be the same without do_sample")
        fields["temperature"] = 0.0
    elif fields["seed"] is None and best_of == 1:
        fields["seed"] = random.getrandbits(MAX_SEED.bit_length())  # told, so that the answer can be had again
    try:
        params = sampling_params(
            fields,
            DEFAULT_NEW_TOKENS,
            n=best_of,
            best_of=best_of,
            # The best is told by its log probabilities.
            logprobs=0 if logprobs is None and best_of > 1 else logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=structured_output.grammar(given, "grammar", f"{_SECTION}.grammar"),
        )
        check_sampling(params, model.config)
    except (APIError, ValueError) as error:
        raise _renamed(APIError.of(error)) from None
    return params


def _renamed(error: APIError) -> APIError:
    """The error by the name that the client knows the field by."""
    name = _RENAMED.get(error.param or "", error.param or "")
    where = name if "." in name else f"{_SECTION}.{name}"
    return bad_field(where, error.message.removeprefix(f"{error.param}: "), error.code)


def _refuse_unserved(given: Fields) -> None:
    if given.get("typical_p") not in (None, 1):
        raise bad_field(f"{_SECTION}.typical_p", f"{shown(given['typical_p'])}: typical decoding is not served")
    if _flag(given, "watermark"):
        raise bad_field(f"{_SECTION}.watermark", "true: watermarks are not served")
    if given.get("adapter_id") is not None:
        raise bad_field(f"{_SECTION}.adapter_id", f"{shown(given['adapter_id'])}: adapters are not served")


def _truncated(prompt: Prompt, keep: int | None) -> Prompt:
    return prompt if keep is None else TruncatedPrompt(prompt, keep)


def _flag(given: Fields, name: str) -> bool:
    return flag(given, name, f"{_SECTION}.{name}")


def _integer(given: Fields, name: str) -> int | None:
    return integer(given, name, 1, f"{_SECTION}.{name}")


class TGIAnswer(Answer):
    """`{"generated_text", "details"}`; streamed, an event a token, the last of which has the whole text."""

    done = ""
    asked: TGIAsked

    def __init__(self, asked: TGIAsked, request_id: str, model: ServedModel, public_id: str | None = None) -> None:
        super().__init__(asked, request_id, model, public_id)
        self._tokens: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        self._tops: list[list[list[dict[str, Any]]]] = [[] for _ in self.choices]

    @classmethod
    def status_of(cls, error: APIError) -> int:
        return _ERRORS[error.status][0] if error.status in _ERRORS else error.status

    @classmethod
    def error_body(cls, error: APIError) -> dict[str, Any]:
        kind = _ERRORS[error.status][1] if error.status in _ERRORS else "validation"
        body = {"error": error.message, "error_type": kind}
        return body | ({} if error.retry_after is None else {"retry_after": error.retry_after})

    def add(self, output: RequestOutput) -> Choice:
        choice = super().add(output)
        # The text that came with several tokens is the last one's.
        texts = [""] * (len(output.token_ids) - 1) + [output.text]
        for entry, piece in zip(output.logprobs or (), texts, strict=False):
            self._tokens[choice.index].append(self._token(entry.token_id, entry.logprob, piece))
            self._tops[choice.index].append(
                [self._token(token, logprob, self.model.text_of(token)) for token, logprob in entry.top]
            )
        return choice

    def _events(self, choice: Choice, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """One a token; text that came without a token, at the very end, goes with the last one."""
        tokens, tops = self._tokens[choice.index], self._tops[choice.index]
        count = sum(len(output.logprobs or ()) for output in outputs)
        events: list[dict[str, Any]] = []
        for i in range(len(tokens) - count, len(tokens)):
            event = {"index": i + 1, "token": tokens[i], "generated_text": None, "details": None}
            events.append(event | ({"top_tokens": tops[i]} if tops[i] else {}))
        if outputs[-1].finished:
            if not events:
                nothing = {"id": 0, "text": outputs[-1].text, "logprob": 0.0, "special": True}
                events.append({"index": len(tokens) + 1, "token": nothing})
            details = self._ending(choice) | {"input_length": len(self.prompt_token_ids[0])}
            events[-1] |= {"generated_text": self._text(choice), "details": details}
        return events

    def _body(self) -> dict[str, Any]:
        best, *others = sorted(self.choices, key=_mean_logprob, reverse=True)
        body: dict[str, Any] = {"generated_text": self._text(best)}
        if self.asked.details or self.asked.prefill:
            body["details"] = self._details(best)
            if others:
                body["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(other)} | self._details(other) for other in others
                ]
        return body

    def _text(self, choice: Choice) -> str:
        text = "".join(choice.text)
        if not self.asked.full_text:
            return text
        return self.asked.parts[0].prompt.echo(self.model, self.prompt_token_ids[0]) + text

    def _details(self, choice: Choice) -> dict[str, Any]:
        tops = self._tops[choice.index]
        told = {"prefill": self._prefill(), "tokens": self._tokens[choice.index]}
        return self._ending(choice) | told | ({"top_tokens": tops} if any(tops) else {})

    def _ending(self, choice: Choice) -> dict[str, Any]:
        if choice.finish_reason is FinishReason.LENGTH:
            reason = "length"
        else:
            reason = "eos_token" if choice.stop_reason is None else "stop_sequence"
        params = self.asked.parts[0].params
        return {
            "finish_reason": reason,
            "generated_tokens": len(choice.token_ids),
            "seed": None if params.greedy else params.seed,
        }

    def _prefill(self) -> list[dict[str, Any]]:
        entries = self.prompt_logprobs[0] or ()
        logprobs = [None if entry is None else finite(entry.logprob) for entry in entries]
        return [
            {"id": token, "text": self.model.text_of(token), "logprob": logprob}
            for token, logprob in zip(self.prompt_token_ids[0], logprobs, strict=False)
        ]

    def _token(self, token_id: int, logprob: float, text: str) -> dict[str, Any]:
        special = token_id in self.model.vocabulary.special_ids
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": special}


def _mean_logprob(choice: Choice) -> float:
    return sum(finite(entry.logprob) for entry in choice.logprobs) / max(1, len(choice.logprobs))

"""KServe's two protocols, by TorchServe's routes `/v1/models/{model}:predict` and `/v2/models/{model}/infer`.

v1    `{"instances": [prompt | {"prompt": …, "max_tokens": …}, …]}` -> `{"predictions": [answer, …]}`
v2    (Open Inference Protocol) one input tensor, BYTES texts or INT64 token ids -> outputs `text_output`,
      `finish_reason` and, if asked for by name, `token_ids`

Neither streams. TorchServe does not say by which of its routes a request came: the body's form tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ifb_handler.api.answer import Answer, Asked, Choice, Part
from ifb_handler.api.errors import APIError, bad_field, shown
from ifb_handler.api.fields import Fields, names_no_length, section, text
from ifb_handler.api.limits import check_batch, check_tokens, handling
from ifb_handler.api.plain import one_answer
from ifb_handler.api.prompts import Prompt, TextPrompt, TokenPrompt, read_prompt
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import RequestOutput

_TEXT, _REASON, _TOKENS = "text_output", "finish_reason", "token_ids"
_OUTPUTS = (_TEXT, _REASON, _TOKENS)
# Behind a shorter answer's token ids, where a tensor must be rectangular.
PADDING = -1


def read_v1(fields: Fields, model: ServedModel) -> Asked:
    """Raises APIError or RequestError naming the field at fault."""
    instances = fields.get("instances")
    if not isinstance(instances, list) or not instances:
        raise bad_field("instances", f"{shown(instances)} is not a list of prompts")
    check_batch("instances", len(instances), model.config)
    common = section(fields, "parameters")
    whole = handling({**fields, **common}, model.config)
    read = [_instance(f"instances[{i}]", instance, common, model) for i, instance in enumerate(instances)]
    timeouts = [timeout for timeout in (whole["timeout"], *(own for _, own in read)) if timeout is not None]
    return Asked(parts=[part for part, _ in read], **whole | {"timeout": min(timeouts, default=None)})


def _instance(where: str, instance: object, common: dict[str, Any], model: ServedModel) -> tuple[Part, float | None]:
    """-> what is asked, and in how many seconds: the predictions come together, so the least of them holds for all."""
    own = instance if isinstance(instance, dict) else {"prompt": instance}
    fields = {**common, **own}
    prompt = read_prompt(own.get("prompt"), model, f"{where}.prompt")
    try:
        model.check_name(fields)
        params = one_answer({**fields, "stream": None}, model)
        own_handling = handling(own, model.config)
    except (APIError, ValueError) as error:
        raise _inside(where, APIError.of(error)) from None
    priority = own_handling["priority"] if own.get("priority") is not None else None
    part = Part(prompt, params, names_no_length(fields), priority, own_handling["cache_salt"])
    return part, own_handling["timeout"]


def _inside(where: str, error: APIError) -> APIError:
    """The error with the full name of its field."""
    param = f"{where}.{error.param}" if error.param else where
    return APIError(error.status, f"{where}.{error.message}", param=param, code=error.code)


class _KServeAnswer(Answer):
    """KServe's errors are a text."""

    @classmethod
    def error_body(cls, error: APIError) -> dict[str, Any]:
        return {"error": error.message} | ({} if error.retry_after is None else {"retry_after": error.retry_after})

    def _events(self, choice: Choice, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Never asked for: `Asked.stream` is False."""
        raise NotImplementedError


class V1Answer(_KServeAnswer):
    def _body(self) -> dict[str, Any]:
        return {"predictions": list(map(self._prediction, self.choices))}

    def _prediction(self, choice: Choice) -> dict[str, Any]:
        prompt, generated = len(self.prompt_token_ids[choice.part]), len(choice.token_ids)
        return {
            "text": "".join(choice.text),
            "token_ids": choice.token_ids,
            "finish_reason": str(choice.finish_reason),
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            },
        }


@dataclass(frozen=True, kw_only=True)
class V2Asked(Asked):
    """name       the client's own id of the request
    outputs    which tensors are wanted
    """

    name: str | None = None
    outputs: tuple[str, ...] = (_TEXT, _REASON)


def read_v2(fields: Fields, model: ServedModel) -> V2Asked:
    """Raises APIError or RequestError naming the field at fault."""
    inputs = fields.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1:
        raise bad_field("inputs", f"{shown(inputs)} is not a list of one tensor, BYTES texts or INT64 token ids")
    prompts = _tensor("inputs[0]", inputs[0], model)
    parameters = section(fields, "parameters")
    try:
        params = one_answer({**parameters, "stream": None}, model)
    except (APIError, ValueError) as error:
        raise _inside("parameters", APIError.of(error)) from None
    return V2Asked(
        parts=[Part(prompt, params, names_no_length(parameters)) for prompt in prompts],
        **handling({**fields, **parameters}, model.config),
        name=text(fields, "id"),
        outputs=_wanted(fields),
    )


def _tensor(where: str, tensor: object, model: ServedModel) -> Sequence[Prompt]:
    """One prompt for each text, or for each row of token ids."""
    if not isinstance(tensor, dict):
        raise bad_field(where, f"{shown(tensor)} is not a tensor with name, shape, datatype and data")
    if not text(tensor, "name", f"{where}.name"):
        raise bad_field(f"{where}.name", "is missing")
    shape, data = tensor.get("shape"), tensor.get("data")
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
        raise bad_field(f"{where}.shape", f"{shown(shape)} is not a list of sizes above 0")
    if not isinstance(data, list):
        raise bad_field(f"{where}.data", f"{shown(data)} is not a list")
    datatype = tensor.get("datatype")
    if datatype == "BYTES":
        return _texts(where, shape, data, model)
    if datatype == "INT64":
        return _rows(where, shape, data, model)
    raise bad_field(f"{where}.datatype", f"{shown(datatype)} is not BYTES (texts) or INT64 (token ids)")


def _texts(where: str, shape: list[int], data: list[Any], model: ServedModel) -> Sequence[Prompt]:
    if shape not in ([len(data)], [len(data), 1]):
        raise bad_field(f"{where}.shape", f"{shown(shape)} is not that of the data, [{len(data)}]")
    check_batch(where, len(data), model.config)
    for i, value in enumerate(data):
        if not isinstance(value, str) or not value:
            raise bad_field(f"{where}.data[{i}]", f"{shown(value)} is not a text")
    return [TextPrompt(value, f"{where}.data[{i}]") for i, value in enumerate(data)]


def _rows(where: str, shape: list[int], data: list[Any], model: ServedModel) -> Sequence[Prompt]:
    """Token ids in rows; the data may be nested as the shape says, or flat."""
    if len(shape) > 2:
        raise bad_field(f"{where}.shape", f"{shown(shape)} is not [tokens] or [prompts, tokens]")
    width = shape[-1]
    num_rows = shape[0] if len(shape) == 2 else 1
    # By their number first: a million of them would take long to walk.
    check_batch(where, num_rows, model.config)
    check_tokens(width, f"{where}.data", model)
    nested = bool(data) and isinstance(data[0], list)
    if len(data) != (num_rows if nested else num_rows * width) or (
        nested and any(not isinstance(row, list) or len(row) != width for row in data)
    ):
        what = f"{len(data)} {'rows' if nested else 'elements'}"
        raise bad_field(f"{where}.shape", f"{shown(shape)} is not that of the data, which has {what}")
    flat = [token for row in data for token in row] if nested else data
    for token in flat:
        if type(token) is not int:
            raise bad_field(f"{where}.data", f"{shown(token)} is not a token id")
    return [TokenPrompt(flat[i : i + width], f"{where}.data") for i in range(0, len(flat), width)]


def _wanted(fields: Fields) -> tuple[str, ...]:
    outputs = fields.get("outputs")
    if outputs is None or outputs == []:
        return (_TEXT, _REASON)
    if not isinstance(outputs, list):
        raise bad_field("outputs", f"{shown(outputs)} is not a list of tensors")
    names = []
    for i, output in enumerate(outputs):
        name = output.get("name") if isinstance(output, dict) else None
        if name not in _OUTPUTS:
            raise bad_field(f"outputs[{i}].name", f"{shown(name)} is not one of {', '.join(_OUTPUTS)}")
        names.append(name)
    return tuple(dict.fromkeys(names))


class V2Answer(_KServeAnswer):
    asked: V2Asked

    def _body(self) -> dict[str, Any]:
        tensors = {_TEXT: self._texts, _REASON: self._reasons, _TOKENS: self._tokens}
        return {
            "id": self.asked.name or self.id,
            "model_name": self.model.name,
            "outputs": [tensors[name]() for name in self.asked.outputs],
        }

    def _texts(self) -> dict[str, Any]:
        return _bytes(_TEXT, ["".join(choice.text) for choice in self.choices])

    def _reasons(self) -> dict[str, Any]:
        return _bytes(_REASON, [str(choice.finish_reason) for choice in self.choices])

    def _tokens(self) -> dict[str, Any]:
        """Rows of the longest answer's length, the others' padded with PADDING."""
        width = max(len(choice.token_ids) for choice in self.choices)
        flat = [
            token
            for choice in self.choices
            for token in (*choice.token_ids, *[PADDING] * (width - len(choice.token_ids)))
        ]
        return {"name": _TOKENS, "datatype": "INT64", "shape": [len(self.choices), width], "data": flat}


def _bytes(name: str, data: list[str]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data}

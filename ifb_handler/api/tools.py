"""`tools` and `tool_choice`: what a model may call, whether it must, and how its calls are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ifb_handler.api import structured_output
from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import Fields, flag, is_encodable, section, text
from ifb_handler.api.schema_references import moved
from ifb_handler.api.served_model import ServedModel
from ifb_handler.api.tool_calls import ARRAY, NamedCallReader, ToolCallReader, format_of

_NONE, _AUTO, _REQUIRED = "none", "auto", "required"

# For a model whose chat template has no place for tools: told in the words that Hermes' models were trained on.
_TOLD = """You may call one or more functions to help with the user's request. They are, as JSON schemas:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments>}}
</tool_call>"""


@dataclass(frozen=True)
class Tools:
    """definitions    as the client sent them and the template is given them
    choice         auto, required, or the name of the function that must be called
    parallel       more than one call may be made
    """

    definitions: list[dict[str, Any]]
    choice: str
    named: bool
    parallel: bool

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.definitions]

    def reader(self, template: str) -> ToolCallReader | NamedCallReader:
        """For one answer of a model with that chat template."""
        if self.named:
            return NamedCallReader(self.choice)
        must = self.choice == _REQUIRED
        form = ARRAY if must else format_of(template)
        return ToolCallReader(form, self.names, None if self.parallel else 1, only_calls=must)

    def structure(self) -> Any | None:
        """What the answer is held to when a call must be made (a StructuredOutput); None: nothing."""
        if self.named:
            chosen = next(tool for tool in self.definitions if tool["function"]["name"] == self.choice)
            return structured_output.of_schema(_parameters(chosen), "tool_choice")
        if self.choice == _REQUIRED:
            return structured_output.of_schema(_calls(self.definitions, self.parallel), "tool_choice")
        return None

    def told(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with a system message about the tools, for a template that has no place for them."""
        about = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.definitions))
        if messages[0]["role"] == "system":
            first, *rest = messages
            return [first | {"content": f"{first['content']}\n\n{about}"}, *rest]
        return [{"role": "system", "content": about}, *messages]


def read(fields: Fields) -> Tools | None:
    """None when there is nothing to call. Raises a 400 APIError naming the field at fault."""
    given = fields.get("tools")
    if given is not None and not isinstance(given, list):
        raise bad_field("tools", f"{shown(given)} is not a list of tools")
    definitions = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(given or ())]
    choice, named = _choice(fields, [tool["function"]["name"] for tool in definitions])
    parallel = flag(fields, "parallel_tool_calls", default=True)
    if choice == _NONE or not definitions:
        return None
    return Tools(definitions, choice, named, parallel)


def _tool(where: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_field(where, f'{shown(tool)} is not an object with "type": "function"')
    function = section(tool, "function", f"{where}.function")
    name = text(function, "name", f"{where}.function.name")
    if not name or len(name) > 128:
        raise bad_field(f"{where}.function.name", f"{shown(name)} is not a name of 1 to 128 characters")
    text(function, "description", f"{where}.function.description")
    section(function, "parameters", f"{where}.function.parameters")
    try:
        encodable = is_encodable(json.dumps(function, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise bad_field(f"{where}.function", f"cannot be written as JSON: {error}") from None
    if not encodable:
        raise bad_field(f"{where}.function", "holds half of a surrogate pair, which is no character")
    return tool


def _choice(fields: Fields, names: list[str]) -> tuple[str, bool]:
    """-> `tool_choice`, and whether it is a function's name."""
    value = fields.get("tool_choice")
    if value is None:
        return _AUTO, False
    if value in (_NONE, _AUTO):
        return value, False
    if not names:
        raise bad_field("tool_choice", f"{shown(value)} needs tools, and there are none")
    if value == _REQUIRED:
        return _REQUIRED, False
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise bad_field("tool_choice", f'{shown(value)} is not none, auto, required or {{"type": "function", …}}')
    if name not in names:
        raise bad_field("tool_choice.function.name", f"{shown(name)} is not one of the tools")
    return name, True


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _calls(tools: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls, with each tool's parameters in a place of their own."""
    places = {f"tool_{i}": tool for i, tool in enumerate(tools)}
    most = {} if parallel else {"maxItems": 1}
    try:
        parameters = {name: moved(_parameters(tool), f"#/$defs/{name}") for name, tool in places.items()}
    except RecursionError:
        raise bad_field("tools", "their parameters are nested too deeply") from None
    calls = [_call(tool, f"#/$defs/{name}") for name, tool in places.items()]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": parameters}


def _call(tool: dict[str, Any], parameters: str) -> dict[str, Any]:
    """The schema of a call of this tool, whose parameters' schema is to be found there."""
    properties = {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": parameters}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def template_of(model: ServedModel, tools: Tools | None) -> str:
    """The chat template that is used with these tools: some models have one of their own for it. Empty: none."""
    if not model.tokenizer.chat_template:
        return ""
    return model.tokenizer.get_chat_template(tools=tools and tools.definitions)

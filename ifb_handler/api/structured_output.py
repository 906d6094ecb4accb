"""The fields that ask for an answer of a certain form: OpenAI's `response_format`, vLLM's and TGI's of their own."""

from __future__ import annotations

import json
from typing import Any

from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import Fields, section, text

try:
    from ifb_handler.engine.structured import StructuredOutput
except ImportError:
    StructuredOutput = None  # type: ignore[assignment, misc]

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# vLLM's newer section `structured_outputs`, by the older names.
_SECTION = "structured_outputs"


def _held_to(kind: str, value: Any, where: str) -> StructuredOutput:
    if StructuredOutput is None:
        raise bad_field(where, "an answer of a certain form is not supported yet")
    return StructuredOutput(kind, value)


def read(fields: Fields) -> StructuredOutput | None:
    """Raises a 400 APIError for a form that cannot be, or for two of them."""
    found = [given for given in (_response_format(fields), *_guided(fields)) if given is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise bad_field(found[1][0], f"{names} both ask for a form of the answer; give one")
    return found[0][1] if found else None


def of_schema(schema: dict[str, Any], where: str) -> StructuredOutput:
    return _held_to("json_schema", schema, where)


def grammar(fields: Fields, name: str, where: str) -> StructuredOutput | None:
    """TGI's `{"type": "json" | "regex" | "json_schema", "value": …}`."""
    form = section(fields, name, where)
    if not form:
        return None
    kind, value = form.get("type"), form.get("value")
    if kind == "regex":
        return _held_to("regex", _text(form, "value", f"{where}.value"), where)
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if kind in ("json", "json_object", "json_schema"):
        return _held_to("json_schema", _schema(value, f"{where}.value"), where)
    raise bad_field(f"{where}.type", f"{shown(kind)} is not json, json_schema or regex")


def _response_format(fields: Fields) -> tuple[str, StructuredOutput] | None:
    name = "response_format"
    form = section(fields, name)
    kind = form.get("type")
    if not form or kind == "text":
        return None
    if "value" in form:  # as TGI's clients send it
        found = grammar(fields, name, name)
        return None if found is None else (name, found)
    if kind == "json_object":
        return name, _held_to("json_object", None, name)
    if kind == "json_schema":
        where = f"{name}.json_schema"
        inner = section(form, "json_schema", where)
        return name, _held_to("json_schema", _schema(inner.get("schema"), f"{where}.schema"), where)
    raise bad_field(f"{name}.type", f"{shown(kind)} is not text, json_object or json_schema")


def _guided(fields: Fields) -> list[tuple[str, StructuredOutput]]:
    inner = section(fields, _SECTION)
    found = []
    for name, kind in _GUIDED.items():
        for where, value in ((name, fields.get(name)), (f"{_SECTION}.{name[7:]}", inner.get(name[7:]))):
            if value is not None:
                found.append((where, _held_to(kind, _value(kind, value, where), where)))
    if inner.get("json_object"):
        where = f"{_SECTION}.json_object"
        found.append((where, _held_to("json_object", None, where)))
    return found


def _value(kind: str, value: Any, where: str) -> Any:
    if kind == "json_schema":
        return _schema(value, where)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise bad_field(where, f"{shown(value)} is not a list of texts to choose from")
        return [_text({where: each}, where, where) for each in value]
    return _text({where: value}, where, where)


def _schema(value: Any, where: str) -> Any:
    """An object, or the text of one; true and false are schemas, too, but say nothing of use."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_field(where, f"{shown(value)} is not the text of a JSON schema") from None
    if not isinstance(value, dict):
        raise bad_field(where, f"{shown(value)} is not a JSON schema")
    return value


def _text(fields: Fields, name: str, where: str) -> str:
    value = text(fields, name, where)
    if not value:
        raise bad_field(where, f"{shown(value)} is not a text to be matched")
    return value

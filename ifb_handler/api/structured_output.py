"""The fields that ask for an answer of a certain form: OpenAI's `response_format`, vLLM's and TGI's of their own."""

from __future__ import annotations

import json
from typing import Any

from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import Fields, section
from ifb_handler.engine.structured import StructuredOutput

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# vLLM's newer section `structured_outputs` has the same without `guided_`.
_SECTION = "structured_outputs"


def read(fields: Fields) -> StructuredOutput | None:
    """Raises APIError or RequestError for a form that cannot be, or for two of them."""
    found = [form for form in (_response_format(fields), *_guided(fields)) if form is not None]
    if len(found) > 1:
        raise bad_field(found[1].field, f"and {found[0].field} both ask for a form of the answer; give one")
    return found[0] if found else None


def of_schema(schema: dict[str, Any], where: str) -> StructuredOutput:
    return _form("json_schema", schema, where)


def grammar(fields: Fields, name: str, where: str) -> StructuredOutput | None:
    """TGI's `{"type": "json" | "json_schema" | "regex", "value": …}`."""
    form = section(fields, name, where)
    if not form:
        return None
    kind, value = form.get("type"), form.get("value")
    if kind == "regex":
        return _form("regex", value, f"{where}.value")
    if kind == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if kind in ("json", "json_object", "json_schema"):
        return _form("json_schema", value, f"{where}.value")
    raise bad_field(f"{where}.type", f"{shown(kind)} is not json, json_schema or regex")


def _response_format(fields: Fields) -> StructuredOutput | None:
    name = "response_format"
    form = section(fields, name)
    kind = form.get("type")
    if not form or kind == "text":
        return None
    if "value" in form:  # as Hugging Face's client sends it
        return grammar(fields, name, name)
    if kind == "json_object":
        return _form("json_object", None, name)
    if kind == "json_schema":
        where = f"{name}.json_schema"
        return _form("json_schema", section(form, "json_schema", where).get("schema"), f"{where}.schema")
    raise bad_field(f"{name}.type", f"{shown(kind)} is not text, json_object or json_schema")


def _guided(fields: Fields) -> list[StructuredOutput]:
    inner = section(fields, _SECTION)
    found = []
    for name, kind in _GUIDED.items():
        short = name.removeprefix("guided_")
        for where, value in ((name, fields.get(name)), (f"{_SECTION}.{short}", inner.get(short))):
            if value is not None:
                found.append(_form(kind, value, where))
    if inner.get("json_object"):
        found.append(_form("json_object", None, f"{_SECTION}.json_object"))
    return found


def _form(kind: str, value: Any, where: str) -> StructuredOutput:
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_field(where, f"{shown(value)} is not the text of a JSON schema") from None
    return StructuredOutput(kind, value, where)

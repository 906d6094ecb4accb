"""From what TorchServe hands over to a plain dict of fields.

TorchServe decodes by content type: `application/json` arrives as the decoded value (bytes when it does not parse),
`text/*` as str, anything else as bytes, a form as its fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ifb_handler.api.errors import APIError

RAW_TEXT_FIELD = "prompt"
_TEXT_FIELDS = (RAW_TEXT_FIELD, "stop", "model")
_BODY_NAMES = ("body", "data")


def read_fields(parts: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object's fields, or those of a form (values decoded where they are JSON). Raises a 400 APIError."""
    if not _is_whole(parts):
        return _form(parts)
    (whole,) = parts.values()
    fields = _json(whole) if isinstance(whole, (str, bytes, bytearray)) else whole
    if fields is None:
        raise APIError(400, "the body is null, not an object")
    if not isinstance(fields, dict):
        raise APIError(400, f"the body is a JSON {_json_type(fields)}; it must be an object")
    return fields


def read_fields_or_text(parts: Mapping[str, Any]) -> dict[str, Any]:
    """As `read_fields`, but a body that is no JSON object is a prompt as it stands (`curl -T prompt.txt`)."""
    whole = next(iter(parts.values()), None)
    if _is_whole(parts) and isinstance(whole, (str, bytes, bytearray)):
        text = _text(whole)
        if not text.lstrip().startswith("{"):
            return {RAW_TEXT_FIELD: text}
    return read_fields(parts)


def _is_whole(parts: Mapping[str, Any]) -> bool:
    """Whether the body came in one piece; if not, it is a form."""
    return len(parts) == 1 and next(iter(parts)) in _BODY_NAMES


def _form(parts: Mapping[str, Any]) -> dict[str, Any]:
    # What `curl -d '{...}'` sends without a content type. TorchServe's form decoder drops a text without `=` or `&`,
    # cuts one that has them, and turns `+` into a space: there is no telling what was sent.
    if not parts or next(iter(parts)).lstrip().startswith("{"):
        raise APIError(
            400,
            "the body was read as a form, which it is not: send JSON with the header `Content-Type: application/json`, "
            "a text with `Content-Type: text/plain` or with `curl -T`",
            code="not_a_form",
        )
    return {name: _form_value(name, _text(value)) for name, value in parts.items()}


def _form_value(name: str, text: str) -> Any:
    """Form values carry no types: what reads as a JSON value is one, but a text field is a text unless it is a list."""
    if name in _TEXT_FIELDS and not text.lstrip().startswith("["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(value: Any) -> str:
    """Without the byte order mark that some editors put before it."""
    if isinstance(value, (bytes, bytearray)):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise APIError(400, f"the body is not UTF-8: byte {error.start} is 0x{value[error.start]:02x}") from None
    return value.removeprefix("\ufeff") if isinstance(value, str) else json.dumps(value)


def _json(raw: str | bytes | bytearray) -> Any:
    text = _text(raw)
    if not text.strip():
        raise APIError(400, "the body is empty; it must be a JSON object")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise APIError(400, f"the body is not JSON: {error.msg} at {where}", code="invalid_json") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or nesting as deep
        raise APIError(400, f"the body is not JSON that can be read: {error}", code="invalid_json") from None


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)

"""JSON schemas that are put into another one: their references to themselves must still lead to them."""

from __future__ import annotations

from typing import Any

# What these hold is schemas by name, and a name may be any word ...
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# ... and what these hold is data.
_DATA = ("const", "enum", "default", "examples")
# At a schema's root: what it is called and written in, which says where references start.
_OWN_ROOT = ("$id", "$schema")


def moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema to be put at `place`, such as `#/$defs/name`, of another. Raises RecursionError for one too deep."""
    return {name: value for name, value in _schema(schema, place).items() if name not in _OWN_ROOT}


def _schema(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_schema(each, place) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _keyword(key, held, place) for key, held in value.items()}


def _keyword(key: str, held: Any, place: str) -> Any:
    if key == "$ref" and isinstance(held, str):
        return place + held[1:] if held == "#" or held.startswith("#/") else held
    if key in _DATA:
        return held
    if key in _BY_NAME and isinstance(held, dict):
        return {name: _schema(each, place) for name, each in held.items()}
    return _schema(held, place)

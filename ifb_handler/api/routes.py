"""From the path after `/predictions/{model}/{version}/` to what answers it. TorchServe does not say the HTTP method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifb_handler.api import engine_info, kserve, openai_chat, openai_completions, openai_models, plain, tgi
from ifb_handler.api.answer import Answer, Asked
from ifb_handler.api.body import read_fields, read_fields_or_text
from ifb_handler.api.errors import APIError, shown
from ifb_handler.api.fields import Fields
from ifb_handler.api.served_model import ServedModel

if TYPE_CHECKING:
    from ifb_handler.engine.engine import Engine


@dataclass(frozen=True)
class Generation:
    """A route that generates: how its body is read, and the answer's form."""

    method: str
    read: Callable[[Fields, ServedModel], Asked]
    answer: type[Answer]
    read_body: Callable[[Mapping[str, Any]], dict[str, Any]] = read_fields


@dataclass(frozen=True)
class Information:
    """A route answered at once. `respond` is given engine, model, the rest of the path and the body's fields."""

    method: str
    respond: Callable[[Engine, ServedModel, str, Fields], dict[str, Any]]


@dataclass(frozen=True)
class Cancellation:
    """The route that ends other requests: only whoever holds them can."""

    method: str


Route = Generation | Information | Cancellation

_PLAIN = Generation("POST", plain.read, plain.PlainAnswer, read_fields_or_text)
_TGI = Generation("POST", tgi.read, tgi.TGIAnswer)
_KSERVE_V1 = Generation("POST", kserve.read_v1, kserve.V1Answer)
_KSERVE_V2 = Generation("POST", kserve.read_v2, kserve.V2Answer)

_EXACT: dict[str, Route] = {
    "": _PLAIN,
    "v1/completions": Generation("POST", openai_completions.read, openai_completions.CompletionAnswer),
    "v1/chat/completions": Generation("POST", openai_chat.read, openai_chat.ChatAnswer),
    "v1/cancel": Cancellation("POST"),
    "v1/models": Information("GET", lambda engine, model, rest, fields: openai_models.listing(model)),
    "generate": Generation("POST", tgi.read_one_shot, tgi.TGIAnswer),
    "generate_stream": Generation("POST", tgi.read_stream, tgi.TGIAnswer),
    "info": Information("GET", lambda engine, model, rest, fields: tgi.info(model)),
    "health": Information("GET", lambda engine, model, rest, fields: engine_info.health(engine)),
    "engine/stats": Information("GET", lambda engine, model, rest, fields: engine_info.stats(engine)),
    "engine/steps": Information("GET", lambda engine, model, rest, fields: engine_info.steps(engine, "", fields)),
}
_PREFIXES: dict[str, Route] = {
    "v1/models/": Information("GET", lambda engine, model, rest, fields: openai_models.card(model, rest)),
    "engine/steps/": Information("GET", lambda engine, model, rest, fields: engine_info.steps(engine, rest, fields)),
}


# What a client may well ask for, and why it is not there.
_NOT_SERVED = {"v1/embeddings": "this model generates text; it has no embeddings"}


def find(path: str) -> tuple[Route, str]:
    """-> the route and what the path holds beyond it. Raises a 404 APIError that lists the routes."""
    path = path.strip("/")
    if path in _EXACT:
        return _EXACT[path], ""
    for prefix, route in _PREFIXES.items():
        if path.startswith(prefix):
            return route, path.removeprefix(prefix)
    listed = [f"{route.method} {name or '(the bare path)'}" for name, route in _EXACT.items()]
    what = _NOT_SERVED.get(path, f"no route {shown(path)}")
    raise APIError(404, f"{what}; the routes are {', '.join(listed)}", code="unknown_route")


def by_body(route: Generation, fields: Fields) -> Generation:
    """The bare path serves several protocols: KServe's, because TorchServe does not say by which of its paths a request
    came, and TGI's, because Hugging Face's client posts to the address it is given. What the body holds tells which."""
    if route is not _PLAIN:
        return route
    if "instances" in fields:
        return _KSERVE_V1
    if "inputs" in fields:
        return _KSERVE_V2 if isinstance(fields["inputs"], list) else _TGI
    return route


def inform(
    route: Information, rest: str, parts: Mapping[str, Any], engine: Engine, model: ServedModel
) -> dict[str, Any]:
    """Answer an information route; a body is not needed."""
    fields = read_fields(parts) if any(parts.values()) else {}
    return route.respond(engine, model, rest, fields)

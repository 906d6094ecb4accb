"""What a client sends, read into a request or refused with the field at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import write_tokenizer

from ifb_handler.api import routes
from ifb_handler.api.answer import Asked
from ifb_handler.api.body import read_fields, read_fields_or_text
from ifb_handler.api.errors import APIError
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    config = EngineConfig(default_max_tokens=24)
    return ServedModel("tiny", tokenizer, 512, len(tokenizer), config, aliases=("registered",))


def ask(model: ServedModel, path: str, parts: dict[str, Any]) -> Asked:
    route, _ = routes.find(path)
    assert isinstance(route, routes.Generation)
    fields = route.read_body(parts)
    return routes.by_body(route, fields).read(fields, model)


def params(asked: Asked) -> SamplingParams:
    (part,) = asked.parts
    return part.params


def token_ids(model: ServedModel, path: str, body: dict[str, Any]) -> list[int]:
    (ids,) = ask(model, path, {"body": body}).token_ids(model)
    return ids


def refusal(model: ServedModel, path: str, body: dict[str, Any]) -> APIError:
    try:
        asked = ask(model, path, {"body": body})
        asked.check_sizes(model)
        asked.token_ids(model)
    except (APIError, RequestError) as error:
        return APIError.of(error)
    raise AssertionError(f"{body} was accepted")


def test_a_json_body_is_read_into_sampling_parameters(model: ServedModel) -> None:
    body = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 3,
        "stop": "END",
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "somebody",
        "a_field_of_next_year": {"deep": 1},
    }
    asked = ask(model, "v1/completions", {"body": body})
    assert params(asked) == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=3,
        stop=("END",),
        stop_token_ids=(5,),
        ignore_eos=True,
        min_tokens=2,
    )
    assert (asked.stream, asked.include_usage) == (True, True)


def test_a_best_of_that_would_be_streamed_is_refused_whatever_n_is(model: ServedModel) -> None:
    for n, param in ((1, "best_of"), ("two", "n")):
        body = {"prompt": "hello", "n": n, "best_of": 3, "stream": True}
        assert refusal(model, "v1/completions", body).param == param


def test_null_means_not_given(model: ServedModel) -> None:
    body = {"prompt": "hello", "max_tokens": None, "temperature": None, "stop": None, "stream": None, "n": None}
    asked = ask(model, "v1/completions", {"body": body})
    assert params(asked) == SamplingParams(max_tokens=16)
    assert not asked.stream


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("v1/completions", {"prompt": "a"}, 16),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9}, 9),
        ("", {"prompt": "a"}, 24),
    ],
)
def test_each_route_has_its_own_limit_when_none_is_given(
    model: ServedModel, path: str, body: dict[str, Any], expected: int | None
) -> None:
    assert params(ask(model, path, {"body": body})).max_tokens == expected


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", 5),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [10**6]),
        ("prompt", [-1]),
        ("prompt", "\ud800"),
        ("prompt", "x" * 3_000_000),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 5.5),
        ("max_tokens", "many"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 3),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", float("nan")),
        ("stop", [""]),
        ("stop", 4),
        ("seed", -1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("best_of", 0),
        ("use_beam_search", "yes"),
        ("length_penalty", 0.5),
        ("early_stopping", "always"),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", 1),
        ("suffix", "the end"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [5]),
        ("truncate_prompt_tokens", 0),
        ("prompt_logprobs", "all"),
        ("timeout", 0),
        ("timeout", float("inf")),
        ("timeout", 10**400),
        ("priority", "high"),
        ("priority", True),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
    ],
)
def test_a_bad_value_is_a_400_that_names_its_field(model: ServedModel, param: str, value: Any) -> None:
    error = refusal(model, "v1/completions", {"prompt": "hello", param: value})
    assert error.status == 400
    assert error.param == param
    assert param in error.message
    assert error.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"best_of": 1},
        {"echo": False},
        {"logprobs": None},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"suffix": None},
        {"priority": 3},
    ],
)
def test_a_field_whose_value_changes_nothing_is_accepted(model: ServedModel, neutral: dict[str, Any]) -> None:
    ask(model, "v1/completions", {"body": {"prompt": "hello", **neutral}})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
    ],
)
def test_every_way_to_ask_for_a_form_is_understood(
    model: ServedModel, fields: dict[str, Any], kind: str, value: Any
) -> None:
    form = params(ask(model, "v1/completions", {"body": {"prompt": "hello", **fields}})).structured
    assert form is not None
    assert (form.kind, form.value) == (kind, value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_a_form_that_cannot_be_is_a_400_that_names_its_field(
    model: ServedModel, fields: dict[str, Any], param: str
) -> None:
    error = refusal(model, "v1/completions", {"prompt": "hello", **fields})
    assert (error.status, error.param) == (400, param)


def test_a_prompt_may_be_token_ids_or_a_list_of_one(model: ServedModel) -> None:
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        assert token_ids(model, "v1/completions", {"prompt": prompt}) == [5, 6, 7]
    assert token_ids(model, "v1/completions", {"prompt": ["the fox"]}) == model.tokenizer("the fox").input_ids


def test_a_completion_prompt_gets_the_tokenizers_own_special_tokens(model: ServedModel) -> None:
    ids = token_ids(model, "", {"prompt": "the fox"})
    assert ids == model.tokenizer("the fox").input_ids
    assert ids[0] == model.tokenizer.bos_token_id


def test_a_chat_is_laid_out_by_the_models_template_with_one_bos(model: ServedModel) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello fox"}]
    ids = token_ids(model, "v1/chat/completions", {"messages": messages})
    oracle = model.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids == oracle
    assert ids.count(model.tokenizer.bos_token_id) == 1


def test_text_parts_are_joined(model: ServedModel) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " fox"}]
    in_parts = ask(model, "v1/chat/completions", {"body": {"messages": [{"role": "user", "content": parts}]}})
    in_one = ask(model, "v1/chat/completions", {"body": {"messages": [{"role": "user", "content": "hello fox"}]}})
    assert in_parts.parts == in_one.parts


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "wizard", "content": "a"}], "messages"),
        ([{"role": "user", "content": "x" * 3_000_000}], "messages"),
    ],
)
def test_messages_that_cannot_be_laid_out_are_a_400(model: ServedModel, messages: Any, param: str) -> None:
    error = refusal(model, "v1/chat/completions", {"messages": messages})
    assert (error.status, error.param) == (400, param)


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, chat_template=False)
    model = ServedModel("bare", tokenizer, 512, len(tokenizer))
    error = refusal(model, "v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert (error.status, error.code) == (400, "no_chat_template")


def test_another_models_name_is_a_404_and_the_registered_name_is_not(model: ServedModel) -> None:
    assert refusal(model, "v1/completions", {"prompt": "a", "model": "gpt-9"}).code == "model_not_found"
    ask(model, "v1/completions", {"body": {"prompt": "a", "model": "registered"}})


def test_the_bound_on_tokens_never_exceeds_the_tokens(model: ServedModel) -> None:
    for text in (
        "a",
        "the quick brown fox",
        "zwölf Boxkämpfer",
        "\n" * 50,
        "日本語のテキスト",
        "In-flight batching " * 9,
    ):
        ids = model.tokenizer(text, add_special_tokens=False).input_ids
        assert 1 <= model.fewest_tokens(len(text)) <= len(ids)


@pytest.mark.parametrize(
    "parts",
    [
        {"body": bytearray(b"the fox & the dog")},
        {"body": "the fox & the dog"},
        {"data": bytearray(b"the fox & the dog")},
        {"prompt": bytearray(b"the fox & the dog")},
        {"body": {"prompt": "the fox & the dog"}},
        {"body": bytearray(b'{"prompt": "the fox & the dog"}')},
    ],
    ids=["raw bytes", "text", "data part", "form", "json", "json as bytes"],
)
def test_every_way_of_sending_a_plain_prompt_is_understood(model: ServedModel, parts: dict[str, Any]) -> None:
    assert ask(model, "", parts) == ask(model, "", {"body": {"prompt": "the fox & the dog"}})


def test_form_fields_have_the_types_of_their_json_values(model: ServedModel) -> None:
    form = {
        "prompt": bytearray(b"12"),
        "max_tokens": bytearray(b"8"),
        "temperature": bytearray(b"0"),
        "stream": bytearray(b"true"),
        "stop": bytearray(b"3"),
    }
    typed = {"prompt": "12", "max_tokens": 8, "temperature": 0, "stream": True, "stop": "3"}
    assert ask(model, "", form) == ask(model, "", {"body": typed})


@pytest.mark.parametrize("parts", [{}, {'{"prompt": "a': bytearray(b'b"}')}], ids=["all of it lost", "cut at ="])
def test_json_that_was_taken_for_a_form_is_refused_with_a_hint(parts: dict[str, Any]) -> None:
    for read in (read_fields, read_fields_or_text):
        with pytest.raises(APIError, match="Content-Type: application/json") as caught:
            read(parts)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b'{"prompt": "a",}', "line 1 column 16"),
        (b'{"prompt":\n nope}', "line 2 column 2"),
        (b"", "empty"),
        (b"[1, 2]", "array"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
        (b'{"prompt": "\xff"}', "byte 12"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_a_400_that_says_where(raw: bytes, where: str) -> None:
    with pytest.raises(APIError) as caught:
        read_fields({"body": bytearray(raw)})
    assert caught.value.status == 400
    assert where in caught.value.message


def test_no_body_at_all_is_an_empty_one() -> None:
    with pytest.raises(APIError, match="empty"):
        read_fields({"body": bytearray()})
    assert read_fields_or_text({"body": bytearray()}) == {"prompt": ""}


def test_an_unknown_route_is_a_404_that_lists_the_routes() -> None:
    with pytest.raises(APIError) as caught:
        routes.find("v1/embeddings")
    assert caught.value.status == 404
    assert "POST v1/chat/completions" in caught.value.message
    assert "GET v1/models" in caught.value.message


@pytest.mark.parametrize(
    "long",
    [
        {"messages": [{"role": "x" * 100_000, "content": "a"}]},
        {"messages": [{"role": "user", "name": "x" * 100_000, "content": "a"}]},
        {"messages": [{"role": "user", "content": ""}] * 20_000},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x" * 10**5}}}]}
            ]
        },
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}],
        },
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"system": "x" * 100_000}},
    ],
)
def test_all_that_a_chat_template_may_write_out_is_counted_before_it_is(
    model: ServedModel, long: dict[str, Any]
) -> None:
    asked = ask(model, "v1/chat/completions", {"body": long})
    assert asked.characters >= 100_000
    with pytest.raises(APIError) as refused:
        asked.check_sizes(model)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert refused.value.code == "context_length_exceeded"


def test_too_many_rivals_are_refused_by_the_name_they_were_asked_for(model: ServedModel) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21}
    assert refusal(model, "v1/chat/completions", body).param == "top_logprobs"


def test_a_byte_order_mark_before_a_body_is_no_part_of_it() -> None:
    marked = b'\xef\xbb\xbf{"prompt": "a"}'
    for body in (marked, marked.decode()):
        assert read_fields_or_text({"body": body}) == read_fields({"body": body}) == {"prompt": "a"}
    assert read_fields_or_text({"body": b"\xef\xbb\xbfthe fox"}) == {"prompt": "the fox"}


@pytest.mark.parametrize(("read", "body"), [(read_fields, None), (read_fields, b" null"), (read_fields_or_text, None)])
def test_a_body_that_is_null_is_called_so(read: Callable[..., Any], body: Any) -> None:
    with pytest.raises(APIError, match=r"^the body is null, not an object$"):
        read({"body": body})

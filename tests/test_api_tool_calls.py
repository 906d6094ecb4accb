"""Tool calls: what a model is told of tools, and its calls read back from text however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tiny_llama import write_tokenizer

from ifb_handler.api import openai_chat
from ifb_handler.api.errors import APIError
from ifb_handler.api.openai_chat import ChatAnswer
from ifb_handler.api.served_model import ServedModel
from ifb_handler.api.tool_calls import ARRAY, HERMES, LLAMA3_JSON, CallDelta, Format, ToolCallReader, format_of
from ifb_handler.engine.outputs import FinishReason, RequestOutput

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
NAMES = ("weather", "time")
QUESTION = [{"role": "user", "content": "What is the weather in Köln?"}]
ARGUMENTS = '{"city": "Köln {[\\"]", "days": [1, {"a": 2}]}'

# Qwen's way of telling and remembering tools, in short.
HERMES_TEMPLATE = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call: <tool_call>…</tool_call>\n"
    "{% endif %}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}\n"
    "{% endfor %}[assistant] "
)


def model_with(folder: Any, template: str | None) -> ServedModel:
    tokenizer = write_tokenizer(folder, chat_template=template is None)
    if template is not None:
        tokenizer.chat_template = template
    return ServedModel("tiny", tokenizer, 4096, len(tokenizer))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return model_with(tmp_path_factory.mktemp("hermes"), HERMES_TEMPLATE)


@pytest.fixture(scope="module")
def toolless(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model whose template has no place for tools."""
    return model_with(tmp_path_factory.mktemp("toolless"), None)


def prompt_of(model: ServedModel, **body: Any) -> str:
    asked = openai_chat.read({"messages": QUESTION, "tools": [WEATHER, TIME], **body}, model)
    (ids,) = asked.token_ids(model)
    return model.tokenizer.decode(ids)


def answered(model: ServedModel, pieces: list[str], reason: FinishReason = FinishReason.STOP, **body: Any) -> Any:
    """The message, or the chunks, when the model writes these pieces."""
    asked = openai_chat.read({"messages": QUESTION, "tools": [WEATHER, TIME], **body}, model)
    answer = ChatAnswer(asked, "r", model)
    answer.requests([[5, 6]])
    outputs = [RequestOutput("r", piece, [i]) for i, piece in enumerate(pieces)]
    outputs[-1].finish_reason = reason
    if asked.stream:
        text = "".join(answer.stream([output]) for output in outputs)
        bodies = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert bodies.pop() == "[DONE]"
        return [ChatCompletionChunk.model_validate_json(event) for event in bodies]
    for output in outputs:
        answer.add(output)
    return ChatCompletion.model_validate_json(answer.whole()).choices[0]


def read(form: Format, pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """-> all text, and all calls."""
    reader = ToolCallReader(form, NAMES, max_calls)
    text, deltas = "", []
    for step in (*(lambda piece=piece: reader.push(piece) for piece in pieces), reader.flush):
        more_text, more = step()
        text, deltas = text + more_text, deltas + more
    return text, calls_of(deltas)


def calls_of(deltas: list[CallDelta]) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.call_id
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        calls[delta.index][1] += delta.arguments
    return [(name, arguments) for name, arguments in calls]


HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CASES: list[tuple[Format, str, str, list[tuple[str, str]]]] = [
    (HERMES, HERMES_CALL, "", [("weather", ARGUMENTS)]),
    (HERMES, f"Let me look. \n{HERMES_CALL}\n", "Let me look.", [("weather", ARGUMENTS)]),
    (
        HERMES,
        f'{HERMES_CALL}\n<tool_call>{{"name":"time","arguments":{{}}}}</tool_call>',
        "",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"city": "Bonn"}, "name": "weather"}</tool_call>',
        "",
        [("weather", '{"city": "Bonn"}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>',
        "",
        [("weather", '{"city": 1}')],
    ),
    (HERMES, '<tool_call>{"type": "function", "function": {"name": "time"}}</tool_call>', "", [("time", "{}")]),
    (HERMES, "5 < 6 and <tool> and <tool_calls> ", "5 < 6 and <tool> and <tool_calls> ", []),
    (HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Kö', "", [("weather", '{"city": "Kö')]),
    (HERMES, '{"name": "weather", "arguments": {}}', '{"name": "weather", "arguments": {}}', []),
    (LLAMA3_JSON, f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [("weather", ARGUMENTS)]),
    (LLAMA3_JSON, '<|python_tag|>{"name": "time", "parameters": {}}', "", [("time", "{}")]),
    (
        LLAMA3_JSON,
        '{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "x"}}',
        "",
        [("time", "{}"), ("weather", '{"city": "x"}')],
    ),
    (LLAMA3_JSON, '{"type": "function", "name": "time", "parameters": {}}', "", [("time", "{}")]),
    (LLAMA3_JSON, '  {"answer": {"name": "weather"}}', '  {"answer": {"name": "weather"}}', []),
    (LLAMA3_JSON, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    (LLAMA3_JSON, 'See {"name": "time", "parameters": {}}', 'See {"name": "time", "parameters": {}}', []),
    (LLAMA3_JSON, "{ x", "{ x", []),
    (LLAMA3_JSON, "<|python", "<|python", []),
    (
        ARRAY,
        f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time", "arguments": {{}}}}]',
        "",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    (ARRAY, '[TOOL_CALLS] [{"name": "time", "arguments": {}}]', "", [("time", "{}")]),
    (ARRAY, "[1, 2]", "[1, 2]", []),
    (ARRAY, "[TOOL", "[TOOL", []),
]


@pytest.mark.parametrize(("form", "written", "text", "calls"), CASES)
def test_calls_are_read_and_what_is_no_call_is_text(
    form: Format, written: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert read(form, [written]) == (text, calls)
    assert read(form, list(written)) == (text, calls)


_PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "weather", ',
        '"arguments": ',
        '"parameters": ',
        '{"city": "K"}',
        "}",
        "{",
        '{"name": "time"}',
        '"',
        "[",
        "]",
        ", ",
        ";",
        " ",
        "\n",
        "<",
        "tool",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "\\",
        "text",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([HERMES, LLAMA3_JSON, ARRAY]), st.lists(_PIECES, max_size=14), st.randoms(use_true_random=False))
@example(HERMES, ["<tool_call>", "<tool_call>", '{"name": "weather", ', '"arguments": ', '{"city": "K"}', "}"], None)
def test_how_the_text_is_cut_changes_nothing(form: Format, pieces: list[str], source: Any) -> None:
    written = "".join(pieces)
    cut, at = [], 0
    while at < len(written):
        size = source.randint(1, 7) if source else 1
        cut.append(written[at : at + size])
        at += size
    assert read(form, cut) == read(form, [written])


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    reader = ToolCallReader(HERMES, NAMES)
    assert [reader.push(piece)[0] for piece in ("a <", "tool", "box> b", "<b", "> ", "c")] == [
        "a",
        "",
        " <toolbox> b",
        "<b",
        ">",
        " c",
    ]


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = ToolCallReader(HERMES, NAMES)
    told = [
        reader.push(piece)[1]
        for piece in ('<tool_call>{"name": "weather", "arg', 'uments": {"ci', 'ty"', ': "x"}', "}")
    ]
    assert [[(delta.name, delta.arguments) for delta in deltas] for deltas in told] == [
        [],
        [("weather", '{"ci')],
        [(None, 'ty"')],
        [(None, ': "x"}')],
        [],
    ]


def test_further_calls_are_dropped_when_they_may_not_be_parallel() -> None:
    both = f'{HERMES_CALL}<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>'
    assert read(HERMES, [both], max_calls=1) == ("", [("weather", ARGUMENTS)])


def test_a_template_tells_the_form_of_its_models_calls() -> None:
    assert format_of(HERMES_TEMPLATE) is HERMES
    assert format_of("{{ '<|python_tag|>' }}") is LLAMA3_JSON
    assert format_of("{{ '[TOOL_CALLS]' }}") is ARRAY


# In a chat


def test_a_call_is_answered_as_the_official_client_reads_it(hermes: ServedModel) -> None:
    choice = answered(hermes, ["Well.", HERMES_CALL])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments)["city"] == 'Köln {["]'


def test_a_streamed_call_comes_in_deltas_that_add_up(hermes: ServedModel) -> None:
    chunks = answered(hermes, list("Well." + HERMES_CALL), stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["weather"] + [None] * (len(calls) - 1)
    assert calls[0].id
    assert all(call.id is None for call in calls[1:])
    assert "".join(call.function.arguments for call in calls) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_without_a_call_is_text(hermes: ServedModel) -> None:
    choice = answered(hermes, ["It is ", "sunny."])
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "It is sunny.", None)


def test_a_call_cut_short_by_the_limit_says_length(hermes: ServedModel) -> None:
    choice = answered(hermes, [HERMES_CALL[:50]], FinishReason.LENGTH)
    assert choice.finish_reason == "length"


def test_tools_are_not_told_nor_read_with_tool_choice_none(hermes: ServedModel) -> None:
    assert "# Tools" not in prompt_of(hermes, tool_choice="none")
    choice = answered(hermes, [HERMES_CALL], tool_choice="none")
    assert (choice.finish_reason, choice.message.content) == ("stop", HERMES_CALL)


def test_the_template_is_given_the_tools(hermes: ServedModel) -> None:
    expected = hermes.tokenizer.apply_chat_template(
        QUESTION, tools=[WEATHER, TIME], tokenize=False, add_generation_prompt=True
    )
    assert prompt_of(hermes) == expected
    assert '"weather"' in expected


def test_a_template_without_a_place_for_tools_gets_them_in_a_system_message(toolless: ServedModel) -> None:
    told = prompt_of(toolless)
    assert "[system] " in told
    assert '"name": "weather"' in told
    both = prompt_of(toolless, messages=[{"role": "system", "content": "Be brief."}, *QUESTION])
    assert both.index("Be brief.") < both.index('"name": "weather"') < both.index("[user]")


def test_earlier_calls_reach_the_template_with_their_arguments_as_objects(hermes: ServedModel) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    told = prompt_of(hermes, messages=messages)
    assert "<tool_call>Bonn</tool_call>" in told
    assert "[tool] sunny" in told


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": float("nan")}}]}, "tools[0].function"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_a_400_that_names_the_part(
    hermes: ServedModel, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(APIError) as caught:
        openai_chat.read({"messages": QUESTION, "tools": [WEATHER, TIME], **body}, hermes)
    assert (caught.value.status, caught.value.param) == (400, param)


TREE = {
    "type": "object",
    "$id": "https://example.com/tree",
    "properties": {
        "leaf": {"$ref": "#/$defs/Leaf"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "const": {"$ref": "#/definitions/Flag"},
        "kind": {"const": {"$ref": "#/$defs/Leaf"}},
    },
    "required": ["leaf"],
    "additionalProperties": False,
    "$defs": {"Leaf": {"type": "integer"}},
    "definitions": {"Flag": {"type": "boolean"}},
}
LEAF_IS_TEXT = {
    "type": "object",
    "properties": {"leaf": {"$ref": "#/$defs/Leaf"}},
    "required": ["leaf"],
    "$defs": {"Leaf": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("tree", {"leaf": 1}, True),
        ("tree", {"leaf": "a"}, False),
        ("tree", {"leaf": 1, "children": [{"leaf": 2, "children": [{"leaf": 3}]}]}, True),
        ("tree", {"leaf": 1, "children": [{"leaf": "a"}]}, False),
        ("tree", {"leaf": 1, "children": [[{"name": "tree", "arguments": {"leaf": 1}}]]}, False),
        ("tree", {"leaf": 1, "const": True}, True),
        ("tree", {"leaf": 1, "const": 5}, False),
        ("tree", {"leaf": 1, "kind": {"$ref": "#/$defs/Leaf"}}, True),
        ("text", {"leaf": "a"}, True),
        ("text", {"leaf": 1}, False),
    ],
)
def test_a_required_calls_arguments_are_held_to_what_the_tools_schema_refers_to(
    hermes: ServedModel, name: str, arguments: Any, valid: bool
) -> None:
    tools = [
        {"type": "function", "function": {"name": "tree", "parameters": TREE}},
        {"type": "function", "function": {"name": "text", "parameters": LEAF_IS_TEXT}},
    ]
    asked = openai_chat.read({"messages": QUESTION, "tools": tools, "tool_choice": "required"}, hermes)
    schema = asked.parts[0].params.structured.value
    Draft202012Validator.check_schema(schema)
    assert Draft202012Validator(schema).is_valid([{"name": name, "arguments": arguments}]) == valid
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    text = json.dumps([{"name": name, "arguments": arguments}], separators=(", ", ": ")).encode()
    assert not matcher.is_error(), matcher.get_error()
    assert (matcher.try_consume_tokens([*text]) == len(text)) == valid

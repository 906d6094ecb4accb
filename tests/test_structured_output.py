"""Constrained output: every answer is of the form that was asked for, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from greedy_oracle import generate_alone, load_smollm2
from recall_executor import RecallExecutor
from tokenizers import Tokenizer, decoders, models, normalizers

from ifb_handler.engine import grammar as grammar_module
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.grammar import Grammars
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.structured import MAX_CHARACTERS, StructuredOutput
from ifb_handler.models.source import resolve
from ifb_handler.models.tokenizer import load_tokenizer


class NoiseExecutor(RecallExecutor):
    """A different token is the likeliest after each context, any of them: a model of no help to a grammar.

    bias    added to the logits of some tokens
    """

    def __init__(self, vocab_size: int, eos: int, num_blocks: int = 256) -> None:
        super().__init__(num_blocks, max_model_len=2048, eos=[eos])
        self.vocab_size = vocab_size
        self.bias: dict[int, float] = {}

    def logits_after(self, context: np.ndarray) -> torch.Tensor:
        draw = torch.Generator().manual_seed(zlib.crc32(np.asarray(context, np.int64).tobytes()))
        logits = torch.randn(self.vocab_size, generator=draw)
        for token_id, bias in self.bias.items():
            logits[token_id] += bias
        return logits


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def executor(tokenizer: Any) -> NoiseExecutor:
    return NoiseExecutor(len(tokenizer), tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def noise(tokenizer: Any, executor: NoiseExecutor) -> Iterator[Engine]:
    with Engine.with_executor(executor, tokenizer, max_num_seqs=8) as engine:
        yield engine
        engine.check()


@pytest.fixture(autouse=True)
def _no_bias(executor: NoiseExecutor) -> None:
    executor.bias = {}


def wants_to_end(executor: NoiseExecutor) -> dict[int, float]:
    return {executor.eos_token_ids[0]: 100.0}


def answer(engine: Engine, kind: str, value: Any = None, number: int = 0, **params: Any) -> Any:
    """One greedy answer; with another `number` a different one."""
    params = {"temperature": 0.0, "max_tokens": 256, "structured": StructuredOutput(kind, value), **params}
    (output,) = engine.generate([f"Number {number}"], SamplingParams(**params))
    return output


def tiny_schema(source: random.Random) -> dict[str, Any]:
    """A schema whose longest value is short."""
    word = "".join(source.choices("abcdefghij", k=5))
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"enum": [word, source.randint(0, 99), None]},
        {"type": "integer", "minimum": 0, "maximum": source.choice([9, 120, 5000])},
        {"type": "string", "minLength": 1, "maxLength": source.randint(1, 8)},
        {"type": "string", "pattern": f"^{word[:2]}[0-9]{{2}}$"},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 2},
        {"const": word},
        {"type": ["null", "boolean"]},
    ]
    names = source.sample(["name", "age", "ok", "size", "code"], source.randint(1, 2))
    whole = {
        "type": "object",
        "properties": {name: source.choice(leaves) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return source.choice([whole, whole, whole, source.choice(leaves)])


def test_200_schemas_mixed_with_regexes_and_plain_requests_all_get_what_they_asked_for() -> None:
    source = random.Random(0)
    schemas = [tiny_schema(source) for _ in range(200)]
    regexes = [rf"[A-Z][a-z]{{2,8}}-\d{{{source.randint(1, 4)}}}" for _ in range(20)]
    plain = [f"Story number {i} begins" for i in range(12)]
    work: list[tuple[str, Any]] = [*(("schema", s) for s in schemas), *(("regex", r) for r in regexes)]
    work += [("plain", prompt) for prompt in plain]
    source.shuffle(work)
    prompts, params = [], []
    for i, (kind, value) in enumerate(work):
        held = {"schema": "json_schema", "regex": "regex"}.get(kind)
        prompts.append(value if held is None else f"Number {i}, in JSON:" if kind == "schema" else "A code:")
        params.append(
            SamplingParams(
                max_tokens=12 if held is None else 100,
                temperature=0.0 if held is None else source.choice([0.0, 0.7]),
                seed=i,
                ignore_eos=held is None,
                structured=None if held is None else StructuredOutput(held, value),
            )
        )
    with Engine("smollm2-135m", dtype="float32", max_num_seqs=32) as engine:
        tokens = {prompt: engine.tokenizer.encode(prompt) for prompt in plain}
        outputs = engine.generate(prompts, params)
        engine.check()
    assert [output.error for output in outputs if output.error] == []
    for (kind, value), output in zip(work, outputs, strict=True):
        if kind != "plain":
            assert output.finish_reason is FinishReason.STOP, (value, output.text)
        if kind == "schema":
            jsonschema.validate(json.loads(output.text), value)
        if kind == "regex":
            assert re.fullmatch(value, output.text)
    model = load_smollm2()
    for prompt, output in zip(prompts, outputs, strict=True):
        if prompt in tokens:
            assert output.token_ids == generate_alone(model, tokens[prompt], 12)


# Each kind, with a model that is of no help.


@pytest.mark.parametrize("number", range(6))
def test_a_schema_is_kept_by_any_model(noise: Engine, number: int) -> None:
    schema = tiny_schema(random.Random(number))
    output = answer(noise, "json_schema", schema, number)
    assert output.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(output.text), schema)


def test_json_object_is_an_object_and_ends_by_itself(noise: Engine, executor: NoiseExecutor, tokenizer: Any) -> None:
    executor.bias = dict.fromkeys(tokenizer.convert_tokens_to_ids(['"', ":", ",", "}"]), 4.0)
    output = answer(noise, "json_object")
    assert output.finish_reason is FinishReason.STOP
    assert isinstance(json.loads(output.text), dict)


def test_the_whole_answer_matches_the_regex_whose_digits_are_those_of_ascii(noise: Engine) -> None:
    for number in range(4):
        output = answer(noise, "regex", r"(\d{2}/\w{1,5}\n){2}é+x", number)
        assert re.fullmatch(r"([0-9]{2}/\w{1,5}\n){2}é+x", output.text), output.text
        assert output.finish_reason is FinishReason.STOP


def test_a_choice_is_one_of_its_texts_whatever_characters_they_hold(noise: Engine) -> None:
    choices = [f"{chr(code)}." for code in [9, 10, *range(32, 127)]]
    choices += ["a|b", "日本", "é\n\"'\\", "[a-z]*", "{1}(?:x)^$"]
    seen = {answer(noise, "choice", choices, number).text for number in range(10)}
    assert seen <= set(choices)
    assert len(seen) > 3
    for one in choices:
        assert answer(noise, "choice", [one]).text == one


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/',
        'root ::= "(" root ")" | [0-9] [0-9]? [0-9]?',
    ],
)
def test_a_grammar_may_be_lark_or_gbnf(noise: Engine, grammar: str) -> None:
    opened, closed = re.fullmatch(r"(\(*)[0-9]{1,3}(\)*)", answer(noise, "grammar", grammar).text).groups()
    assert len(opened) == len(closed)


def test_a_sentencepiece_vocabulary_with_byte_fallback_spells_what_it_has_no_piece_for() -> None:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "y", "e", "s", "ye", "yes"]
    merges = [("y", "e"), ("ye", "s")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    # The model's vocabulary may be padded beyond the tokenizer's.
    for vocab_size in (len(pieces), len(pieces) + 100):
        with Engine.with_executor(NoiseExecutor(vocab_size, eos=2), tokenizer) as engine:
            for text in ("yes", "no é 日 yes"):
                structured = StructuredOutput("choice", [text])
                (output,) = engine.generate([[5]], SamplingParams(structured=structured, max_tokens=64))
                assert (output.text, output.finish_reason) == (text, FinishReason.STOP)


# When a constrained answer ends.


def test_the_end_comes_only_where_the_grammar_is_complete(noise: Engine, executor: NoiseExecutor) -> None:
    executor.bias = wants_to_end(executor)
    assert re.fullmatch("[a-z]{40,}", answer(noise, "regex", "[a-z]{40,}").text)
    assert answer(noise, "regex", "[a-z]*").text == ""


def test_a_complete_grammar_ends_the_answer_even_if_eos_is_ignored_and_min_tokens_not_reached(
    noise: Engine, executor: NoiseExecutor
) -> None:
    for ask in ({}, {"ignore_eos": True}, {"min_tokens": 200}, {"ignore_eos": True, "min_tokens": 200}):
        output = answer(noise, "choice", ["yes"], **ask)
        assert (output.text, output.finish_reason) == ("yes", FinishReason.STOP)
    executor.bias = wants_to_end(executor)
    assert answer(noise, "regex", "[a-z]*", ignore_eos=True).finish_reason is FinishReason.STOP


def test_min_tokens_holds_the_end_off_while_there_is_another_way_on(noise: Engine, executor: NoiseExecutor) -> None:
    executor.bias = wants_to_end(executor)
    output = answer(noise, "regex", "[a-z]*", min_tokens=7)
    assert output.num_generated_tokens == 8  # the seven, and the end
    assert output.finish_reason is FinishReason.STOP


def test_a_stop_string_and_max_tokens_end_a_constrained_answer_like_any_other(noise: Engine) -> None:
    output = answer(noise, "regex", "x{3}stop[a-z]+", stop=["stop"])
    assert (output.text, output.stop_reason, output.finish_reason) == ("xxx", "stop", FinishReason.STOP)
    output = answer(noise, "regex", "[a-z]{500}", max_tokens=3)
    assert (output.num_generated_tokens, output.finish_reason) == (3, FinishReason.LENGTH)
    # Text held back as the possible beginning of a stop string comes when the grammar is complete.
    assert answer(noise, "choice", ["maybe st"], stop=["stop"]).text == "maybe st"


def test_each_of_n_answers_has_a_grammar_of_its_own(noise: Engine) -> None:
    structured = StructuredOutput("regex", "[a-z]{5}-[0-9]{5}")
    texts = ["", "", ""]
    for output in noise.stream("Hello", SamplingParams(n=3, max_tokens=64, seed=1, structured=structured)):
        texts[output.index] += output.text
    assert len(set(texts)) == 3
    assert all(re.fullmatch("[a-z]{5}-[0-9]{5}", text) for text in texts)


def test_a_preempted_answer_takes_up_its_grammar_where_it_was(tokenizer: Any) -> None:
    def texts(num_blocks: int) -> list[str]:
        executor = NoiseExecutor(len(tokenizer), tokenizer.eos_token_id, num_blocks)
        with Engine.with_executor(executor, tokenizer, max_num_seqs=6, enable_prefix_caching=False) as engine:
            structured = StructuredOutput("regex", "([a-z][0-9]){20}([a-z]{3}[0-9])*;")
            ask = SamplingParams(temperature=0.0, max_tokens=60, structured=structured)
            outputs = engine.generate([[i + 3] * 10 for i in range(6)], ask)
            engine.check()
            assert (engine.stats().num_preemptions > 0) == (num_blocks < 64)
            assert [output.error for output in outputs] == [None] * 6
            return [output.text for output in outputs]

    assert texts(num_blocks=12) == texts(num_blocks=64)


# What can not be.


def refused(engine: Engine, kind: str, value: Any, match: str) -> None:
    """The first time and the second, as vLLM's users would have wished (vllm#17313, #43920)."""
    for _ in range(2):
        with pytest.raises(RequestError, match=match) as error:
            engine.generate(["Hello"], SamplingParams(structured=StructuredOutput(kind, value, field="guided")))
        assert error.value.param == "guided"
        assert error.value.message.startswith("guided: ")


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("regex", "(a", "the regex cannot be used.*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", {"type": "banana"}, "Invalid type: banana"),
        ("json_schema", {"type": "string", "not": {"const": "a"}}, 'Unimplemented keys: \\["not"\\]'),
        ("json_schema", {"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ("json_schema", {"$ref": "https://example.com/x.json"}, "the json_schema cannot be used"),
        ("json_schema", {"$ref": "#"}, "the json_schema cannot be used"),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ("grammar", "start: missing", "unknown name"),
        ("grammar", 'root ::= ("a"', "the grammar cannot be used"),
        ("grammar", "start: start", "the grammar cannot be used"),
    ],
)
def test_what_is_no_grammar_is_refused_by_the_name_of_its_field_twice_over(
    noise: Engine, kind: str, value: Any, match: str
) -> None:
    refused(noise, kind, value, match)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        pytest.param("json_schema", {"type": "integer", "multipleOf": 9_999_991}, id="minutes of work"),
        pytest.param("regex", "a?" * 50_000, id="gigabytes"),
        pytest.param(
            "grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5000)), 'r5000: "a"']), id="stack"
        ),
        pytest.param("regex", "((a{100}){100}){100}", id="the first mask"),
        pytest.param("regex", "xy(a{1000}){1000}", id="a later mask"),
    ],
)
def test_an_exploding_grammar_is_refused_and_the_engine_serves_on(noise: Engine, kind: str, value: Any) -> None:
    refused(noise, kind, value, "too complex|too many expressions")
    assert answer(noise, "choice", ["fine"]).text == "fine"
    assert answer(noise, "regex", "still [f]ine").text == "still fine"


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("yaml", "a: b", "'yaml' is not one of json_schema, json_object"),
        ("json_schema", "[]", "is not a JSON schema"),
        ("json_schema", None, "is not a JSON schema"),
        ("json_schema", {"const": float("nan")}, "cannot be written as JSON"),
        ("json_schema", {"enum": ["x" * MAX_CHARACTERS]}, f"at most {MAX_CHARACTERS}"),
        ("json_object", {}, "takes no value"),
        ("regex", "", "not a non-empty text"),
        ("regex", "\ud800", "surrogate"),
        ("choice", [], "not a list of texts"),
        ("choice", "yes", "not a list of texts"),
        ("choice", ["yes", 1], "1 is not a non-empty text"),
        ("grammar", 7, "7 is not a non-empty text"),
    ],
)
def test_a_form_is_checked_when_it_is_made(kind: str, value: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match) as error:
        StructuredOutput(kind, value, field="response_format")
    assert error.value.param == "response_format"


def test_a_schema_too_deep_to_be_written_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        StructuredOutput("json_schema", schema)


def test_sampling_params_take_no_other_form_of_it() -> None:
    with pytest.raises(RequestError, match="is not a StructuredOutput"):
        SamplingParams(structured={"type": "object"})


def test_an_engine_without_a_tokenizer_refuses_and_answers_plain_requests() -> None:
    with Engine.with_executor(RecallExecutor(64)) as engine:
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.prepare(SamplingParams(structured=StructuredOutput("json_object")))
        engine.generate([[1]])


def test_a_dead_end_ends_its_request_with_an_error_and_no_other(noise: Engine, tokenizer: Any) -> None:
    digits = StructuredOutput("regex", "[0-9]+")
    # Longer than what is tried beforehand: the explosion is met on the way.
    explodes = StructuredOutput("regex", "[0-9]{60}a{1000000}")
    letters = tokenizer.encode("abcdefg xyz")
    outputs = noise.generate(
        ["Hello"] * 4,
        [
            SamplingParams(temperature=0.0, structured=digits, max_tokens=90),
            SamplingParams(temperature=0.0, structured=digits, allowed_token_ids=letters),
            SamplingParams(temperature=0.0, structured=explodes, max_tokens=90),
            SamplingParams(temperature=0.0, max_tokens=90),
        ],
    )
    alone = [
        noise.generate(["Hello"], SamplingParams(temperature=0.0, structured=digits, max_tokens=90))[0],
        noise.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=90))[0],
    ]
    assert [outputs[0].token_ids, outputs[3].token_ids] == [output.token_ids for output in alone]
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert "no token" in outputs[1].error
    assert outputs[2].finish_reason is FinishReason.ERROR
    assert "too many expressions" in outputs[2].error
    assert re.fullmatch("[0-9]+", outputs[2].text)


# What is remembered.


@pytest.fixture
def grammars(tokenizer: Any) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield grammars
    grammars.close()


def test_a_grammar_is_compiled_once_for_all_who_ask_at_the_same_time(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: grammars.get(StructuredOutput("json_schema", dict(schema))), range(16)))
    assert len(set(map(id, found))) == 1


def test_the_order_of_a_schemas_properties_is_the_answers(noise: Engine) -> None:
    for names in (["a", "b"], ["b", "a"]):
        schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names}
        text = answer(noise, "json_schema", {**schema, "additionalProperties": False}).text
        assert list(json.loads(text)) == names


@pytest.mark.parametrize("limit", ["_CACHED_GRAMMARS", "_CACHED_BYTES"])
def test_the_grammar_used_longest_ago_is_forgotten_first(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "_CACHED_GRAMMARS":
        monkeypatch.setattr(grammar_module, limit, 2)
        monkeypatch.setattr(grammar_module, "_CACHED_BYTES", 1 << 40)
    else:  # far above what a grammar is measured to take: two fit, three do not
        monkeypatch.setattr(grammar_module, limit, 5 << 29)
        monkeypatch.setattr(grammar_module, "_LEAST_BYTES", 1 << 30)
    a, b, c = (StructuredOutput("regex", letter) for letter in "abc")
    first_a, first_b = grammars.get(a), grammars.get(b)
    assert grammars.get(a) is first_a
    grammars.get(c)
    assert grammars.get(a) is first_a
    assert grammars.get(b) is not first_b


def test_the_process_that_tries_grammars_ends_with_the_engine(tokenizer: Any) -> None:
    executor = NoiseExecutor(len(tokenizer), tokenizer.eos_token_id)
    with Engine.with_executor(executor, tokenizer) as engine:
        engine.prepare(SamplingParams(structured=StructuredOutput("json_object")))
        child = engine._grammars._trial._child
        assert child.poll() is None
    assert child.poll() is not None

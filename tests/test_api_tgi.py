"""TGI's bodies and answers; the types of Hugging Face's own client are the oracle."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput
from tiny_llama import write_tokenizer

from ifb_handler.api import routes, tgi
from ifb_handler.api.errors import APIError
from ifb_handler.api.served_model import ServedModel
from ifb_handler.api.tgi import TGIAnswer, TGIAsked
from ifb_handler.engine.errors import QueueFullError
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from ifb_handler.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return ServedModel("tiny", tokenizer, 512, len(tokenizer))


def ask(model: ServedModel, stream: bool | None = None, **parameters: Any) -> TGIAsked:
    return tgi.read({"inputs": "the fox", "parameters": parameters, "stream": stream}, model)


def params(model: ServedModel, **parameters: Any) -> SamplingParams:
    (part,) = ask(model, **parameters).parts
    return part.params


def outputs(model: ServedModel, index: int = 0, logprob: float = -0.5) -> list[RequestOutput]:
    """Two tokens and the end-of-sequence token, which has no text."""
    eos = model.tokenizer.eos_token_id
    told = [
        RequestOutput("r", text, [token], index, [TokenLogprobs(token, logprob, ((token, logprob), (9, -math.inf)))])
        for text, token in (("Hel", 50), ("lo", 60), ("", eos))
    ]
    told[0].prompt_logprobs = [None, TokenLogprobs(6, -2.0), TokenLogprobs(7, -math.inf)]
    told[-1].finish_reason = FinishReason.STOP
    return told


def answer_to(model: ServedModel, asked: TGIAsked) -> TGIAnswer:
    answer = TGIAnswer(asked, "r", model)
    answer.requests([[5, 6, 7]])
    return answer


def whole(model: ServedModel, told: list[RequestOutput] | None = None, **parameters: Any) -> dict[str, Any]:
    answer = answer_to(model, ask(model, **parameters))
    for output in told or outputs(model):
        answer.add(output)
    return json.loads(answer.whole())


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"temperature": 1.0}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"top_p": 1.0}, 0.0),
        ({"typical_p": 1.0}, 0.0),
    ],
)
def test_an_answer_is_greedy_unless_something_asks_for_chance(
    model: ServedModel, parameters: dict[str, Any], temperature: float
) -> None:
    assert params(model, **parameters).temperature == temperature


def test_parameters_have_our_meanings_by_their_names(model: ServedModel) -> None:
    told = params(
        model,
        do_sample=True,
        max_new_tokens=7,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        seed=3,
        stop=["END"],
        details=True,
        top_n_tokens=4,
        decoder_input_details=True,
    )
    assert (told.max_tokens, told.repetition_penalty, told.frequency_penalty) == (7, 1.2, 0.5)
    assert (told.seed, told.stop, told.logprobs, told.prompt_logprobs) == (3, ("END",), 4, 0)
    assert told.include_stop_str_in_output, "TGI gives the stop string, too"
    assert params(model).max_tokens == 100


def test_truncate_keeps_the_end_of_the_prompt(model: ServedModel) -> None:
    whole_prompt = model.tokenizer("the fox").input_ids
    assert ask(model, truncate=2).token_ids(model) == [whole_prompt[-2:]]
    long = tgi.read({"inputs": "fox " * 5000, "parameters": {"truncate": 5}}, model)
    long.check_sizes(model)
    assert len(long.token_ids(model)[0]) == 5


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"watermark": True}, "watermark"),
        ({"adapter_id": "mine"}, "adapter_id"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 99, "do_sample": True}, "best_of"),
        ({"stop": [5]}, "stop"),
        ({"truncate": 0}, "truncate"),
        ({"top_n_tokens": 99, "details": True}, "top_n_tokens"),
        ({"details": "yes"}, "details"),
        ({"grammar": {"type": "words", "value": "a"}}, "grammar.type"),
    ],
)
def test_a_bad_parameter_is_told_by_the_name_that_the_client_knows(
    model: ServedModel, parameters: dict[str, Any], param: str
) -> None:
    with pytest.raises(APIError) as caught:
        ask(model, **parameters)
    assert caught.value.param == f"parameters.{param}"
    assert TGIAnswer.status_of(caught.value) == 422
    body = TGIAnswer.error_body(caught.value)
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == "validation"
    assert param in body["error"]


@pytest.mark.parametrize("fields", [{"inputs": ""}, {"inputs": 5}, {"inputs": "\ud800"}, {}])
def test_inputs_must_be_a_text(model: ServedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(APIError) as caught:
        tgi.read(fields, model)
    assert caught.value.param == "inputs"


def test_an_overloaded_server_says_so_in_tgis_words() -> None:
    error = APIError.of(QueueFullError("full"))
    assert TGIAnswer.status_of(error) == 429
    assert TGIAnswer.error_body(error) == {"error": "full", "error_type": "overloaded", "retry_after": 1}


def test_a_whole_answer_is_one_that_the_client_reads(model: ServedModel) -> None:
    body = whole(model, details=True, decoder_input_details=True, top_n_tokens=2)
    told = TextGenerationOutput.parse_obj_as_instance(body)
    assert told.generated_text == "Hello"
    assert told.details is not None
    assert (told.details.finish_reason, told.details.generated_tokens) == ("eos_token", 3)
    assert [(token.id, token.text, token.special) for token in told.details.tokens] == [
        (50, "Hel", False),
        (60, "lo", False),
        (1, "", True),
    ]
    assert [(token.id, token.logprob) for token in told.details.prefill] == [(5, None), (6, -2.0), (7, -9999.0)]
    assert told.details.top_tokens is not None
    assert [rival["logprob"] for rival in told.details.top_tokens[0]] == [-0.5, -9999.0]
    assert whole(model) == {"generated_text": "Hello"}


def test_the_full_text_begins_with_the_prompt(model: ServedModel) -> None:
    assert whole(model, return_full_text=True)["generated_text"] == "the foxHello"


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        (FinishReason.LENGTH, None, "length"),
        (FinishReason.STOP, None, "eos_token"),
        (FinishReason.STOP, "END", "stop_sequence"),
    ],
)
def test_why_it_ended_has_tgis_words(
    model: ServedModel, reason: FinishReason, stop_reason: str | None, told: str
) -> None:
    news = outputs(model)
    news[-1].finish_reason, news[-1].stop_reason = reason, stop_reason
    assert whole(model, news, details=True)["details"]["finish_reason"] == told


def test_the_best_of_several_is_the_likeliest_and_the_others_are_told(model: ServedModel) -> None:
    news = outputs(model, 0, -0.9) + outputs(model, 1, -0.1)
    news[3].text = "Bel"
    body = whole(model, news, details=True, best_of=2, do_sample=True)
    assert body["generated_text"] == "Bello"
    (other,) = body["details"]["best_of_sequences"]
    assert other["generated_text"] == "Hello"


def test_a_sampled_answer_tells_the_seed_by_which_it_can_be_had_again(model: ServedModel) -> None:
    asked = ask(model, do_sample=True, details=True)
    seed = asked.parts[0].params.seed
    assert seed is not None
    answer = answer_to(model, asked)
    for output in outputs(model):
        answer.add(output)
    assert json.loads(answer.whole())["details"]["seed"] == seed
    assert whole(model, details=True)["details"]["seed"] is None


def test_a_stream_has_an_event_a_token_and_the_whole_text_in_the_last(model: ServedModel) -> None:
    answer = answer_to(model, ask(model, stream=True, top_n_tokens=2))
    first, *rest = outputs(model)
    text = answer.stream([first]) + answer.stream(rest)
    assert "[DONE]" not in text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]
    told = [TextGenerationStreamOutput.parse_obj_as_instance(event) for event in events]
    assert [(event.index, event.token.text, event.token.special) for event in told] == [
        (1, "Hel", False),
        (2, "lo", False),
        (3, "", True),
    ]
    assert [event.generated_text for event in told] == [None, None, "Hello"]
    assert told[-1].details is not None
    assert (told[-1].details.finish_reason, told[-1].details.input_length) == ("eos_token", 3)
    assert [len(event.top_tokens or ()) for event in told] == [2, 2, 2]


@pytest.mark.parametrize("parameters", [{"decoder_input_details": True}, {"best_of": 2, "do_sample": True}])
def test_what_is_known_only_at_the_end_is_not_streamed(model: ServedModel, parameters: dict[str, Any]) -> None:
    with pytest.raises(APIError, match="stream"):
        ask(model, stream=True, **parameters)


def test_routes_say_whether_to_stream_and_the_bare_path_asks_the_body(model: ServedModel) -> None:
    for path, body_says, streamed in (
        ("generate", True, False),
        ("generate_stream", None, True),
        ("", True, True),
        ("", None, False),
    ):
        route, _ = routes.find(path)
        assert isinstance(route, routes.Generation)
        fields = {"inputs": "the fox", "stream": body_says}
        assert routes.by_body(route, fields).read(fields, model).stream is streamed


def test_info_has_the_limits(model: ServedModel) -> None:
    told = tgi.info(model)
    assert (told["model_id"], told["max_total_tokens"], told["max_input_tokens"]) == ("tiny", 512, 511)
    assert (told["model_dtype"], told["model_device_type"]) == ("float32", "cpu"), "what `auto` became"

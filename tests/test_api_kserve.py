"""KServe's bodies and answers, v1 and v2 (Open Inference Protocol)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_llama import write_tokenizer

from ifb_handler.api import routes
from ifb_handler.api.answer import Answer
from ifb_handler.api.errors import APIError
from ifb_handler.api.kserve import V1Answer, V2Answer
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.outputs import FinishReason, RequestOutput


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return ServedModel("tiny", tokenizer, 512, len(tokenizer), EngineConfig(max_client_batch_size=3))


def answer_to(model: ServedModel, fields: dict[str, Any]) -> Answer:
    route, _ = routes.find("")
    assert isinstance(route, routes.Generation)
    route = routes.by_body(route, fields)
    asked = route.read(fields, model)
    asked.check_sizes(model)
    answer = route.answer(asked, "r", model)
    answer.requests(asked.token_ids(model))
    return answer


def answered(model: ServedModel, fields: dict[str, Any]) -> dict[str, Any]:
    """Prompt i is answered with i + 1 tokens and `text i`."""
    answer = answer_to(model, fields)
    for i, engine_id in reversed(list(enumerate(answer.engine_ids))):
        answer.add(RequestOutput(engine_id, f"text {i}", [50] * (i + 1), finish_reason=FinishReason.LENGTH))
    return json.loads(answer.whole())


def tensor(**different: Any) -> dict[str, Any]:
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["the fox"], **different}


def refusal(model: ServedModel, fields: dict[str, Any]) -> APIError:
    try:
        answer_to(model, fields)
    except (APIError, ValueError) as error:
        return APIError.of(error)
    raise AssertionError(f"{fields} was accepted")


def test_v1_answers_each_instance_in_its_place(model: ServedModel) -> None:
    body = answered(model, {"instances": ["the fox", {"prompt": [5, 6], "max_tokens": 2}]})
    assert [answer["text"] for answer in body["predictions"]] == ["text 0", "text 1"]
    assert body["predictions"][1] == {
        "text": "text 1",
        "token_ids": [50, 50],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }


def test_v1_instances_have_parameters_of_their_own_and_in_common(model: ServedModel) -> None:
    instances = ["a", {"prompt": "b", "temperature": 0.5, "stop": "END"}]
    answer = answer_to(model, {"instances": instances, "parameters": {"max_tokens": 7, "temperature": 0}})
    first, second = (part.params for part in answer.asked.parts)
    assert (first.max_tokens, first.temperature) == (7, 0)
    assert (second.max_tokens, second.temperature, second.stop) == (7, 0.5, ("END",))


@pytest.mark.parametrize(
    ("instances", "param"),
    [
        ([], "instances"),
        ("the fox", "instances"),
        (["a"] * 4, "instances"),
        ([5], "instances[0].prompt"),
        (["a", ""], "instances[1].prompt"),
        (["a", {"prompt": "b", "top_p": 2}], "instances[1].top_p"),
        (["a", {"prompt": "b", "n": 2}], "instances[1].n"),
        ([{"prompt": "b", "model": "gpt-9"}], "instances[0].model"),
        (["a", "x" * 100_000], "instances[1].prompt"),
        ([{"prompt": [10**6]}], "instances[0].prompt"),
    ],
)
def test_v1_names_the_instance_at_fault(model: ServedModel, instances: Any, param: str) -> None:
    error = refusal(model, {"instances": instances})
    assert error.param == param
    assert V1Answer.error_body(error) == {"error": error.message}


def test_v2_answers_texts_with_tensors_and_the_clients_id(model: ServedModel) -> None:
    body = answered(model, {"id": "mine", "inputs": [tensor(shape=[2], data=["a", "b"])]})
    assert body == {
        "id": "mine",
        "model_name": "tiny",
        "outputs": [
            {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["text 0", "text 1"]},
            {"name": "finish_reason", "datatype": "BYTES", "shape": [2], "data": ["length", "length"]},
        ],
    }
    assert answered(model, {"inputs": [tensor()]})["id"] == "r"


@pytest.mark.parametrize(
    ("shape", "data", "prompts"),
    [
        ([3], [5, 6, 7], [[5, 6, 7]]),
        ([1, 3], [5, 6, 7], [[5, 6, 7]]),
        ([2, 2], [5, 6, 7, 8], [[5, 6], [7, 8]]),
        ([2, 2], [[5, 6], [7, 8]], [[5, 6], [7, 8]]),
    ],
)
def test_v2_takes_token_ids_as_rows(
    model: ServedModel, shape: list[int], data: list[Any], prompts: list[list[int]]
) -> None:
    answer = answer_to(model, {"inputs": [tensor(name="input_ids", datatype="INT64", shape=shape, data=data)]})
    assert answer.prompt_token_ids == prompts


def test_v2_gives_the_outputs_that_are_asked_for(model: ServedModel) -> None:
    fields = {"inputs": [tensor(shape=[2, 1], data=["a", "b"])], "outputs": [{"name": "token_ids"}]}
    (only,) = answered(model, fields)["outputs"]
    assert only == {"name": "token_ids", "datatype": "INT64", "shape": [2, 2], "data": [50, -1, 50, 50]}


def test_v2_parameters_are_the_sampling_fields(model: ServedModel) -> None:
    answer = answer_to(model, {"inputs": [tensor()], "parameters": {"max_tokens": 3, "timeout": 5}})
    assert answer.asked.parts[0].params.max_tokens == 3
    assert answer.asked.timeout == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor(), tensor()]}, "inputs"),
        ({"inputs": ["the fox"]}, "inputs[0]"),
        ({"inputs": [tensor(name=None)]}, "inputs[0].name"),
        ({"inputs": [tensor(shape=[])]}, "inputs[0].shape"),
        ({"inputs": [tensor(shape=[2])]}, "inputs[0].shape"),
        ({"inputs": [tensor(shape=[-1])]}, "inputs[0].shape"),
        ({"inputs": [tensor(datatype="FP32")]}, "inputs[0].datatype"),
        ({"inputs": [tensor(data="the fox")]}, "inputs[0].data"),
        ({"inputs": [tensor(data=[5])]}, "inputs[0].data[0]"),
        ({"inputs": [tensor(data=[""])]}, "inputs[0].data[0]"),
        ({"inputs": [tensor(data=["\ud800"])]}, "inputs[0].data[0]"),
        ({"inputs": [tensor(datatype="INT64", shape=[1], data=["a"])]}, "inputs[0].data"),
        ({"inputs": [tensor(datatype="INT64", shape=[2, 2], data=[5, 6, 7])]}, "inputs[0].shape"),
        ({"inputs": [tensor(datatype="INT64", shape=[2, 2], data=[[5, 6, 7], [8]])]}, "inputs[0].shape"),
        ({"inputs": [tensor(datatype="INT64", shape=[1, 1, 1], data=[5])]}, "inputs[0].shape"),
        ({"inputs": [tensor(datatype="INT64", shape=[1], data=[10**6])]}, "inputs[0].data"),
        ({"inputs": [tensor(shape=[4], data=["a"] * 4)]}, "inputs[0]"),
        ({"inputs": [tensor()], "id": 5}, "id"),
        ({"inputs": [tensor()], "id": "\ud800"}, "id"),
        ({"inputs": [tensor()], "parameters": {"top_k": "all"}}, "parameters.top_k"),
        ({"inputs": [tensor()], "parameters": []}, "parameters"),
        ({"inputs": [tensor()], "outputs": [{"name": "logits"}]}, "outputs[0].name"),
    ],
)
def test_v2_names_the_part_of_the_tensor_at_fault(model: ServedModel, fields: dict[str, Any], param: str) -> None:
    error = refusal(model, fields)
    assert (error.status, error.param) == (400, param)
    assert V2Answer.error_body(error) == {"error": error.message}


def test_v2_token_ids_are_refused_by_their_number_before_they_are_looked_at(model: ServedModel) -> None:
    million = ["no token id"] * 1_000_000
    for shape, param in (([10**6], "inputs[0].data"), ([10**6, 1], "inputs[0]"), ([3], "inputs[0].shape")):
        fields = {"inputs": [tensor(datatype="INT64", shape=shape, data=million)]}
        assert refusal(model, fields).param == param


def test_v1_instances_are_handled_as_each_of_them_says(model: ServedModel) -> None:
    instances = ["a", {"prompt": "b", "priority": 0, "timeout": 3}, {"prompt": "c", "cache_salt": "mine", "timeout": 9}]
    answer = answer_to(model, {"instances": instances, "parameters": {"priority": 5, "cache_salt": "ours"}})
    assert answer.asked.timeout == 3, "they are answered together"
    requests = answer.requests([[5]] * 3)
    assert [(request.priority, request.cache_salt) for request in requests] == [(5, "ours"), (0, "ours"), (5, "mine")]


@pytest.mark.parametrize("field", [{"timeout": "soon"}, {"timeout": -1}, {"priority": 1.5}, {"cache_salt": ""}])
def test_v1_refuses_what_an_instance_cannot_be_handled_by(model: ServedModel, field: dict[str, Any]) -> None:
    (name,) = field
    assert refusal(model, {"instances": ["a", {"prompt": "b", **field}]}).param == f"instances[1].{name}"
    assert refusal(model, {"instances": ["a"], "parameters": field}).param == name

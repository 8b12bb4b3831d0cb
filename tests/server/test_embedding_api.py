"""Reading and answering embeddings requests, without a server."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from server.config import MAX_INPUTS
from server.service.api import MAX_PARTS, MAX_VALUES, ApiError, ServedModel
from server.service.embeddings import read_request, response_to

MODEL = ServedModel("m", 3, 8, 100)


def read(**fields: Any) -> Any:
    return read_request(json.dumps({"model": "m", **fields}).encode(), MODEL)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("one", ["one"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_shapes_of_input(given: Any, inputs: Any) -> None:
    assert read(input=given)[1] == inputs


def test_a_body_that_is_no_object_has_no_field_at_fault() -> None:
    with pytest.raises(ApiError, match="got `array`") as raised:
        read_request(b"[]", MODEL)
    assert raised.value.param is None


@pytest.mark.parametrize(
    ("fields", "status", "param", "text"),
    [
        ({}, 400, "input", "missing required field `input`"),
        ({"input": []}, 400, "input", "empty list"),
        ({"input": None}, 400, "input", "not an embeddings request"),
        ({"input": ["a", 1]}, 400, "input", "mixes"),
        ({"input": [[1], "a"]}, 400, "input", "mixes"),
        ({"input": [[[1]]]}, 400, "input", "not an embeddings request"),
        ({"input": {"a": 1}}, 400, "input", "not an embeddings request"),
        ({"input": [1.5]}, 400, "input", "not an embeddings request"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, 400, "input", f"at most {MAX_INPUTS}"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "'hex'"),
        ({"input": "a", "dimensions": 2}, 400, "dimensions", "must be 3"),
        ({"input": "a", "dimensions": "3"}, 400, "dimensions", "not an embeddings request"),
        ({"input": "a", "user": 7}, 400, "user", "not an embeddings request"),
        ({"input": "a", "model": "other"}, 404, "model", "does not exist"),
        ({"input": "a", "model": 7}, 400, "model", "not an embeddings request"),
    ],
)
def test_what_is_wrong_is_told(fields: Any, status: int, param: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as raised:
        read(**fields)
    assert raised.value.status == status
    error = msgspec.to_builtins(raised.value.response())["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"model":"m","input":"\\ud800"}', "not JSON: half of a surrogate pair"),
        (b'{"model":"m","input":"\\uD800 "}', "not JSON: half of a surrogate pair"),
        (b'{"input":"\\ud800","model":"m"}', "not JSON: .* surrogate pair"),
        (b'{"model":"m","input":"\\udc00"}', "not JSON: .* surrogate pair"),
        (b'{"model":"m","input":"a","other":"\x80"}', "not JSON: .*position 34"),
        (b'"m"', "not an embeddings request"),
        (b'{"model":"m","input":' + b"[" * 200_000, "not JSON|not an embeddings|nested too deep"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_bytes_that_are_no_request(body: bytes, text: str) -> None:
    with pytest.raises(ApiError, match=text) as raised:
        read_request(body, MODEL)
    assert raised.value.status == 400


@pytest.mark.parametrize("many", [b"[]", b"{}", b'""', b'"[\\""'])
@pytest.mark.parametrize("field", [b"input", b"other"])
def test_more_parts_than_any_request_has_are_not_built(many: bytes, field: bytes) -> None:
    body = b'{"model":"m","%s":[%s]}' % (field, b",".join([many] * MAX_PARTS))
    with pytest.raises(ApiError, match=rf"has more than {MAX_PARTS} texts, arrays and obj"):
        read_request(body, MODEL)


@pytest.mark.parametrize("field", ["input", "other"])
def test_more_values_than_any_request_has_are_not_built(field: str) -> None:
    body = f'{{"model":"m","{field}":[{"7," * MAX_VALUES}7]}}'
    with pytest.raises(ApiError, match=rf"has more than {MAX_VALUES} values"):
        read_request(body.encode(), MODEL)


def test_as_many_values_as_may_be_are_read() -> None:
    assert read(input=[7] * (MAX_VALUES - 1))[1] == [[7] * (MAX_VALUES - 1)]


def test_the_most_inputs_may_each_fill_a_model_of_512_tokens() -> None:
    assert len(read(input=[[29_999] * 512] * MAX_INPUTS)[1]) == MAX_INPUTS


@pytest.mark.parametrize(
    "text", ["[" * MAX_PARTS, '{"a\\":[]}' * MAX_PARTS, "," * MAX_VALUES], ids=["[", "{", ","]
)
def test_what_looks_like_parts_within_a_text_does_not_count(text: str) -> None:
    assert read(input=[text, "b"])[1] == [text, "b"]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_answer_holds_the_vectors_in_order(encoding: str) -> None:
    vectors = [np.array([1.5, -2.0, 0.1], np.float32), np.array([0.0, 4.0, 5.0], np.float32)]
    request, _ = read(input=["a", "b"], encoding_format=encoding)
    answer = json.loads(msgspec.json.encode(response_to(request, vectors, 7)))
    assert (answer["object"], answer["model"]) == ("list", "m")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for index, (entry, vector) in enumerate(zip(answer["data"], vectors, strict=True)):
        assert (entry["object"], entry["index"]) == ("embedding", index)
        got = entry["embedding"]
        if encoding == "base64":
            got = np.frombuffer(base64.b64decode(got), "<f4")
        assert np.array_equal(np.asarray(got, np.float32), vector)

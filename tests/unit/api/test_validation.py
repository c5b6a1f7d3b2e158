"""What reaches the engine: every field of the request in its `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.api import validation
from runners.api.errors import error_body
from runners.api.protocol import ChatCompletionRequest, CompletionRequest, RequestParser, unknown_fields_warning
from runners.errors import ContextLengthError, InvalidRequestError
from runners.request import SamplingParams
from tests.support.scripted_engine import model_info

INFO = model_info(vocab_size=100)
COMPLETION = RequestParser(CompletionRequest)
CHAT = RequestParser(ChatCompletionRequest)


def params_of(**fields: Any) -> SamplingParams:
    request, unknown = COMPLETION.parse(json.dumps(fields).encode())
    assert not unknown
    return validation.sampling_params(request, INFO)


def test_every_field_arrives() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 42,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "8": 2.5},
        "logprobs": 4,
        "prompt_logprobs": 2,
    }
    expected = {**fields, "max_tokens": 0, "stop_token_ids": (5, 6), "logit_bias": {7: -100.0, 8: 2.5}}
    assert params_of(**fields) == SamplingParams(**expected)


def test_defaults() -> None:
    assert msgspec.structs.replace(params_of(), seed=0) == SamplingParams(max_tokens=0)
    assert params_of().seed != params_of().seed
    assert params_of(top_k=-1).top_k == 0
    assert params_of(temperature=1e-40).temperature == 0.0
    assert params_of(temperature=0.0).is_greedy
    assert params_of(top_k=10**6).top_k == 0


@given(st.integers())
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= params_of(seed=seed).seed < 2**63


def test_chat_logprobs() -> None:
    for fields, expected in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False}, None),
        ({}, None),
    ):
        request, _ = CHAT.parse(json.dumps(fields).encode())
        assert validation.sampling_params(request, INFO).logprobs == expected
    request, _ = CHAT.parse(b'{"top_logprobs": 5}')
    with pytest.raises(InvalidRequestError) as raised:
        validation.sampling_params(request, INFO)
    assert raised.value.param == "top_logprobs"


def test_echo_asks_for_the_prompts_logprobs() -> None:
    assert params_of(echo=True, logprobs=3).prompt_logprobs == 3
    assert params_of(logprobs=3).prompt_logprobs is None


@pytest.mark.parametrize(
    ("prompt_tokens", "requested", "default", "expected"),
    [(10, None, 16, 16), (95, None, 16, 5), (10, None, None, 90), (10, 90, 16, 90), (100, 0, 16, 0), (10, 0, 16, 0)],
)
def test_max_tokens(prompt_tokens: int, requested: int | None, default: int | None, expected: int) -> None:
    assert validation.max_tokens_for(prompt_tokens, requested, default, 100, param="x") == expected


@pytest.mark.parametrize(("prompt_tokens", "requested", "default"), [(10, 91, 16), (100, None, 16), (101, None, None)])
def test_over_the_context(prompt_tokens: int, requested: int | None, default: int | None) -> None:
    with pytest.raises(ContextLengthError) as raised:
        validation.max_tokens_for(prompt_tokens, requested, default, 100, param="x")
    assert "100" in raised.value.message
    assert str(prompt_tokens) in raised.value.message


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        validation.with_limits(params_of(min_tokens=5), 4, 0)
    assert raised.value.param == "min_tokens"


def test_choices_have_their_own_seeds() -> None:
    params = params_of(seed=2**63 - 1)
    assert [validation.with_limits(params, 4, choice).seed for choice in range(3)] == [2**63 - 1, 0, 1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(CompletionRequest.__struct_fields__)


def refusal_of(check: Callable[[], object]) -> InvalidRequestError | None:
    """The error of `check`; any other exception is a failure of the test."""
    try:
        check()
    except InvalidRequestError as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), json_values, max_size=6))
def test_any_object_is_parsed_or_refused(body: dict[str, Any]) -> None:
    def check() -> None:
        request, unknown = COMPLETION.parse(json.dumps(body).encode())
        assert set(unknown) == set(body) - set(FIELDS)
        validation.check_fields(request)
        validation.sampling_params(request, INFO)
        validation.stop_strings(request)
        validation.choices_per_prompt(request)

    error = refusal_of(check)
    if error is not None:
        assert error.param is None or error.param in body
        assert len(error_body(error)) < 4096


def test_a_very_long_stop_string_is_refused() -> None:
    def stops_of(length: int) -> list[str]:
        return validation.stop_strings(CompletionRequest(stop=["a", "b" * length]))

    assert stops_of(validation.MAX_STOP_CHARS)[1] == "b" * validation.MAX_STOP_CHARS
    error = refusal_of(lambda: stops_of(validation.MAX_STOP_CHARS + 1))
    assert error is not None
    assert error.param == "stop"


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    error = refusal_of(lambda: COMPLETION.parse(b"[" + body))  # an array is never a request
    assert error is not None
    assert len(error_body(error)) < 4096


@given(st.lists(st.text(), min_size=1, max_size=30))
def test_warning_header_is_safe(names: list[str]) -> None:
    value = unknown_fields_warning(names)
    assert len(value) < 600
    assert all(0x20 <= byte < 0x7F for byte in value)


@given(st.text(), st.text() | st.none())
def test_error_bodies_are_small_json(message: str, param: str | None) -> None:
    body = error_body(InvalidRequestError(message * 50, param=param))
    assert len(body) < 4096
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}

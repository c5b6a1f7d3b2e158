"""Structured output over HTTP: what reaches the engine, what is refused and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runners.grammar import grammars
from tests.support.http_server import Server, in_process
from tests.support.scripted_engine import Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "text"}}, ""),
    ({"response_format": {"type": "json_object"}}, grammars.from_json_schema(grammars.ANY_OBJECT)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        grammars.from_json_schema(SCHEMA),
    ),
    ({"guided_json": SCHEMA}, grammars.from_json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, grammars.from_json_schema(SCHEMA)),
    ({"guided_regex": "a+"}, grammars.from_regex("a+")),
    ({"guided_choice": ["yes", "no"]}, grammars.from_choices(["yes", "no"])),
    ({"guided_grammar": 'root ::= "a"'}, grammars.from_notation('root ::= "a"')),
    ({"structured_outputs": {"regex": "b*", "json": None}}, grammars.from_regex("b*")),
    ({"structured_outputs": {"json_object": True}}, grammars.from_json_schema(grammars.ANY_OBJECT)),
]


@pytest.fixture(autouse=True)
def _reply(server: Server) -> None:
    server.script(Reply(list(b"ok")))


@pytest.mark.parametrize(("fields", "grammar"), CONSTRAINTS)
@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})], ids=["completions", "chat"]
)
async def test_constraints_reach_the_engine(
    server: Server, path: str, prompt: dict[str, Any], fields: dict[str, Any], grammar: str
) -> None:
    response = await server.post(path, **prompt, **fields, max_tokens=9)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers
    if server.engine is not None:
        assert server.engine.submissions[-1].params.grammar == grammar


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        "response_format",
        "foo",
    ),
    ({"guided_json": {"type": "string", "pattern": "(?!a)"}}, "guided_json", "look-around"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": {"type": "object", "not": {}}}, "guided_json", "not"),
    ({"guided_regex": "a("}, "guided_regex", "unclosed"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": [1]}, "guided_choice", "str"),
    ({"guided_grammar": "no grammar"}, "guided_grammar", "Expected"),
    ({"structured_outputs": {"yaml": "x"}}, "structured_outputs", "yaml"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs", "choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "one"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_what_cannot_be_followed_is_refused_with_its_reason(
    server: Server, fields: dict[str, Any], param: str, reason: str
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        error = await server.refusal(path, **prompt, **fields)
        assert error["param"] == param
        assert reason in error["message"]
    assert (await server.post(COMPLETIONS, prompt="x", max_tokens=1)).status_code == 200


async def test_without_a_tokenizer_nothing_can_be_constrained() -> None:
    async with in_process(None, eos_token_ids=[2]) as server:
        assert (await server.refusal(COMPLETIONS, prompt=[5], guided_regex="a"))["code"] == "no_tokenizer"


CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "old": {"type": "boolean"},
    },
    "required": ["name", "size", "old"],
    "additionalProperties": False,
}


@pytest.mark.model
async def test_whole_answers_of_the_default_model(smollm2: Server) -> None:
    """Through scheduler, executor and HTTP, streamed and not, with n, logprobs, seeds, stop strings, min_tokens."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}},
    }
    sampled = {**fields, "n": 3, "seed": 5, "temperature": 1.0}
    whole = await smollm2.answer(CHAT, **sampled, logprobs=True)
    for choice in whole["choices"]:
        assert set(json.loads(choice["message"]["content"])) == {"name", "size", "old"}
        assert choice["finish_reason"] == "stop"
    texts = dict.fromkeys(range(3), "")
    for event in await smollm2.events(CHAT, **sampled):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"]["content"]
    assert list(texts.values()) == [choice["message"]["content"] for choice in whole["choices"]]
    stopped = await smollm2.answer(CHAT, **fields, temperature=0, stop=['",'])
    assert stopped["choices"][0]["message"]["content"].startswith('{"name": "')
    assert '",' not in stopped["choices"][0]["message"]["content"]
    held = await smollm2.answer(CHAT, messages=MESSAGES, guided_choice=["no"], min_tokens=20, max_tokens=30)
    assert held["choices"][0]["message"]["content"] == "no"

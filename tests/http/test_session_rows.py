"""Sessions over HTTP: which request continues which, what is listed, 404 and 409, a client that leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runners.errors import ConflictError
from runners.messages import SessionFacts
from tests.support.http_server import Server, error_object
from tests.support.scripted_engine import Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_completions_append_and_chats_send_it_all(server: Server) -> None:
    server.needs_script("what reaches the engine")
    assert server.engine is not None
    server.script(Reply(list(b"ok")))
    await server.answer(COMPLETIONS, prompt="x", max_tokens=2, session_id="s1")
    await server.answer(CHAT, messages=MESSAGES, max_tokens=2, session_id="s2")
    await server.answer(CHAT, messages=MESSAGES, max_tokens=2)
    seen = [(s.session_id, s.append_to_session) for s in server.engine.submissions]
    assert seen == [("s1", True), ("s2", False), (None, False)]


@pytest.mark.parametrize(
    "fields", [{"session_id": ""}, {"session_id": "x" * 300}, {"session_id": "s", "n": 2}, {"session_id": 5}]
)
async def test_session_ids_that_cannot_be(server: Server, fields: dict[str, Any]) -> None:
    assert (await server.refusal(COMPLETIONS, prompt="x", **fields))["param"] == "session_id"
    assert (await server.refusal(CHAT, messages=MESSAGES, **fields))["param"] == "session_id"
    assert (await server.refusal(COMPLETIONS, prompt=["a", "b"], session_id="s"))["param"] == "session_id"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_in_use_is_a_conflict(server: Server, stream: bool) -> None:
    server.needs_script("a session that is in use")
    server.script(Reply(error=ConflictError("in use", param="session_id", code="session_busy")))
    response = await server.post(CHAT, messages=MESSAGES, session_id="s", stream=stream)
    assert response.status_code == 409
    assert error_object(response)["code"] == "session_busy"


async def test_sessions_are_listed_shown_and_deleted(server: Server) -> None:
    server.needs_script("known sessions")
    assert server.engine is not None
    server.engine.known_sessions = {
        "a/b": SessionFacts("a/b", 40, 3, 2, False, 1.5, 3598.5),
        "busy": SessionFacts("busy", 8, 1, 1, True, 0.0, None),
    }
    listed = (await server.client.get("/v1/sessions")).json()
    assert [session["id"] for session in listed["data"]] == ["a/b", "busy"]
    shown = (await server.client.get("/v1/sessions/a/b")).json()
    assert (shown["tokens"], shown["turns"], shown["busy"], shown["expires_in_s"]) == (40, 2, False, 3598.5)
    assert (await server.client.delete("/v1/sessions/busy")).status_code == 409
    assert (await server.client.delete("/v1/sessions/a/b")).json()["deleted"] is True
    for method in ("GET", "DELETE"):
        response = await server.client.request(method, "/v1/sessions/a/b")
        assert (response.status_code, error_object(response)["code"]) == (404, "session_not_found")
    assert (await server.client.delete("/v1/sessions")).status_code == 405
    assert (await server.client.post("/v1/sessions/busy")).status_code == 405


@pytest.mark.model
async def test_turns_of_the_default_model(smollm2: Server) -> None:
    """A second turn computes only what is new, and gives what one request with the whole history gives."""
    fields = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    first = await smollm2.answer(COMPLETIONS, prompt="The quick brown fox", session_id="turns", **fields)
    second = await smollm2.answer(COMPLETIONS, prompt=" and then", session_id="turns", **fields)
    choices = [answer["choices"][0] for answer in (first, second)]
    history = choices[0]["prompt_token_ids"] + choices[0]["token_ids"] + choices[1]["prompt_token_ids"]
    alone = await smollm2.answer(COMPLETIONS, prompt=history, cache_salt="alone", **fields)
    assert alone["choices"][0]["token_ids"] == choices[1]["token_ids"]
    session = (await smollm2.client.get("/v1/sessions/turns")).json()
    assert session["turns"] == 2
    assert session["tokens"] == len(history) + len(choices[1]["token_ids"])
    assert not session["busy"]
    filled = await smollm2.answer(COMPLETIONS, prompt="Only a prompt", session_id="filled", max_tokens=0)
    assert filled["choices"][0]["text"] == ""
    listed = (await smollm2.client.get("/v1/sessions")).json()["data"]
    assert {session["id"] for session in listed} >= {"turns", "filled"}
    for name in ("turns", "filled"):
        assert (await smollm2.client.delete(f"/v1/sessions/{name}")).status_code == 200
    assert (await smollm2.client.get("/v1/sessions/turns")).status_code == 404


@pytest.mark.model
async def test_a_client_gone_during_a_turn(smollm2: Server) -> None:
    fields = {"temperature": 0, "session_id": "gone"}
    first = await smollm2.answer(COMPLETIONS, prompt="One two three", max_tokens=6, **fields)
    turn = {"model": smollm2.model, "prompt": " four", "max_tokens": 800, "ignore_eos": True, **fields}
    async with smollm2.client.stream("POST", COMPLETIONS, json={**turn, "stream": True}) as response:
        lines = response.aiter_lines()  # kept: dropped, it would close the connection
        await anext(lines)
        refused = await smollm2.post(COMPLETIONS, prompt="x", **fields)
        assert (refused.status_code, error_object(refused)["code"]) == (409, "session_busy")
        assert (await smollm2.client.delete("/v1/sessions/gone")).status_code == 409
    session: dict[str, Any] = {"busy": True}
    async with asyncio.timeout(20):
        while session["busy"]:
            session = (await smollm2.client.get("/v1/sessions/gone")).json()
    assert session["turns"] == 1
    assert session["tokens"] == first["usage"]["total_tokens"]
    resent = await smollm2.answer(COMPLETIONS, prompt=" four", max_tokens=6, return_token_ids=True, **fields)
    assert resent["usage"]["completion_tokens"] == 6
    assert (await smollm2.client.delete("/v1/sessions/gone")).status_code == 200

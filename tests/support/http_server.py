"""The server under test of the HTTP tests: our app in process with a scripted engine, or one behind a URL."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from runners.api.app import create_app
from runners.api.settings import ApiSettings
from runners.request import SamplingParams
from runners.text.assets import load_text
from tests.support.scripted_engine import Reply, ScriptedEngine, model_info

_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

Script = Reply | Callable[[list[int], SamplingParams], Reply]


@dataclass
class Server:
    """`engine` is None when the tests talk to a server that somebody else started."""

    client: httpx.AsyncClient
    model: str
    vocab_size: int
    max_context: int
    engine: ScriptedEngine | None = None

    def script(self, reply: Script) -> None:
        """What the engine says next; a foreign server says what it likes."""
        if self.engine is not None:
            self.engine.reply = reply

    def needs_script(self, why: str) -> None:
        if self.engine is None:
            pytest.skip(f"needs a scripted reply: {why}")

    async def post(self, path: str, **body: Any) -> httpx.Response:
        if self.engine is None and path in _GENERATING and "session_id" not in body:  # a session keeps to one salt
            # Many a server's kernels round by the shape of a pass: equal answers need equal passes, no cached prefix.
            body.setdefault("cache_salt", uuid.uuid4().hex)
        return await self.client.post(path, json={"model": self.model, **body})

    async def answer(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Data events of a stream, without the final [DONE] that must be there."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    async def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        return await self.answer("/v1/completions", prompt=prompt, **body)

    async def refusal(self, path: str, **body: Any) -> dict[str, Any]:
        """The error object of a request that must be refused with 400."""
        response = await self.post(path, **body)
        assert response.status_code == 400, (response.status_code, response.text)
        return error_object(response)

    async def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        answer = await self.answer("/tokenize", prompt=text, add_special_tokens=add_special_tokens)
        ids: list[int] = answer["tokens"]
        return ids


def error_object(response: httpx.Response) -> dict[str, Any]:
    """The OpenAI error object, its shape and size checked."""
    assert len(response.content) < 4096
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def text_of(events: list[dict[str, Any]]) -> str:
    """The joined text of a one-choice stream of either kind."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finish_reasons(events: list[dict[str, Any]]) -> list[str]:
    return [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"] is not None]


def scripted_app(
    folder: Path | None, *, eos_token_ids: list[int], max_context: int = 2048
) -> tuple[Starlette, ScriptedEngine]:
    """Our app with a scripted engine and the text side of `folder`; without a folder a model of 300 bare ids."""
    assets = None if folder is None else load_text(folder)
    vocab_size = 300 if assets is None or assets.tokenizer is None else assets.tokenizer.vocab_size
    info = model_info(vocab_size=vocab_size, max_context=max_context, eos_token_ids=eos_token_ids)
    engine = ScriptedEngine(info=info)
    return create_app(ApiSettings(), engine, {} if assets is None else {"tiny": assets}), engine


@asynccontextmanager
async def in_process(folder: Path | None, *, eos_token_ids: list[int]) -> AsyncIterator[Server]:
    """The same over httpx's ASGI transport."""
    app, engine = scripted_app(folder, eos_token_ids=eos_token_ids)
    info = engine.models[0]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Server(client, "tiny", info.vocab_size, info.max_context, engine)

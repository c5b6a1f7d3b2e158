"""Over real sockets: the official client, clients that leave, clients that read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from runners.errors import RateLimitError
from tests.support.http_server import scripted_app
from tests.support.live_server import LiveServer, live_server
from tests.support.scripted_engine import Reply
from tests.support.tiny_tokenizers import EOS

MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def live(byte_level_folder: Path) -> Iterator[LiveServer]:
    app, engine = scripted_app(byte_level_folder, eos_token_ids=[EOS], max_context=1 << 20)
    with live_server(app, engine) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_openai_client_chat(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.reply = Reply([*"Héllo 😀".encode(), EOS])
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "Héllo 😀"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Héllo 😀".encode()) + 1
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == answer.usage.completion_tokens

    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Héllo 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == answer.usage


def test_openai_client_completions(live: LiveServer, client: openai.OpenAI) -> None:
    live.engine.reply = Reply(list(b"hello world"))
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["ahello", "bhello"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "h", "e", "l", "l", "o"]
    chunks = list(client.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
    assert len(chunks) == 5


def test_openai_client_models_and_errors(live: LiveServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert not_found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad_request:
        client.completions.create(model="tiny", prompt=[1] * 8, max_tokens=1 << 20)
    assert bad_request.value.code == "context_length_exceeded"
    live.engine.submit_error = RateLimitError("The queue is full.", retry_after_s=3)
    with pytest.raises(openai.RateLimitError) as rate_limit:
        client.completions.create(model="tiny", prompt="x")
    assert rate_limit.value.response.headers["retry-after"] == "3"


async def _request(live: LiveServer, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a completion over a socket of our own, so that we can drop or ignore it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    content = json.dumps({"model": "tiny", "prompt": "x", **body}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gone_before_the_first_token(live: LiveServer, stream: bool) -> None:
    live.engine.reply = Reply([65], gate=asyncio.Event())
    _, writer = await _request(live, {"stream": stream})
    submission = await asyncio.to_thread(live.wait_for_submission)
    assert not submission.is_aborted
    writer.close()
    await asyncio.to_thread(live.wait_until, lambda: submission.is_aborted)


@pytest.mark.parametrize("body", [{"stream": True}, {"stream": True, "n": 3}, {"stream": False}, {"n": 2}])
async def test_client_gone_in_the_middle(live: LiveServer, body: dict[str, object]) -> None:
    live.engine.reply = Reply([65] * 500_000)
    reader, writer = await _request(live, {**body, "max_tokens": 500_000})
    if body.get("stream"):
        await reader.readuntil(b'"text":"A"')
    submission = await asyncio.to_thread(live.wait_for_submission)
    writer.close()
    await asyncio.to_thread(live.wait_until, lambda: submission.is_aborted)
    assert all(other.is_aborted for other in live.engine.submissions)


async def test_a_slow_reader_holds_its_stream_back(live: LiveServer) -> None:
    """The engine's stream is read no faster than the client reads, so that its tokens merge there."""
    live.engine.reply = Reply([65] * 400_000)
    reader, writer = await _request(live, {"stream": True, "max_tokens": 400_000})
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    await reader.readuntil(b'"text":"A"')
    submission = live.engine.submissions[0]
    before = -1
    while submission.tokens_read != before:  # until it stands still
        before = submission.tokens_read
        await asyncio.sleep(0.3)
    assert 0 < before < 400_000
    writer.close()
    await asyncio.to_thread(live.wait_until, lambda: submission.is_aborted)

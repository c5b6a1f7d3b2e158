"""CPU per SSE event of our own part of the HTTP process: request stream, detokeniser, stop matcher, event bytes.

No server and no sockets: what BentoML and uvicorn add is measured by the HTTP path benchmark. One event a token.

    python -m benchmarks.sse_writer [--streams 64] [--tokens 200]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import time
from typing import Any

import msgspec
import tokenizers

from runners.api.app import create_app
from runners.api.settings import ApiSettings
from runners.engine_state import EnginePhase, EngineState
from runners.messages import EngineInput, EngineStats, ModelInfo, TokenLogprobs
from runners.request import FinishReason, SamplingParams
from runners.request_metrics import RequestTimes
from runners.request_stream import OutputChunk, RequestStream
from runners.text.assets import TextAssets
from runners.text.chat_template import CHATML_TEMPLATE, ChatTemplate
from runners.text.pieces import BYTE_LEVEL_ALPHABET, pieces_of
from runners.text.tokenizer import Tokenizer

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
STOPS = {"stop": ["never this", "nor that"]}
MESSAGES = {"messages": [{"role": "user", "content": "A"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "never_called"}}]}
LOGPROBS = {"logprobs": True, "top_logprobs": 5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, {}),
    "completions, token ids": (COMPLETIONS, {"return_token_ids": True}),
    "completions, two stop strings": (COMPLETIONS, STOPS),
    "completions, 5 logprobs": (COMPLETIONS, {"logprobs": 5}),
    "completions, stops and 5 logprobs": (COMPLETIONS, {**STOPS, "logprobs": 5}),
    "completions, all of it": (COMPLETIONS, {"return_token_ids": True, **STOPS, "logprobs": 5}),
    "chat": (CHAT, MESSAGES),
    "chat, stops and 5 logprobs": (CHAT, {**MESSAGES, **STOPS, **LOGPROBS}),
    "chat, tools": (CHAT, {**MESSAGES, **TOOLS}),
    "chat, tools, stops and 5 logprobs": (CHAT, {**MESSAGES, **TOOLS, **STOPS, **LOGPROBS}),
    "responses": (RESPONSES, {"input": "A"}),
}


def byte_tokenizer() -> Tokenizer:
    """A byte-level vocabulary of 256 tokens: printable ASCII tokens take the same path as whole words."""
    vocabulary = dict(BYTE_LEVEL_ALPHABET)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(pieces_of(backend, "benchmark"))


class PacedEngine:
    """Hands every stream one token a step, as an engine message would."""

    state = EngineState(EnginePhase.READY, since=0.0)
    stats = EngineStats()
    is_ready = True

    def __init__(self, num_streams: int) -> None:
        self.all_submitted = asyncio.Event()
        self._num_streams = num_streams
        self.streams: list[RequestStream] = []
        self.models = [
            ModelInfo(["m"], "", "", "llama", 256, 1 << 20, [], "", "", 0, 0, "", "", 64, 16, 0, 0, 0.0),
        ]

    async def submit(
        self, model: str, prompt_ids: list[int], params: SamplingParams, *, request_id: str, **_: Any
    ) -> RequestStream:
        stream = RequestStream(self, request_id, RequestTimes(time.monotonic(), len(prompt_ids)))
        self.streams.append(stream)
        if len(self.streams) == self._num_streams:
            self.all_submitted.set()
        return stream

    def close_stream(self, stream: RequestStream, reason: str) -> bool:
        return False

    def send(self, message: EngineInput) -> None:
        pass


async def measure(path: str, fields: dict[str, Any], num_streams: int, num_tokens: int) -> float:
    """CPU microseconds of this process per event."""
    engine = PacedEngine(num_streams)
    assets = TextAssets(byte_tokenizer(), ChatTemplate(CHATML_TEMPLATE), frozenset(), None)
    app = create_app(ApiSettings(), engine, {"m": assets})
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    prompt = {"prompt": [65] * 23} if path == COMPLETIONS else {}
    body = msgspec.json.encode({**prompt, limit: num_tokens, "stream": True, **fields})
    num_bodies = 0

    async def serve() -> None:
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if pending:
                return pending.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal num_bodies
            num_bodies += message["type"] == "http.response.body"

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "root_path": ""}
        await app(scope, receive, send)

    tasks = [asyncio.ensure_future(serve()) for _ in range(num_streams)]
    await engine.all_submitted.wait()
    entry = TokenLogprobs(97, -0.5, [97, 98, 99, 100, 101], [-0.5, -1.0, -2.0, -3.0, -4.0])
    logprobs = [entry] if "logprobs" in fields else None
    start = resource.getrusage(resource.RUSAGE_SELF)
    for step in range(num_tokens):
        reason = FinishReason.LENGTH if step == num_tokens - 1 else None
        for stream in engine.streams:
            stream.push(OutputChunk([97 + step % 26], reason, logprobs))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    end = resource.getrusage(resource.RUSAGE_SELF)
    if num_bodies != num_streams * num_tokens:
        raise RuntimeError(f"{num_bodies} events for {num_streams * num_tokens} tokens: tokens were merged")
    return (end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime) / num_bodies * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for name, (path, fields) in CASES.items():
        rounds = range(arguments.rounds)
        figures = [asyncio.run(measure(path, fields, arguments.streams, arguments.tokens)) for _ in rounds]
        print(f"{name:34} {statistics.median(figures):6.2f} µs of CPU an event (best {min(figures):.2f})")


if __name__ == "__main__":
    main()

"""`POST /v1/responses`: OpenAI's Responses API, stateless, on top of chat."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from runners.api.chat import ChatCompletions
from runners.api.chat_choice import ChatChoice
from runners.api.chat_parsing import Parsing, parsing_of
from runners.api.endpoint import Exchange
from runners.api.errors import as_wavelane_error, error_body
from runners.api.generation import Choice, Delta, TextOptions
from runners.api.generation_endpoint import Generation
from runners.api.interfaces import RequestStream
from runners.api.logprobs import chat_logprobs
from runners.api.prompts import Prompt
from runners.api.protocol import ChatCompletionRequest, RequestParser, ResponsesRequest
from runners.api.responses_events import Event, ResponseBuilder
from runners.api.responses_input import PARAM_NAMES, ResponsesChatRequest, chat_request
from runners.api.sse import DONE, SSE_HEADERS
from runners.api.tools import ToolChoice, ToolUse, new_call_id
from runners.errors import WavelaneError
from runners.request import FinishReason
from runners.text.tool_formats import ToolFormat

_PLAIN = Parsing(ToolUse(ToolChoice.NONE), ToolFormat.JSON, thinks=False, thought_is_open=False)


class Responses(ChatCompletions):
    """One response a request; its items are built by the same code streamed and not."""

    id_prefix = "resp"
    _responses_parser = RequestParser(ResponsesRequest)

    async def handle(self, exchange: Exchange) -> None:
        request = await self.parse_body(exchange, self._responses_parser)
        try:
            await exchange.until_disconnect(self._generate(exchange, chat_request(request)))
        except WavelaneError as error:
            error.param = PARAM_NAMES.get(error.param or "", error.param)
            raise

    def make_choice(
        self,
        generation: Generation[ChatCompletionRequest],
        prompt: Prompt,
        stream: RequestStream,
        options: TextOptions,
    ) -> Choice:
        parsing = parsing_of(generation.request, generation.assets, prompt) or _PLAIN
        return ChatChoice(len(generation.choices), prompt, stream, options, parsing)

    def answer(self, generation: Generation[ChatCompletionRequest], results: list[Delta]) -> bytes:
        builder = _builder_of(generation)
        self._push(generation, builder, results[0])
        status = _status(generation)
        builder.finish(status)
        return msgspec.json.encode(_response(generation, builder, status))

    async def stream(self, exchange: Exchange, generation: Generation[ChatCompletionRequest]) -> None:
        """The typed events; an error is the last one, in OpenAI's form for this stream and in ours."""
        (choice,) = generation.choices
        builder = _builder_of(generation)
        await exchange.start(200, SSE_HEADERS)
        try:
            for kind in ("response.created", "response.in_progress"):
                builder.event(kind, response=_response(generation, builder, "in_progress"))
            async for delta in choice.deltas():
                self._push(generation, builder, delta)
                if choice.finish_reason is not None:
                    status = _status(generation)
                    builder.finish(status)
                    builder.event(f"response.{status}", response=_response(generation, builder, status))
                await _send(exchange, builder.take(), is_last=choice.finish_reason is not None)
        except Exception as raised:  # the answer has begun: whatever it is, the client can only be told in the stream
            error = msgspec.json.decode(error_body(as_wavelane_error(raised)))["error"]
            builder.event("error", code=error["code"], message=error["message"], param=error["param"], error=error)
            await _send(exchange, builder.take(), is_last=True, end=DONE)

    def _push(self, generation: Generation[ChatCompletionRequest], builder: ResponseBuilder, delta: Delta) -> None:
        logprobs = None
        if generation.request.logprobs:
            logprobs = chat_logprobs(delta.logprobs or (), generation.token_texts)["content"]
        assert delta.message is not None
        builder.push(delta.message, logprobs)


async def _send(exchange: Exchange, events: list[Event], *, is_last: bool, end: bytes = b"") -> None:
    parts = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events]
    await exchange.send({"type": "http.response.body", "body": b"".join(parts) + end, "more_body": not is_last})


def _builder_of(generation: Generation[ChatCompletionRequest]) -> ResponseBuilder:
    (choice,) = generation.choices
    assert isinstance(choice, ChatChoice)
    return ResponseBuilder(partial(new_call_id, choice.tool_format))


def _status(generation: Generation[ChatCompletionRequest]) -> str:
    return "incomplete" if generation.choices[0].finish_reason is FinishReason.LENGTH else "completed"


def _response(generation: Generation[ChatCompletionRequest], builder: ResponseBuilder, status: str) -> dict[str, Any]:
    """The response object as it stands."""
    assert isinstance(generation.request, ResponsesChatRequest)
    request = generation.request.original
    has_ended = status != "in_progress"
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": generation.model,
        "output": builder.items if has_ended else [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": _usage(generation, builder) if has_ended else None,
        "user": request.user,
    }


def _usage(generation: Generation[ChatCompletionRequest], builder: ResponseBuilder) -> dict[str, Any]:
    usage = generation.usage()
    tokenizer = None if generation.assets is None else generation.assets.tokenizer
    # Counted in its text: how the tokens came does not tell where the thought ends.
    thought = [] if tokenizer is None else tokenizer.encode(builder.reasoning, add_special_tokens=False)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": len(thought)},
        "total_tokens": usage["total_tokens"],
    }

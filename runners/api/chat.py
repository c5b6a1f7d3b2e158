"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from runners.api.chat_choice import ChatChoice, MessageEvents, message_object
from runners.api.chat_parsing import chat_grammar, parser_markers, parsing_of
from runners.api.generation import Choice, Delta, TextOptions
from runners.api.generation_endpoint import Generation, GenerationEndpoint
from runners.api.interfaces import RequestStream
from runners.api.logprobs import chat_logprobs, prompt_logprobs
from runners.api.prompts import Prompt, render_chat
from runners.api.protocol import ChatCompletionRequest, RequestParser
from runners.api.sse import EventTemplate, EventWriter
from runners.api.validation import check_token_ids
from runners.messages import ModelInfo
from runners.text.assets import TextAssets


class ChatCompletions(GenerationEndpoint[ChatCompletionRequest]):
    parser = RequestParser(ChatCompletionRequest)
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    async def prompts(self, request: ChatCompletionRequest, info: ModelInfo, assets: TextAssets | None) -> list[Prompt]:
        prompt = await render_chat(
            request,
            assets,
            self.threads,
            with_tools=request.tool_choice != "none",
            max_context=info.max_context,
        )
        check_token_ids(prompt.ids, info.vocab_size, "messages")
        return [prompt]

    def default_max_tokens(self) -> int | None:
        return None

    def grammar(
        self, request: ChatCompletionRequest, assets: TextAssets | None, prompts: Sequence[Prompt]
    ) -> tuple[str, str]:
        return chat_grammar(request, assets, prompts[0])

    def shown_specials(self, request: ChatCompletionRequest, assets: TextAssets | None) -> dict[int, str]:
        return parser_markers(request, assets)

    def make_choice(
        self,
        generation: Generation[ChatCompletionRequest],
        prompt: Prompt,
        stream: RequestStream,
        options: TextOptions,
    ) -> Choice:
        parsing = parsing_of(generation.request, generation.assets, prompt)
        if parsing is None:
            return super().make_choice(generation, prompt, stream, options)
        return ChatChoice(len(generation.choices), prompt, stream, options, parsing)

    def template(self, generation: Generation[ChatCompletionRequest], choice: Choice) -> EventWriter:
        request = generation.request
        start = b"data: " + msgspec.json.encode(self.envelope(generation))[:-1]
        first = b""
        if request.return_token_ids and choice.index == 0:
            first = b',"prompt_token_ids":' + msgspec.json.encode(choice.prompt.ids)
        if isinstance(choice, ChatChoice):
            delta = b',"choices":[{"index":%d,"delta":' % choice.index
            return MessageEvents(
                start + first + delta,
                start + delta,
                choice.tool_format,
                token_texts=generation.token_texts if request.logprobs else None,
                with_token_ids=bool(request.return_token_ids),
                with_usage=generation.includes_usage,
            )
        delta = b',"choices":[{"index":%d,"delta":{' % choice.index
        # The role travels with the first token: one event a token, as for completions.
        return EventTemplate(
            start + first + delta + b'"role":"assistant","content":',
            start + delta + b'"content":',
            text_end=b"}",
            logprobs=(lambda delta: chat_logprobs(delta.logprobs or (), generation.token_texts))
            if request.logprobs
            else None,
            with_token_ids=bool(request.return_token_ids),
            with_usage=generation.includes_usage,
        )

    def answer(self, generation: Generation[ChatCompletionRequest], results: list[Delta]) -> bytes:
        request = generation.request
        answer: dict[str, Any] = {**self.envelope(generation), "object": "chat.completion"}
        answer["choices"] = [
            self._choice(generation, choice, result) for choice, result in zip(generation.choices, results, strict=True)
        ]
        answer["usage"] = generation.usage()
        if request.return_token_ids:
            answer["prompt_token_ids"] = generation.prompts[0].ids
        if request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs or (), generation.token_texts)
        return msgspec.json.encode(answer)

    def _choice(self, generation: Generation[ChatCompletionRequest], choice: Choice, result: Delta) -> dict[str, Any]:
        request = generation.request
        whole: dict[str, Any] = {
            "index": choice.index,
            "message": message_object(choice, result),
            "logprobs": chat_logprobs(result.logprobs or (), generation.token_texts) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if request.return_token_ids:
            whole["token_ids"] = result.token_ids
        return whole

"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from runners.api.generation import Choice, Delta
from runners.api.generation_endpoint import Generation, GenerationEndpoint
from runners.api.logprobs import CompletionLogprobs, prompt_logprobs
from runners.api.prompts import Prompt, encode_prompts, split_prompts
from runners.api.protocol import CompletionRequest, RequestParser
from runners.api.sse import EventTemplate
from runners.messages import ModelInfo, TokenLogprobs
from runners.text.assets import TextAssets


class Completions(GenerationEndpoint[CompletionRequest]):
    parser = RequestParser(CompletionRequest)
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    prompt_field = "prompt"

    async def prompts(self, request: CompletionRequest, info: ModelInfo, assets: TextAssets | None) -> list[Prompt]:
        return await encode_prompts(
            split_prompts(request.prompt, self.settings.max_prompts),
            assets,
            self.threads,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            add_special_tokens=request.add_special_tokens is not False,
        )

    def default_max_tokens(self) -> int | None:
        return self.settings.default_max_tokens

    def echo(self, generation: Generation[CompletionRequest], prompt: Prompt) -> str:
        if not generation.request.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        tokenizer = None if generation.assets is None else generation.assets.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(prompt.ids, skip_special_tokens=generation.skips_special_tokens)

    def template(self, generation: Generation[CompletionRequest], choice: Choice) -> EventTemplate:
        request = generation.request
        start = msgspec.json.encode(self.envelope(generation))[:-1] + b',"choices":[{"index":%d,' % choice.index
        first = b""
        if request.return_token_ids:
            first = b'"prompt_token_ids":' + msgspec.json.encode(choice.prompt.ids) + b","
        return EventTemplate(
            b"data: " + start + first + b'"text":',
            b"data: " + start + b'"text":',
            logprobs=None if request.logprobs is None else _LogprobsOfChoice(generation, choice).of,
            with_token_ids=bool(request.return_token_ids),
            with_usage=generation.includes_usage,
        )

    def answer(self, generation: Generation[CompletionRequest], results: list[Delta]) -> bytes:
        choices = [
            self._choice(generation, choice, result) for choice, result in zip(generation.choices, results, strict=True)
        ]
        return msgspec.json.encode({**self.envelope(generation), "choices": choices, "usage": generation.usage()})

    def _choice(self, generation: Generation[CompletionRequest], choice: Choice, result: Delta) -> dict[str, Any]:
        request = generation.request
        whole: dict[str, Any] = {
            "index": choice.index,
            "text": result.text,
            "logprobs": None if request.logprobs is None else _LogprobsOfChoice(generation, choice).of(result),
            "finish_reason": choice.finish_reason,
        }
        if request.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs or (), generation.token_texts)
        if request.return_token_ids:
            whole["token_ids"] = result.token_ids
            whole["prompt_token_ids"] = choice.prompt.ids
        return whole


class _LogprobsOfChoice:
    """The `logprobs` objects of one choice in order; with `echo` the prompt's entries come before the first token's."""

    def __init__(self, generation: Generation[CompletionRequest], choice: Choice) -> None:
        self._formatter = CompletionLogprobs(
            generation.token_texts, skip_special_tokens=generation.skips_special_tokens
        )
        self._echo = bool(generation.request.echo)
        self._first_token_id = choice.prompt.ids[0]

    def of(self, delta: Delta) -> dict[str, Any]:
        entries: Sequence[TokenLogprobs | None] = delta.logprobs or ()
        if self._echo and delta.prompt_logprobs is not None:
            entries = [*delta.prompt_logprobs, *entries]
        return self._formatter.format(entries, self._first_token_id)

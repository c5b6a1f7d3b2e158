"""`POST /tokenize` and `POST /detokenize`: text or messages to ids and back, as the other endpoints do it."""

from __future__ import annotations

from typing import Any

import msgspec

from runners.api.endpoint import Endpoint, Exchange
from runners.api.logprobs import TokenTexts
from runners.api.prompts import TextThreads, check_text_length, render_chat, require_text
from runners.api.protocol import DetokenizeRequest, RequestParser, TokenizeRequest
from runners.api.validation import check_token_ids
from runners.errors import InvalidRequestError

# What does not fit the context may be counted, but megabytes would keep a thread for a minute.
MAX_CONTEXTS = 8


class Tokenize(Endpoint):
    """Ids of `prompt` as completions would see it, or of `messages` as chat would. An empty text has no ids."""

    _parser = RequestParser(TokenizeRequest)

    async def handle(self, exchange: Exchange) -> None:
        request = await self.parse_body(exchange, self._parser)
        _, info = self.model(request.model)
        assets = self.text_assets(info)
        _, tokenizer = require_text(assets, "prompt" if request.messages is None else "messages")
        threads: TextThreads = self._state.threads
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequestError("Send either 'prompt' or 'messages'.", param="prompt")
        if request.prompt is not None:
            text, special = request.prompt, request.add_special_tokens is not False
            check_text_length(len(text), tokenizer, MAX_CONTEXTS * info.max_context, "prompt")
            ids = await threads.run(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
        else:
            chars = sum(len(str(message.get("content"))) for message in request.messages or ())
            check_text_length(chars, tokenizer, MAX_CONTEXTS * info.max_context, "messages")
            ids = (await render_chat(request, assets, threads, with_tools=True)).ids
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_context, "tokens": ids}
        if request.return_token_strs:
            texts = TokenTexts(tokenizer)
            answer["token_strs"] = [texts.text(token_id) for token_id in ids]
        await exchange.reply(msgspec.json.encode(answer))


class Detokenize(Endpoint):
    """The text of `tokens`, special tokens included."""

    _parser = RequestParser(DetokenizeRequest)

    async def handle(self, exchange: Exchange) -> None:
        request = await self.parse_body(exchange, self._parser)
        _, info = self.model(request.model)
        _, tokenizer = require_text(self.text_assets(info), "tokens")
        if request.tokens is None:
            raise InvalidRequestError("Missing required field: 'tokens'.", param="tokens")
        if len(request.tokens) > MAX_CONTEXTS * info.max_context:
            raise InvalidRequestError(
                f"Invalid value for 'tokens': {len(request.tokens)} ids, at most {MAX_CONTEXTS * info.max_context} are "
                "allowed here.",
                param="tokens",
            )
        check_token_ids(request.tokens, info.vocab_size, "tokens")
        ids = request.tokens
        threads: TextThreads = self._state.threads
        text = await threads.run(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
        await exchange.reply(msgspec.json.encode({"prompt": text}))

"""`POST /v1/embeddings`: the pooled, normalised hidden states of each input."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import Any

import msgspec

from runners.api import validation
from runners.api.endpoint import Endpoint, Exchange, new_id
from runners.api.interfaces import RequestStream
from runners.api.prompts import Prompt, TextThreads, encode_prompts, split_prompts
from runners.api.protocol import EmbeddingRequest, RequestParser
from runners.errors import InvalidRequestError, RequestFailedError
from runners.request import SamplingParams


class Embeddings(Endpoint):
    """One vector an input, in the order of the inputs. Inputs are computed at once, as far as the engine has room."""

    _parser = RequestParser(EmbeddingRequest)

    async def handle(self, exchange: Exchange) -> None:
        request = await self.parse_body(exchange, self._parser)
        await exchange.until_disconnect(self._embed(exchange, request))

    async def _embed(self, exchange: Exchange, request: EmbeddingRequest) -> None:
        model, info = self.model(request.model)
        if request.encoding_format not in (None, "float", "base64"):
            raise InvalidRequestError(
                "Invalid value for 'encoding_format': must be float or base64.", param="encoding_format"
            )
        threads: TextThreads = self._state.threads
        prompts = await encode_prompts(
            split_prompts(request.input, self.settings.max_prompts, "input"),
            self.text_assets(info),
            threads,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            add_special_tokens=True,
            param="input",
        )
        for prompt in prompts:
            validation.max_tokens_for(len(prompt.ids), 0, None, info.max_context, param="input")
        vectors = await self._vectors(
            model,
            info.pooling,
            prompts,
            validation.priority(request, self.settings.most_urgent_of(exchange.key_id)),
            exchange.key_id,
        )
        _check_dimensions(request, vectors)
        is_base64 = request.encoding_format == "base64"
        num_tokens = sum(len(prompt.ids) for prompt in prompts)
        answer: dict[str, Any] = {
            "object": "list",
            "model": model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, is_base64)}
                for index, vector in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        await exchange.reply(msgspec.json.encode(answer))

    async def _vectors(
        self, model: str, pooling: str, prompts: list[Prompt], priority: int, key_id: str
    ) -> list[bytes]:
        """The first error ends them all."""
        params = SamplingParams(max_tokens=0, pooling=pooling)
        streams: list[RequestStream] = []
        request_id = f"embd-{new_id()}"
        try:
            for index, prompt in enumerate(prompts):
                stream = await self.engine.submit(
                    model,
                    prompt.ids,
                    params,
                    request_id=f"{request_id}-{index}",
                    priority=priority,
                    key_id=key_id,
                    deadline_s=self.settings.request_deadline_s,
                )
                streams.append(stream)
            return [await _vector(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.abort()


async def _vector(stream: RequestStream) -> bytes:
    async for chunk in stream:
        if chunk.embedding:
            return chunk.embedding
    raise RequestFailedError("The engine ended the request without an embedding.")


def _check_dimensions(request: EmbeddingRequest, vectors: list[bytes]) -> None:
    size = len(vectors[0]) // 4
    if request.dimensions is not None and request.dimensions != size:
        raise InvalidRequestError(
            f"Invalid value for 'dimensions': this model's embeddings have {size} and cannot be shortened.",
            param="dimensions",
        )


def _encoded(vector: bytes, is_base64: bool) -> str | list[float]:
    if is_base64:
        return base64.b64encode(vector).decode("ascii")
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()

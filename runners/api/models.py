"""`/v1/models` and `/v1/models/{id}`: what is served, with the facts an operator or a router wants."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.datastructures import State

from runners.api.endpoint import Endpoint, Exchange
from runners.errors import ModelNotFoundError
from runners.messages import ModelInfo


def _model_object(name: str, info: ModelInfo, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "wavelane",
        "root": info.source,
        "max_model_len": info.max_context,
        "architecture": info.architecture,
        "parameters": info.parameters,
        "vocab_size": info.vocab_size,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "device": info.device,
        "slots": info.slots,
        "kv_bytes": info.kv_bytes,
        "total_blocks": info.total_blocks,
        "block_tokens": info.block_tokens,
        "peak_concurrency": info.peak_concurrency,
        "inputs": ["text", "token_ids"],
        "outputs": ["text", "token_ids", "logprobs"],
    }


class Models(Endpoint):
    """The list, or the one model of the path. The list is empty until the engine has loaded its model."""

    methods = ("GET", "HEAD")

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._created = int(time.time())

    async def handle(self, exchange: Exchange) -> None:
        objects = [
            _model_object(name, info, self._created) for info in self.engine.models for name in info.served_names
        ]
        wanted: str | None = exchange.scope["path_params"].get("model_id")
        if wanted is None:
            await exchange.reply(msgspec.json.encode({"object": "list", "data": objects}))
            return
        for found in objects:
            if found["id"] == wanted:
                await exchange.reply(msgspec.json.encode(found))
                return
        raise ModelNotFoundError(f"The model {wanted!r} does not exist.", param="model")

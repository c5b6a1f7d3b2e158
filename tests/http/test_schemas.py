"""JSON schemas as response formats of the default model: nearly all answers are complete, every complete one valid.

Every tenth of the 200 is asked for, or every `WAVELANE_TEST_SCHEMA_STEP`-th.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import jsonschema
import pytest

from tests.support.http_server import Server
from tests.support.json_schemas import all_schemas

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
MAX_TOKENS = 512
STEP = int(os.environ.get("WAVELANE_TEST_SCHEMA_STEP", "10"))


async def answer(server: Server, schema: dict[str, Any]) -> str | None:
    """The text of a complete answer, None for one that ran into its limit."""
    task = f"Make up an example and write it as JSON by this schema: {json.dumps(schema)[:600]}"
    wanted = {"type": "json_schema", "json_schema": {"name": "example", "strict": True, "schema": schema}}
    choice = (
        await server.answer(
            CHAT,
            messages=[{"role": "user", "content": task}],
            response_format=wanted,
            max_tokens=MAX_TOKENS,
            temperature=0.7,
            seed=1,
        )
    )["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    text: str = choice["message"]["content"]
    return text if choice["finish_reason"] == "stop" else None


async def check(server: Server, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every complete answer is valid; returns the schemas whose answers are not complete."""
    room = asyncio.Semaphore(8)

    async def one(schema: dict[str, Any]) -> str | None:
        async with room:
            return await answer(server, schema)

    texts = await asyncio.gather(*map(one, schemas))
    for schema, text in zip(schemas, texts, strict=True):
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return [schema for schema, text in zip(schemas, texts, strict=True) if text is None]


def test_the_set() -> None:
    schemas = all_schemas()
    assert len({json.dumps(schema, sort_keys=True) for schema in schemas}) == 200
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.timeout(3600)
async def test_answers_are_complete_and_valid(smollm2: Server) -> None:
    schemas = all_schemas()[::STEP]
    incomplete = await check(smollm2, schemas)
    assert len(incomplete) <= len(schemas) * 0.05, incomplete

"""The server under test: our app in process with a scripted engine, or any server by `--base-url`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.http_server import Server, in_process
from tests.support.tiny_tokenizers import EOS, write_byte_level, write_sentencepiece_style


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture
async def server(request: pytest.FixtureRequest, byte_level_folder: Path) -> AsyncIterator[Server]:
    """A byte-level model with a chat template, or the server of `--base-url`."""
    base_url: str | None = request.config.getoption("--base-url")
    if base_url is not None:
        async with httpx.AsyncClient(base_url=base_url, timeout=120) as client:
            model = (await client.get("/v1/models")).json()["data"][0]
            yield Server(client, model["id"], model["vocab_size"], model["max_model_len"])
        return
    async with in_process(byte_level_folder, eos_token_ids=[EOS]) as served:
        yield served


@pytest.fixture
async def sentencepiece_server(tmp_path: Path) -> AsyncIterator[Server]:
    async with in_process(write_sentencepiece_style(tmp_path), eos_token_ids=[2]) as served:
        yield served

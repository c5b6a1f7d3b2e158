"""The server under test: our app in process with a scripted engine, or any server by `--base-url`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.engine_server import engine_server, server_at
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
        async with server_at(base_url) as served:
            yield served
        return
    async with in_process(byte_level_folder, eos_token_ids=[EOS]) as served:
        yield served


@pytest.fixture
async def sentencepiece_server(tmp_path: Path) -> AsyncIterator[Server]:
    async with in_process(write_sentencepiece_style(tmp_path), eos_token_ids=[2]) as served:
        yield served


@pytest.fixture(scope="session")
def smollm2_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The default model behind the whole server: engine process, torch executor, HTTP; or `--base-url`."""
    base_url: str | None = request.config.getoption("--base-url")
    if base_url is not None:
        yield base_url
        return
    with engine_server(str(request.getfixturevalue("smollm2_path"))) as url:
        yield url


@pytest.fixture
async def smollm2(smollm2_url: str) -> AsyncIterator[Server]:
    async with server_at(smollm2_url) as served:
        yield served

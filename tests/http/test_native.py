"""BentoML's own endpoint beside the OpenAI routes."""

from __future__ import annotations

from pathlib import Path

import bentoml
import pytest
from bentoml.exceptions import BentoMLException

from deploy.bentoml_client import generate
from runners.api.native import NativeCompletions
from runners.api.protocol import CompletionRequest
from runners.errors import AuthenticationError, InvalidRequestError
from tests.support.http_server import scripted_app
from tests.support.scripted_engine import Reply
from tests.support.server import BentoServer
from tests.support.tiny_tokenizers import EOS


async def test_pieces_of_text(byte_level_folder: Path) -> None:
    app, engine = scripted_app(byte_level_folder, eos_token_ids=[EOS])
    engine.reply = Reply([*"Hé, stop".encode(), EOS])
    completions = NativeCompletions(app.state)
    pieces = [piece async for piece in completions.stream(CompletionRequest(prompt="x", max_tokens=20, stop="stop"))]
    assert "".join(pieces) == "Hé, "
    assert len(pieces) == 4
    assert engine.submissions[0].kept_tokens == 9


async def test_what_is_refused_and_what_is_left_early(byte_level_folder: Path) -> None:
    app, engine = scripted_app(byte_level_folder, eos_token_ids=[EOS])
    completions = NativeCompletions(app.state)
    with pytest.raises(InvalidRequestError):
        await anext(completions.stream(CompletionRequest(prompt="x", temperature=9)))
    engine.reply = Reply([65] * 100)
    stream = completions.stream(CompletionRequest(prompt="x", max_tokens=100))
    assert await anext(stream) == "A"
    await stream.aclose()
    assert engine.submissions[-1].is_aborted


async def test_a_key_is_asked_for_where_there_are_keys(byte_level_folder: Path) -> None:
    from configs.operation import ApiKeySection
    from runners.api.access import Access

    app, engine = scripted_app(byte_level_folder, eos_token_ids=[EOS])
    app.state.access = Access([ApiKeySection.model_validate({"name": "a", "sha256": "0" * 64})])
    with pytest.raises(AuthenticationError):
        await anext(NativeCompletions(app.state).stream(CompletionRequest(prompt="x")))
    assert not engine.submissions


@pytest.mark.model
def test_the_client_example_against_bentoml_serve(tmp_path: Path, smollm2_path: Path) -> None:
    env = {"WAVELANE_MODELS__0__SOURCE": str(smollm2_path), "WAVELANE_ENGINE__CPU_CORES": "1"}
    with BentoServer(tmp_path, env) as server:
        server.wait_ready()
        pieces = list(generate(server.url, "The capital of France is", max_tokens=8))
        assert len(pieces) > 1
        answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        with bentoml.SyncHTTPClient(server.url) as client, pytest.raises(BentoMLException, match="context"):
            list(client.generate(prompt="x", max_tokens=10**6))
        for path in ("/docs", "/openapi.json"):
            assert server.http.get(path).status_code == 200

"""Models that come and go in a whole server without a device: HTTP routes, engine process, restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.api_keys import make_key
from configs.loader import ResolvedProfile
from configs.schema import Profile
from runners.server import Server
from tests.support.eventually import eventually
from tests.support.tiny_tokenizers import write_byte_level

ADMIN_KEY, ADMIN_ENTRY = make_key("operator", admin=True)


class Running:
    def __init__(self, folder: Path) -> None:
        self.sources = [str(folder / name) for name in "abc"]
        for source in self.sources:
            Path(source).mkdir()
            write_byte_level(Path(source))
        profile = Profile.model_validate(
            {
                "models": [
                    {"source": source, "served_names": [name, f"{name}-alias"], "max_context": 256}
                    for source, name in zip(self.sources[:2], "ab", strict=True)
                ],
                "engine": {"executor": "simulated", "slots": 4},
                "kv": {"pool": {"blocks": 40}},
                "simulated": {"vocab_size": 256, "step_us": 2000},
                "auth": {"keys": [ADMIN_ENTRY.model_dump()]},
                "watchdog": {"restart_backoff_s": 0.05},
            }
        )
        self.server = Server(ResolvedProfile(profile, "test", {}), "test")
        transport = httpx.ASGITransport(app=self.server.app)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60, headers=headers)

    async def ready(self) -> None:
        await eventually(lambda: self.server.is_ready, 60)

    async def complete(self, model: str, max_tokens: int = 20) -> httpx.Response:
        body = {"model": model, "prompt": list(range(30)), "max_tokens": max_tokens}
        return await self.client.post("/v1/completions", json=body)

    async def stats(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get(f"/admin/models/{model}")).json()
        return found


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    running = Running(tmp_path)
    running.server.supervisor.start()
    await running.ready()
    yield running
    await running.server.stop()


async def test_models_come_and_go_under_load(running: Running) -> None:
    client = running.client
    before = [asyncio.create_task(running.complete(model, 100)) for model in ("a", "b", "a-alias", "b-alias") * 3]
    await eventually(lambda: running.server.client.num_open_streams == 12)
    lowered = (await client.patch("/admin/models/b", json={"quota_blocks": 12})).json()
    assert (lowered["quota_blocks"], lowered["stats"]["total_blocks"], lowered["pool_blocks"]) == (12, 12, 80)
    unloaded = asyncio.create_task(client.delete("/admin/models/b"))
    await eventually(lambda: [info.served_names[0] for info in running.server.client.models] == ["a"])
    assert (await running.complete("b")).status_code == 404
    assert (await client.get("/admin/models")).json()["data"][1]["status"] == "unloading"
    assert [response.status_code for response in await asyncio.gather(*before)] == [200] * 12
    assert (await unloaded).json() == {"id": "b", "object": "model.unloaded", "unloaded": True}
    loaded = await client.post(
        "/admin/models", json={"source": running.sources[2], "served_names": ["c"], "max_context": 256}
    )
    assert (loaded.status_code, loaded.json()["status"]) == (201, "ready")
    assert (await running.complete("c")).status_code == 200
    taken = await client.post("/admin/models", json={"source": running.sources[1], "served_names": ["b", "c"]})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "model_exists")
    wrong = await client.post("/admin/models", json={"source": running.sources[1] + "/none"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "model_not_loaded")
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["a", "a-alias", "c"]


async def test_a_model_without_a_readable_tokenizer_is_not_kept(running: Running) -> None:
    (Path(running.sources[2]) / "tokenizer.json").write_text("{")
    refused = await running.client.post("/admin/models", json={"source": running.sources[2], "served_names": ["c"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_loaded")
    listed = (await running.client.get("/admin/models")).json()["data"]
    assert [model["id"] for model in listed] == ["a", "b"]
    assert (await running.complete("a")).status_code == 200


async def test_a_tokenizer_that_fails_in_an_unforeseen_way_ends_its_load_only(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr("runners.server.load_text", fail)
        refused = await running.client.post("/admin/models", json={"source": running.sources[2], "served_names": ["c"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_loaded")
    body = {"source": running.sources[2], "served_names": ["c"], "max_context": 256}
    assert (await running.client.post("/admin/models", json=body)).status_code == 201


@pytest.mark.parametrize(
    "fields", [{"source": ""}, {"source": "a\0"}, {"served_names": [""]}, {"chat_template": "\0"}, {"tokenizer": "\0"}]
)
async def test_texts_that_cannot_be_are_refused(running: Running, fields: dict[str, Any]) -> None:
    refused = await running.client.post("/admin/models", json={"source": running.sources[2]} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize("quota", [10**30, -(10**30), 0, 10**9])
async def test_an_impossible_quota_is_the_clients_fault(running: Running, quota: int) -> None:
    refused = await running.client.patch("/admin/models/a", json={"quota_blocks": quota})
    assert refused.status_code == 400
    assert "quota_blocks" in refused.json()["error"]["message"]


async def test_a_load_that_nobody_waits_for_is_carried_through(running: Running) -> None:
    body = {"source": running.sources[2], "served_names": ["c"], "max_context": 256}
    asking = asyncio.create_task(running.client.post("/admin/models", json=body))
    for _ in range(100):  # it has not left this process yet when it counts as loading
        await asyncio.sleep(0)
        if any(status.status == "loading" for status in running.server.admin.status()):
            break
    assert not asking.done()
    asking.cancel()
    await eventually(lambda: [info.served_names[0] for info in running.server.client.models] == ["a", "b", "c"])
    assert (await running.complete("c")).status_code == 200


async def test_a_restarted_engine_has_the_models_and_quotas_of_before(running: Running) -> None:
    await running.client.patch("/admin/models/a", json={"quota_blocks": 3})
    await running.client.delete("/admin/models/b")
    body = {"source": running.sources[2], "served_names": ["c"], "max_context": 256}
    assert (await running.client.post("/admin/models", json=body)).status_code == 201
    restarts = running.server.client.restarts
    os.kill(running.server.supervisor.engine_pid or 0, signal.SIGKILL)
    await eventually(lambda: running.server.client.restarts > restarts)
    await running.ready()
    listed = (await running.client.get("/admin/models")).json()["data"]
    assert [(model["id"], model["status"]) for model in listed] == [("a", "ready"), ("c", "ready")]
    assert (await running.stats("a"))["stats"]["total_blocks"] == 3
    assert (await running.complete("a", 5)).status_code == 200
    assert (await running.complete("a", 100)).status_code == 500  # more than three blocks hold


async def test_late_requests_end_with_an_error_and_without_models_nothing_is_ready(running: Running) -> None:
    late = asyncio.create_task(running.complete("a", 220))
    await eventually(lambda: running.server.client.num_open_streams == 1)
    assert (await running.client.delete("/admin/models/a?deadline_s=0")).status_code == 200
    assert (await late).status_code == 503
    assert (await running.client.delete("/admin/models/b-alias")).status_code == 200
    assert not running.server.is_ready
    assert running.server.is_alive
    assert (await running.complete("b")).status_code == 503
    assert (await running.client.post("/admin/models", json={"source": running.sources[0]})).status_code == 201
    assert running.server.is_ready

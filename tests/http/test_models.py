"""`bentoml serve` with two real models: load on both, a quota lowered, one unloaded and loaded again, a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from configs.api_keys import make_key
from tests.conftest import GEMMA3, SMOLLM2
from tests.support.server import BentoServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.model]

# Requests of each model at once; each asks again as soon as it has its answer, until the test has seen enough.
CLIENTS = int(os.environ.get("WAVELANE_TEST_MODEL_CLIENTS", "3"))
MAX_TOKENS = 24
MAX_CONTEXT = 1024
ADMIN_KEY, ADMIN_ENTRY = make_key("operator", admin=True)
USER_KEY, USER_ENTRY = make_key("user")
GEMMA = {"source": GEMMA3, "served_names": ["gemma", "gemma-3"], "max_context": MAX_CONTEXT}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, gemma3_path: Path) -> Any:
    folder = tmp_path_factory.mktemp("models")
    profile = {
        "models": [{"source": SMOLLM2, "served_names": ["smollm2"], "max_context": MAX_CONTEXT}, GEMMA],
        "engine": {"slots": 4, "cpu_cores": 1},
        "kv": {"pool": {"sequences": 2}},
        "auth": {"keys": [entry.model_dump(exclude_defaults=True) for entry in (ADMIN_ENTRY, USER_ENTRY)]},
    }
    (folder / "two.yaml").write_text(yaml.safe_dump({"preset": "cpu", **profile}))
    with BentoServer(folder, {"WAVELANE_PROFILE": str(folder / "two.yaml")}) as running:
        running.wait_ready()
        yield running
        assert "KV blocks were still held" not in running.log()
        assert "Traceback" not in running.log()


@asynccontextmanager
async def client_of(server: BentoServer, key: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
        yield client


class Load:
    """Clients that ask a model again and again. `tokens` counts what whole answers carried, `errors` the others."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.answers = self.tokens = 0
        self.errors: Counter[tuple[int, str]] = Counter()
        self._client = client
        self._model = model
        self._is_over = False
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]

    async def _ask(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            turn += 1
            body = {
                "model": self._model,
                "prompt": f"{number}.{turn}: " + "The sea is deep and wide. " * (1 + 7 * (number % 3)),
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
            }
            response = await self._client.post("/v1/completions", json=body)
            if response.status_code == 200:
                self.answers += 1
                self.tokens += response.json()["usage"]["completion_tokens"]
            else:
                self.errors[response.status_code, response.json()["error"]["code"]] += 1
                await asyncio.sleep(0.05)

    async def more(self, count: int) -> None:
        """Until so many further answers have come."""
        wanted = self.answers + count
        async with asyncio.timeout(100):
            while self.answers < wanted:
                assert not any(task.done() for task in self._tasks)
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        assert self.tokens == MAX_TOKENS * self.answers


async def model_ids(client: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


async def status_of(admin: httpx.AsyncClient, model: str) -> dict[str, Any]:
    found: dict[str, Any] = (await admin.get(f"/admin/models/{model}")).json()
    return found


async def until(admin: httpx.AsyncClient, model: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Its stats once they are as wanted."""
    for _ in range(200):
        stats: dict[str, Any] = (await status_of(admin, model))["stats"]
        if wanted(stats):
            return stats
        await asyncio.sleep(0.1)
    raise AssertionError(f"{model} stays as it is: {stats}")


def is_at_rest(stats: dict[str, Any]) -> bool:
    """Nothing of it is under way, and every block it may hold is to be had (the models share them)."""
    is_idle = not (stats["running"] or stats["waiting"] or stats["used_blocks"])
    return is_idle and stats["free_blocks"] == stats["total_blocks"]


async def test_each_model_answers_with_its_own_tokenizer_and_template(server: BentoServer) -> None:
    async with client_of(server, USER_KEY) as user:
        assert await model_ids(user) == ["smollm2", "gemma", "gemma-3"]
        prompts = {}
        for model in ("smollm2", "gemma-3"):
            chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
            ids = (await user.post("/tokenize", json=chat)).json()["tokens"]
            text = (await user.post("/detokenize", json={"model": model, "tokens": ids})).json()["prompt"]
            prompts[model] = text
            answer = await user.post("/v1/chat/completions", json={**chat, "max_tokens": 4})
            assert answer.status_code == 200
            assert answer.json()["model"] == model
        assert prompts["smollm2"].startswith("<|im_start|>system")
        assert prompts["gemma-3"].startswith("<bos><|im_start|>user")
        missing = await user.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_load_on_both_quota_lowered_one_unloaded_and_loaded_again(server: BentoServer) -> None:
    async with client_of(server, USER_KEY) as user, client_of(server, ADMIN_KEY) as admin:
        loads = {model: Load(user, model) for model in ("smollm2", "gemma")}
        for load in loads.values():
            await load.more(CLIENTS)

        # Fewer blocks than are held: nobody fails, and no more than the quota are held once some have come back.
        lowered = await admin.patch("/admin/models/gemma", json={"quota_blocks": 10})
        assert lowered.status_code == 200
        assert lowered.json()["stats"]["total_blocks"] == 10
        for load in loads.values():
            await load.more(2 * CLIENTS)
        assert (await status_of(admin, "gemma"))["stats"]["used_blocks"] <= 10
        await admin.patch("/admin/models/gemma", json={"quota_blocks": None})

        # Those in flight end whole; then the model is unknown, and the other one goes on.
        assert (await admin.delete("/admin/models/gemma-3")).json()["unloaded"] is True
        assert await model_ids(user) == ["smollm2"]
        assert loads["gemma"].errors.keys() <= {(404, "model_not_found")}
        await loads["smollm2"].more(CLIENTS)
        answers_without = loads["gemma"].answers
        pool = await admin.post("/admin/models", json=GEMMA)
        assert pool.status_code == 201
        assert (await admin.post("/admin/models", json=GEMMA)).status_code == 409
        await loads["gemma"].more(CLIENTS)
        assert loads["gemma"].answers > answers_without
        assert await model_ids(user) == ["smollm2", "gemma", "gemma-3"]

        for load in loads.values():
            await load.end()
        assert loads["smollm2"].errors == {}
        assert loads["gemma"].errors.keys() == {(404, "model_not_found")}
        for model in loads:
            stats = await until(admin, model, is_at_rest)
            assert stats["total_blocks"] == (await status_of(admin, model))["pool_blocks"]
        metrics = (await user.get("/metrics")).text
        assert 'wavelane_kv_blocks_used{model_name="smollm2"} 0.0' in metrics
        assert 'wavelane_kv_blocks_used{model_name="gemma"} 0.0' in metrics


async def test_what_was_loaded_is_loaded_after_a_restart_of_the_engine(server: BentoServer) -> None:
    async with client_of(server, USER_KEY) as user, client_of(server, ADMIN_KEY) as admin:
        assert (await admin.patch("/admin/models/gemma", json={"quota_blocks": 40})).status_code == 200
        assert (await admin.delete("/admin/models/smollm2")).status_code == 200
        pid = server.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.engine_pid not in (None, pid), 30)
        await asyncio.to_thread(server.wait_ready)
        assert await model_ids(user) == ["gemma", "gemma-3"]
        await until(admin, "gemma", lambda stats: stats["total_blocks"] == 40)
        answer = await user.post("/v1/completions", json={"model": "gemma", "prompt": "The sea", "max_tokens": 3})
        assert answer.status_code == 200

        # Without any model the server lives, is not ready, and takes one again.
        assert (await admin.delete("/admin/models/gemma")).status_code == 200
        assert (server.status("/readyz"), server.status("/livez")) == (503, 200)
        assert (await user.post("/v1/completions", json={"model": "gemma", "prompt": "x"})).status_code == 503
        smollm2 = {"source": SMOLLM2, "served_names": ["smollm2"], "max_context": MAX_CONTEXT}
        assert (await admin.post("/admin/models", json=smollm2)).status_code == 201
        assert server.status("/readyz") == 200


async def test_admin_routes_want_an_admin_key(server: BentoServer) -> None:
    async with client_of(server, USER_KEY) as user:
        for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/smollm2"), ("PATCH", "/smollm2")):
            response = await user.request(method, f"/admin/models{path}", json={})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_key_required")
    async with client_of(server, ADMIN_KEY) as admin:
        for body, param in (({"source": "/none.gguf"}, None), ({}, "source"), ({"source": "x", "slots": 3}, "slots")):
            response = await admin.post("/admin/models", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        for change in ({}, {"quota_blocks": 0}, {"quota_blocks": 10**9}, {"quota_blocks": "all"}):
            assert (await admin.patch("/admin/models/smollm2", json=change)).status_code == 400
        assert (await admin.delete("/admin/models/other")).status_code == 404
        assert (await admin.delete("/admin/models/smollm2?deadline_s=soon")).status_code == 400

"""The BentoML service as it starts: what it is configured with, what its process loads, what it says meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import typing
from pathlib import Path

import httpx
import psutil
from _bentoml_sdk.service.config import ServiceConfig
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from typing_extensions import is_typeddict

from runners.request import FinishReason
from tests.support.server import ROOT, BentoServer, eventually
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizers import write_byte_level

HEAVY = ("torch", "transformers")


def unknown_keys(config: dict[str, typing.Any], schema: typing.Any, path: str = "") -> list[str]:
    """Keys that BentoML would silently ignore."""
    known = typing.get_type_hints(schema)
    unknown = []
    for key, value in config.items():
        if key not in known:
            unknown.append(path + key)
        elif isinstance(value, dict) and is_typeddict(known[key]):
            unknown += unknown_keys(value, known[key], f"{path}{key}.")
    return unknown


def test_every_key_of_our_service_config_is_known_to_bentoml() -> None:
    import service

    assert unknown_keys(service.CONFIG, ServiceConfig) == []
    assert unknown_keys({"trafic": {}, "tracing": {"excluded": []}}, ServiceConfig) == ["trafic", "tracing.excluded"]
    assert service.Wavelane.config["traffic"]["timeout"] == 86_400
    assert service.Wavelane.config["workers"] == 1
    assert service.Wavelane.name == "wavelane"


def test_bentoml_keeps_no_timer_of_a_request() -> None:
    """Its timeout layer would leave one behind for every request; it still is where we replace it."""
    from _bentoml_impl.server.app import ServiceAppFactory

    import service

    service.Wavelane.inject_config()
    layers = [layer.cls for layer in ServiceAppFactory(service.Wavelane, is_main=True).middlewares]
    names = [getattr(layer, "__name__", "") for layer in layers]
    assert "_nothing_between" in names
    assert "TimeoutMiddleware" not in names


def test_the_http_process_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    script = (
        "import sys, service\n"
        "from pathlib import Path\n"
        "from runners.text.assets import load_text\n"
        f"assert load_text(Path({str(tmp_path)!r})).tokenizer is not None\n"
        "service.server.metrics_text()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_wrong_profile_stops_the_start_with_one_line() -> None:
    env = {**os.environ, "WAVELANE_ENGINE__SLOTZ": "3"}
    result = subprocess.run(
        [sys.executable, "-m", "bentoml", "serve", "service:Wavelane", "--port", "0"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "profile: engine.slotz: unknown key; did you mean 'slots'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    """Neither on paths that nobody has asked for before, nor on one that everybody asks for."""
    write_byte_level(tmp_path)
    env = {"WAVELANE_ENGINE__EXECUTOR": "simulated", "WAVELANE_MODELS__0__SOURCE": str(tmp_path)}
    with BentoServer(tmp_path, env) as server, httpx.Client(base_url=server.url) as client:
        server.wait_ready()
        process = psutil.Process(server.worker_pid)

        def ask(name: str, number: int) -> int:
            for index in range(number):
                assert client.get(f"/v1/models/{name}-{index}").status_code == 404
                assert client.get(f"/{name}/{index}.php").status_code == 404
                assert client.get("/v1/models").status_code == 200
            return int(process.memory_info().rss)

        before = ask("warm-up", 300)
        after = ask("then", 1500)
        assert after - before < 2**20, "at 750 bytes a request it would be 3 MiB, at 23 kB a path 70"
        found = server.http.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        names = {f"{sample.name}:{sample.labels.get('handler')}": sample.value for sample in samples_of(found.text)}
        assert names["wavelane_http_requests_total:/v1/models/{model_id:path}"] == 1800
        assert names["wavelane_http_requests_total:other"] == 1800
        assert names["wavelane_http_requests_total:/v1/models"] == 1800
        assert "bentoml_" not in found.text
        rss = {
            process: names[f"wavelane_{process}_process_resident_memory_bytes:None"] for process in ("http", "engine")
        }
        assert abs(rss["http"] - after) < 2**23
        assert rss["engine"] > 2**24


def samples_of(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_it_loads_in_the_background(tmp_path: Path) -> None:
    """While the engine loads: alive, not ready, and `/health` and `/v1` say so."""
    write_byte_level(tmp_path)
    env = {"WAVELANE_ENGINE__EXECUTOR": "simulated", "WAVELANE_MODELS__0__SOURCE": str(tmp_path)}
    with BentoServer(tmp_path, env) as server:
        engine_pid = eventually(lambda: server.engine_pid, 60, 0.005)
        os.kill(engine_pid, signal.SIGSTOP)
        eventually(lambda: server.status("/livez") == 200)
        assert server.status("/readyz") == 503
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] in ("starting", "loading")
        refused = server.http.post("/v1/completions", json={"model": "m", "prompt": [1]})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        os.kill(engine_pid, signal.SIGCONT)
        server.wait_ready()
        assert server.engine_pid == engine_pid


def test_a_real_model_is_served_and_survives_its_engine(tmp_path: Path) -> None:
    """The torch executor behind the same service: equal greedy ids before and after its engine was killed."""
    model = tmp_path / "model"
    tiny_model("llama", vocab_size=268, max_position_embeddings=2048).save_pretrained(model)
    write_byte_level(model)
    env = {
        "WAVELANE_MODELS__0__SOURCE": str(model),
        "WAVELANE_MODELS__0__SERVED_NAMES": "[tiny]",
        "WAVELANE_ENGINE__CPU_CORES": "1",
        "WAVELANE_KV__POOL": "{blocks: 256}",
    }
    with BentoServer(tmp_path, env) as server:
        server.wait_ready()
        assert server.worker_pid is not None
        assert "libtorch" not in Path(f"/proc/{server.worker_pid}/maps").read_text()

        def greedy() -> list[int]:
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 16, "temperature": 0, "return_token_ids": True}
            choice = server.http.post("/v1/completions", json={**body, "ignore_eos": True}).json()["choices"][0]
            assert choice["finish_reason"] == FinishReason.LENGTH
            ids: list[int] = choice["token_ids"]
            return ids

        before = greedy()
        assert len(before) == 16
        engine_pid = server.engine_pid
        assert engine_pid is not None
        os.kill(engine_pid, signal.SIGKILL)
        eventually(lambda: server.status("/readyz") == 503, 5, 0.005)
        server.wait_ready()
        assert greedy() == before
        log = server.log()
        assert "profile  cpu" in log
        assert "blocks of 16 tokens" in log
        assert f"curl {server.url}/v1/chat/completions" in log
        server.send(signal.SIGTERM)
        assert server.wait_exit() == 0
        server.wait_gone(5)
    assert not psutil.pid_exists(engine_pid)

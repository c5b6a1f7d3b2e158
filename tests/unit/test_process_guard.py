"""Processes that end with their parent, or with the pipe it held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(script: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
def test_a_guarded_child_dies_with_its_parent() -> None:
    child = (
        "import os, time; from runners.process_guard import die_with_parent; die_with_parent(int(os.environ['PARENT']))"
    )
    child += "; print(os.getpid(), flush=True); time.sleep(60)"
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env={{**os.environ, 'PARENT': str(os.getpid())}})\n"
        "time.sleep(60)"
    )
    with python(parent) as process:
        assert process.stdout is not None
        guarded = psutil.Process(int(process.stdout.readline()))
        process.kill()
        _, alive = psutil.wait_procs([guarded], timeout=10)
        assert not alive


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
def test_a_child_whose_parent_has_gone_already_exits() -> None:
    with python("from runners.process_guard import die_with_parent; die_with_parent(1 << 22); print('on')") as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait(10) == 1


def test_the_end_of_a_pipe_ends_the_process() -> None:
    script = (
        "import sys, time; from runners.process_guard import exit_at_end_of_file; "
        "exit_at_end_of_file(sys.stdin.fileno()); print('on', flush=True); time.sleep(60)"
    )
    with python(script, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"on\n"
        os.write(process.stdin.fileno(), b"anything")
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(10) == 1

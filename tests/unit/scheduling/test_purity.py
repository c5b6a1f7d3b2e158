"""The scheduler is pure: no tensors, no clock of its own, no I/O. So every policy runs in a test in virtual time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

RUNNERS = Path(__file__).parents[3] / "runners"
KV_CACHE = ("block_pool", "cache_manager", "prefix_cache", "sessions")
SOURCES = [*sorted((RUNNERS / "scheduling").glob("*.py")), *(RUNNERS / "kv_cache" / f"{name}.py" for name in KV_CACHE)]
IMPURE = {"asyncio", "datetime", "io", "os", "pathlib", "queue", "random", "socket", "subprocess", "threading", "time"}
HEAVY = {"torch", "numpy", "zmq", "transformers"}


def imported_packages(source: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("open", "print", "input"):
            found.add("io")
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_clock_no_chance_and_no_io(source: Path) -> None:
    assert imported_packages(source) & (IMPURE | HEAVY) == set()


def test_what_it_imports_brings_no_tensors_and_no_sockets() -> None:
    code = f"import sys, runners.scheduling.scheduler; print(sorted({HEAVY!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

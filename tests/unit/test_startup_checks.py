"""What start-up refuses or settles once machine and model are known."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from configs.loader import load_profile
from runners import engine_core
from runners.engine_settings import EngineSettings
from runners.engine_startup import ModelLoader
from runners.errors import StartupError
from runners.startup_checks import choose_device, context_in_pool, model_context


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cuda:x", "meta", ""])
def test_a_device_that_cannot_be_used_is_one_line(name: str) -> None:
    with pytest.raises(StartupError, match=r"^engine\.device: .*cannot be used") as raised:
        choose_device(name)
    assert "\n" not in str(raised.value)


def test_a_device_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")


def test_a_context_beyond_the_models_is_refused() -> None:
    assert model_context("auto", 8192) == 8192
    assert model_context(8192, 8192) == 8192
    with pytest.raises(StartupError, match=r"8193 tokens.*8192"):
        model_context(8193, 8192)


def test_a_context_that_the_pool_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    assert context_in_pool("auto", 960, 60, 16) == 960
    assert context_in_pool(960, 960, 60, 16) == 960
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert context_in_pool("auto", 8192, 60, 16) == 960
    assert "8192 to 960" in caplog.text
    with pytest.raises(StartupError, match=r"961 tokens.*960 tokens.*60 blocks"):
        context_in_pool(961, 961, 60, 16)


def simulated(folder: Path, **variables: str) -> EngineSettings:
    source = folder / "model.gguf"
    source.touch()
    env = {"WAVELANE_ENGINE__EXECUTOR": "simulated", "WAVELANE_MODELS__0__SOURCE": str(source), **variables}
    profile = load_profile("cpu", env).profile
    return EngineSettings(str(folder / "s"), 0, "test", profile, profile.models)


@pytest.mark.parametrize(
    "variables",
    [{"WAVELANE_KV__POOL": "{blocks: 60}"}, {"WAVELANE_KV__POOL": "{blocks: 600}", "WAVELANE_KV__QUOTA_BLOCKS": "60"}],
)
def test_a_loaded_engine_never_promises_more_than_its_blocks_hold(tmp_path: Path, variables: dict[str, str]) -> None:
    (model,) = ModelLoader(simulated(tmp_path, **variables)).load_all(lambda *_: None)
    info = model.info
    assert info.max_context == 960
    assert info.peak_concurrency == info.total_blocks / 60


def test_what_nobody_foresaw_ends_the_start_with_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: object) -> None:
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(ModelLoader, "load_all", load)
    monkeypatch.setattr(engine_core, "_FRONT_END_TIMEOUT_S", 0.0)
    assert engine_core._serve(simulated(tmp_path)) == engine_core.EXIT_STARTUP_FAILED
    assert "start-up failed: MemoryError: no room" in caplog.messages


def test_two_models_may_not_share_a_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    second = {"WAVELANE_MODELS__1__SOURCE": str(tmp_path / "other"), "WAVELANE_MODELS__1__SERVED_NAMES": "[x, model]"}
    with pytest.raises(StartupError, match=r"^models\[1\]\.served_names: 'model' is the name of another model$"):
        ModelLoader(simulated(tmp_path, **second)).load_all(lambda *_: None)

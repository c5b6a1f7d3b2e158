"""Which executor a profile gets on which device."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from runners import model_preparation
from runners.errors import StartupError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def with_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found = importlib.util.find_spec("json") if request.param else None
    monkeypatch.setattr(model_preparation.importlib.util, "find_spec", lambda name: found)
    return bool(request.param)


@pytest.mark.parametrize("with_triton", [True, False], indirect=True)
def test_auto_takes_cuda_where_a_gpu_and_triton_are(with_triton: bool) -> None:
    assert model_preparation._takes_cuda_executor("auto", GPU) is with_triton
    assert not model_preparation._takes_cuda_executor("auto", CPU)
    assert not model_preparation._takes_cuda_executor("torch", GPU)


@pytest.mark.parametrize(
    ("with_triton", "reason"), [(True, "device is cpu"), (False, "device is cpu")], indirect=["with_triton"]
)
def test_cuda_by_name_needs_a_gpu(with_triton: bool, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        model_preparation._takes_cuda_executor("cuda", CPU)


@pytest.mark.parametrize("with_triton", [False], indirect=True)
def test_cuda_by_name_needs_triton(with_triton: bool) -> None:
    with pytest.raises(StartupError, match="Triton is not installed"):
        model_preparation._takes_cuda_executor("cuda", GPU)

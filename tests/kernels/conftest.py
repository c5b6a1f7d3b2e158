"""Shared by the op tests: fixed random inputs, and where each kernel runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import ops


@pytest.fixture(autouse=True)
def fixed_random_inputs() -> None:
    torch.manual_seed(20240)


@pytest.fixture(params=["reference", "registered"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """`reference` runs plain torch, `registered` what `kernels.ops` picks by itself."""
    if request.param == "reference":
        with ops.reference_only():
            yield request.param
    else:
        yield request.param


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where Triton kernels run: the GPU, or the CPU under Triton's interpreter."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

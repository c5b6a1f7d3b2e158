from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import dispatch, ops


@pytest.fixture
def scratch_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations of a test vanish with it."""
    monkeypatch.setattr(dispatch, "_registered", {})
    monkeypatch.setattr(dispatch, "_formats", {})
    monkeypatch.setattr(dispatch, "_loaded", {"cpu"})
    return


@pytest.mark.usefixtures("scratch_registry")
def test_newest_that_accepts_runs_else_the_one_before_else_the_reference() -> None:
    x = torch.zeros(1, 4)
    ops.register(
        "gated_activation", "cpu", lambda gate_up, activation: "old", lambda gate_up, activation: activation != "x"
    )
    ops.register(
        "gated_activation", "cpu", lambda gate_up, activation: "new", lambda gate_up, activation: activation == "y"
    )
    assert ops.gated_activation(x, "y") == "new"
    assert ops.gated_activation(x, "z") == "old"
    with pytest.raises(ValueError, match="unknown activation 'x'"):
        ops.gated_activation(x, "x")
    with ops.reference_only(), pytest.raises(ValueError, match="unknown activation 'y'"):
        ops.gated_activation(x, "y")
    assert ops.gated_activation(x, "y") == "new"


@pytest.mark.usefixtures("scratch_registry")
def test_native_formats_are_by_device() -> None:
    ops.register_formats("cpu", ["q8_0"])
    assert ops.native_formats("cpu") == {"q8_0"}
    assert ops.native_formats("meta") == frozenset()


def test_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match="rms_nrom"):
        ops.register("rms_nrom", "cpu", lambda: None)


def test_every_op_has_a_reference_of_its_name() -> None:
    from kernels import reference

    modules = {"kernels.ops", "kernels.attention_ops", "kernels.sampling_ops"}
    functions = {name for name, value in vars(ops).items() if getattr(value, "__module__", "") in modules}
    assert functions == set(reference.IMPLEMENTATIONS)

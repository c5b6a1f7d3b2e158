"""Which implementation of an op runs: the newest registered one that accepts the call, else the reference.

A backend package (`kernels.cpu_ops`, `kernels.triton_ops`) has a function `register_ops()` that calls `register` and
`register_formats`; it is called once, before the first op on that device type. A backend that cannot work on this
machine (no compiler, wrong GPU) registers nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Implementation = Callable[..., Any]
Predicate = Callable[..., bool]

BACKEND_PACKAGES = {"cpu": "kernels.cpu_ops", "cuda": "kernels.triton_ops"}

_references: dict[str, Implementation] = {}
_registered: dict[str, dict[str, list[tuple[Implementation, Predicate | None]]]] = {}
_formats: dict[str, set[str]] = {}
_loaded: set[str] = set()
_reference_only = False


class ShapeError(ValueError):
    """Tensors handed to an op do not fit together."""


def register_reference(op_name: str, implementation: Implementation) -> None:
    """The plain torch implementation, for any device."""
    _references[op_name] = implementation


def register(
    op_name: str, device_type: str, implementation: Implementation, predicate: Predicate | None = None
) -> None:
    """Add an implementation of `op_name` for tensors on `device_type` ("cpu", "cuda").

    It takes the op's arguments, positionally, in the order of `kernels.ops`. `predicate`, given the same arguments,
    says whether it can run them; where it says no, the one registered before is asked, last of all the reference.
    """
    if op_name not in _references:
        raise ValueError(f"unknown op {op_name!r}")
    _registered.setdefault(device_type, {}).setdefault(op_name, []).insert(0, (implementation, predicate))


def register_formats(device_type: str, format_names: Iterable[str]) -> None:
    """Weight formats that `linear`, `logits` and `embedding` run natively on `device_type`.

    Beside quantised formats, "bf16" or "f16" say that `linear` takes such weights with float32 activations.
    """
    _formats.setdefault(device_type, set()).update(format_names)


def native_formats(device_type: str) -> frozenset[str]:
    """Formats of `register_formats`; any other format should be dequantised when the model is built."""
    _load_backend(device_type)
    return frozenset(_formats.get(device_type, ()))


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within the block every op runs its reference, whatever is registered."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def run(op_name: str, device_type: str, *args: Any) -> Any:
    """Run `op_name` on the first implementation that accepts `args`."""
    if device_type not in _loaded:
        _load_backend(device_type)
    implementations = _registered.get(device_type)
    if implementations is not None and not _reference_only:
        for implementation, predicate in implementations.get(op_name, ()):
            if predicate is None or predicate(*args):
                return implementation(*args)
    return _references[op_name](*args)


def _load_backend(device_type: str) -> None:
    if device_type in _loaded:
        return
    _loaded.add(device_type)
    package = BACKEND_PACKAGES.get(device_type)
    if package is None or importlib.util.find_spec(package) is None:
        return
    register_ops = getattr(importlib.import_module(package), "register_ops", None)
    if register_ops is not None:
        register_ops()

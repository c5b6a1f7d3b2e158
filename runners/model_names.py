"""The names by which requests call models. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from configs.schema import ModelSection
from runners.errors import StartupError
from runners.loading.sources import served_name


def names_of(model: ModelSection) -> list[str]:
    """The names requests may use for a model; metrics and admin routes use the first."""
    return list(model.served_names) or [served_name(model.source)]


def check_names(models: Iterable[ModelSection]) -> None:
    """StartupError when two models answer to one name."""
    seen: set[str] = set()
    for index, model in enumerate(models):
        for name in names_of(model):
            if name in seen:
                raise StartupError(f"models[{index}].served_names: {name!r} is the name of another model")
            seen.add(name)

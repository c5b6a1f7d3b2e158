"""Every setting of a resolved profile in one list: where it stands, its value, where that came from, what it means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from configs.loader import ResolvedProfile


@dataclass(frozen=True, slots=True)
class Setting:
    """`path` is dotted, `value` JSON."""

    path: str
    value: str
    origin: str
    meaning: str


def settings_of(resolved: ResolvedProfile) -> Iterator[Setting]:
    """In the order in which the schema has them."""
    for path, value, meaning in _fields(resolved.profile, ()):
        yield Setting(path, value, resolved.origin(path), meaning)


def _fields(section: BaseModel, path: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        here = (*path, name)
        meaning = field.description or ""
        if here == ("kv", "pool"):
            yield ".".join(here), json.dumps(value.model_dump(exclude_none=True)), meaning
        elif isinstance(value, BaseModel):
            yield from _fields(value, here)
        elif here == ("models",):
            for index, model in enumerate(value):
                yield from _fields(model, (*here, str(index)))
        else:
            text = json.dumps(value, default=lambda entry: entry.model_dump(exclude_none=True))
            yield ".".join(here), text, meaning

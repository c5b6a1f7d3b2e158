"""What every section of the profile shares: strictness, and how sizes are written."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of `8GiB`, `512MiB`, `2GB` or a plain number. ValueError on anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number with B, KB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def _size_of(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Size = Annotated[int, BeforeValidator(_size_of), Field(gt=0)]
"""Bytes, also written as `8GiB` or `512MB`."""
FromList = BeforeValidator(_tuple_of)
"""YAML has lists, a frozen section has tuples."""


class Section(BaseModel):
    """Base of every section: strict types, no unknown keys, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

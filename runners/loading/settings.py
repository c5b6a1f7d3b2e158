"""Typed reading of an untrusted settings mapping (config.json, GGUF metadata) that notices what nobody read.

Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from runners.errors import StartupError

MAX_JSON_BYTES = 1 << 26
MAX_QUOTED_CHARS = 80


class Settings:
    """Settings of one file; `prefix` stands in front of every key (`llama.`, `text_config.`) in errors and in `values`.

    Every getter marks its key as read; `reject_unread` then refuses what is left, so that no setting is ignored by
    accident. All errors are StartupError naming file and key.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self._values = values
        self._read: set[str] = set()

    def fail(self, key: str, reason: str) -> NoReturn:
        raise StartupError(f"{self.path}: {self.prefix}{key}: {reason}")

    def get(self, key: str) -> Any:
        """The raw value, None where the key is absent or null."""
        self._read.add(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there, null or not."""
        return key in self._values

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 1 << 31) -> int:
        """An int in [minimum, maximum]; required when there is no default."""
        value = self.get(key)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not minimum <= value <= maximum:
            self.fail(key, f"is {quote(value)}, not an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None, *, allow_zero: bool = False) -> float:
        """A finite number over zero (or zero, where allowed); required when there is no default."""
        value = self.optional_number(key, allow_zero=allow_zero)
        if value is None:
            if default is None:
                self.fail(key, "is missing")
            return default
        return value

    def optional_number(self, key: str, *, allow_zero: bool = False) -> float | None:
        """As `number`, None where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            self.fail(key, f"is {quote(value)}, not a finite number")
        if value < 0 or (value == 0 and not allow_zero):
            self.fail(key, f"is {quote(value)}, not a number over zero")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"is {quote(value)}, not true or false")
        return value

    def section(self, key: str) -> Settings | None:
        """A nested mapping as settings of their own, None where it is absent, null or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.fail(key, f"is {quote(value)}, not an object")
        return Settings(self.path, value, f"{self.prefix}{key}.")

    def require(self, key: str, *allowed: object, reason: str) -> None:
        """Accept absence, null or one of `allowed`; anything else is not supported, for `reason`."""
        value = self.get(key)
        if value is not None and not any(value == good and type(value) is type(good) for good in allowed):
            self.fail(key, f"{quote(value)} is not supported: {reason}")

    def reject_unread(self, harmless: Collection[str] = ()) -> None:
        """Fail on the first key that nobody read, unless it is `harmless` or has no effect (null, false, empty)."""
        for key, value in self._values.items():
            without_effect = value is None or value is False or (isinstance(value, list | dict | str) and not value)
            if key in self._read or key in harmless or key.startswith("_") or without_effect:
                continue
            self.fail(key, f"setting {quote(value)} is not known to this server and may change the model's output")


def quote(value: object) -> str:
    """`repr` on one line, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 1] + "…"


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises StartupError if it cannot be read or is something else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise StartupError(f"{path}: larger than {MAX_JSON_BYTES} bytes, not a plausible settings file")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: holds {type(value).__name__}, not a JSON object")
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False

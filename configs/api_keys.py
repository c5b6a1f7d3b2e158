"""API keys: from the profile, from a file, from the environment; and how to make one."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from configs.operation import ApiKeySection, AuthSection

KEYS_VARIABLE = "WAVELANE_API_KEYS"

_entries: TypeAdapter[list[ApiKeySection]] = TypeAdapter(list[ApiKeySection])


class ApiKeysError(ValueError):
    """Keys that cannot be used; says where they come from, never what they are."""


def hash_key(key: str) -> str:
    """SHA-256 in hex. A key is 256 random bits, so a fast hash without salt gives nothing away."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_key(name: str, *, admin: bool = False) -> tuple[str, ApiKeySection]:
    """A new random key, and the entry that makes it valid."""
    key = f"wl-{secrets.token_urlsafe(32)}"
    return key, ApiKeySection(name=name, sha256=hash_key(key), admin=admin)


def load_api_keys(auth: AuthSection, env: Mapping[str, str] | None = None) -> tuple[ApiKeySection, ...]:
    """Every key, with the limits of `auth` where it has none of its own. Raises ApiKeysError."""
    env = os.environ if env is None else env
    keys = [*auth.keys, *_from_file(auth.keys_file), *_from_environment(env)]
    seen: set[str] = set()
    for key in keys:
        for value, what in ((key.name, f"the name {key.name!r}"), (key.sha256, f"the key of {key.name!r}")):
            if value in seen:
                raise ApiKeysError(f"auth: {what} is there twice")
            seen.add(value)
    limits = ("requests_per_minute", "max_concurrency")
    return tuple(
        key.model_copy(update={name: getattr(auth, name) for name in limits if getattr(key, name) is None})
        for key in keys
    )


def _from_file(path: str | None) -> list[ApiKeySection]:
    if path is None:
        return []
    try:
        content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ApiKeysError(f"auth.keys_file: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ApiKeysError(f"auth.keys_file: {path}: not YAML") from None
    try:
        return _entries.validate_python([] if content is None else content)
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]  # what stands there may be a secret
        where = ".".join(str(part) for part in fault["loc"]) or "the file"
        raise ApiKeysError(f"auth.keys_file: {path}: {where}: {fault['msg']}") from None


def _from_environment(env: Mapping[str, str]) -> Iterator[ApiKeySection]:
    keys = [key.strip() for key in env.get(KEYS_VARIABLE, "").split(",")]
    for number, key in enumerate(filter(None, keys), start=1):
        yield ApiKeySection(name=f"env-{number}", sha256=hash_key(key))

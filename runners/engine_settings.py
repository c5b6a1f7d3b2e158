"""What the engine process is told at its start: one JSON line on its stdin."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from configs.schema import ModelSection, Profile


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`parent_pid` is the HTTP process; the profile travels resolved, so that both processes agree on it. `models` are
    those that are to be served now: models are loaded and unloaded while the server runs."""

    socket_path: str
    parent_pid: int
    profile_name: str
    profile: Profile
    models: tuple[ModelSection, ...]

    def to_json(self) -> bytes:
        """One line."""
        return _adapter.dump_json(self)

    @staticmethod
    def from_json(line: bytes) -> EngineSettings:
        """Inverse of `to_json`. Raises pydantic.ValidationError."""
        return _adapter.validate_json(line)


_adapter = TypeAdapter(EngineSettings)

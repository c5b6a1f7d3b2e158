"""A session belongs to the API key that began it: what it is called in the engine names its owner too."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from runners.messages import SessionFacts

# The names of keys have no slash, so the sessions of two keys never meet.
_SEPARATOR = "/"


def engine_name(key_id: str, session_id: str) -> str:
    """What `session_id` of a key is called in the engine; without keys (`key_id` empty) as the client calls it."""
    return f"{key_id}{_SEPARATOR}{session_id}" if key_id else session_id


def own_sessions(key_id: str, sessions: Iterable[SessionFacts]) -> list[SessionFacts]:
    """Of the engine's sessions those of a key, by the client's names."""
    prefix = engine_name(key_id, "")
    return [
        msgspec.structs.replace(facts, session_id=facts.session_id.removeprefix(prefix))
        for facts in sessions
        if facts.session_id.startswith(prefix)
    ]

"""A session is called "key/name" in the engine; its errors reach the client, who must not read a key in them."""

from __future__ import annotations

import pytest

from runners.errors import ConflictError, NotFoundError
from runners.kv_cache.sessions import SessionStore


def test_errors_do_not_name_the_session() -> None:
    store = SessionStore(60.0, lambda table: None)
    store.begin("alice/s", "r1", b"root", 0.0)
    with pytest.raises(ConflictError) as in_use:
        store.begin("alice/s", "r2", b"root", 1.0)
    with pytest.raises(ConflictError) as busy:
        store.delete("alice/s", 1.0)
    with pytest.raises(NotFoundError) as unknown:
        store.delete("alice/other", 1.0)
    for error in (in_use.value, busy.value, unknown.value):
        assert "alice" not in str(error)
        assert error.param == "session_id"

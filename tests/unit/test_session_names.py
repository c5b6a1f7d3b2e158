"""One key's sessions are out of reach of every other key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runners.engine_client import EngineClient
from runners.engine_io import EngineIO
from runners.engine_state import EnginePhase
from runners.errors import NotFoundError
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.session_queries import answer_query
from runners.messages import SessionFacts, SessionsQuery
from runners.session_names import engine_name, own_sessions


def facts(name: str) -> SessionFacts:
    return SessionFacts(name, 1, 1, 1, False, 0.0, 1.0)


def test_two_keys_may_use_one_name() -> None:
    assert len({engine_name("alice", "s"), engine_name("bob", "s"), engine_name("", "s")}) == 3


@pytest.mark.parametrize("session_id", ["s", "bob/s", "/s", ""])
def test_a_key_finds_what_it_named(session_id: str) -> None:
    sessions = [facts(engine_name("alice", session_id)), facts(engine_name("bob", "s")), facts("alicia/s")]
    assert [found.session_id for found in own_sessions("alice", sessions)] == [session_id]


def test_without_keys_there_is_one_owner() -> None:
    assert [found.session_id for found in own_sessions("", [facts("a/b"), facts("c")])] == ["a/b", "c"]


async def test_queries_reach_only_the_callers_own_sessions(tmp_path: Path) -> None:
    io = EngineIO(tmp_path / "e.sock", beat_interval_s=0.05)
    io.start()
    client = EngineClient(slots=2, max_queued_requests=3, beat_limit_s=30.0)
    client.attach(f"ipc://{tmp_path / 'e.sock'}")
    client.set_state(EnginePhase.READY)
    store = CacheManager(4).sessions
    for name in (engine_name("alice", "s"), engine_name("bob", "t")):
        session = store.begin(name, name, b"", 0.0)
        store.end_turn(session, [1, 2], 1, session.table, 0, 0.0)

    async def ask(**fields: object) -> list[str]:
        asked = asyncio.create_task(client.sessions("m", **fields))  # type: ignore[arg-type]
        query = await asyncio.to_thread(io.inbox.get, True, 10)
        assert isinstance(query, SessionsQuery)
        io.answer(answer_query(store, query, 1.0))
        return [found.session_id for found in await asked]

    try:
        assert await ask(key_id="alice") == ["s"]
        assert await ask(key_id="alice", session_id="s") == ["s"]
        with pytest.raises(NotFoundError):
            await ask(key_id="alice", session_id="t", delete=True)
        assert await ask(key_id="bob", session_id="t", delete=True) == ["t"]
        assert await ask(key_id="bob") == []
    finally:
        client.detach()
        io.stop()

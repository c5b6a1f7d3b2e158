"""What `/v1/sessions` asks, answered from the session store."""

from __future__ import annotations

from runners.errors import ConflictError, NotFoundError
from runners.kv_cache.sessions import SessionInfo, SessionStore
from runners.messages import OutputError, SessionFacts, SessionsQuery, SessionsReply


def answer_query(store: SessionStore, query: SessionsQuery, now: float) -> SessionsReply:
    """The sessions asked for; one that is not there or in use is the reply's error."""
    try:
        found = store.list(now) if query.session_id is None else [store.get(query.session_id, now)]
        if query.delete and query.session_id is not None:
            store.delete(query.session_id, now)
    except NotFoundError as error:
        return SessionsReply(query.query_id, error=OutputError(error.message, "session_not_found"))
    except ConflictError as error:
        return SessionsReply(query.query_id, error=OutputError(error.message, "session_busy"))
    return SessionsReply(query.query_id, [_facts(info, now) for info in found])


def _facts(info: SessionInfo, now: float) -> SessionFacts:
    return SessionFacts(
        session_id=info.session_id,
        num_tokens=info.num_tokens,
        num_blocks=info.num_blocks,
        num_turns=info.num_turns,
        busy=info.busy,
        idle_s=max(0.0, now - info.last_used),
        expires_in_s=None if info.expires_at is None else max(0.0, info.expires_at - now),
    )

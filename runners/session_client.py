"""What the HTTP process asks the engine about sessions, and the answers' way back to who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runners.errors import EngineUnavailableError
from runners.messages import SessionFacts, SessionsQuery, SessionsReply
from runners.request_stream import error_of
from runners.session_names import engine_name, own_sessions

_TIMEOUT_S = 10.0


class SessionClient:
    """Queries under way; `send` brings one to the engine, `answered` takes its reply."""

    def __init__(self, send: Callable[[SessionsQuery], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[SessionsReply]] = {}
        self._num_queries = 0

    async def ask(self, model: str, session_id: str | None, key_id: str, *, delete: bool) -> list[SessionFacts]:
        """All sessions of a key on a model, or the one named; with `delete` it is gone afterwards.

        NotFoundError, ConflictError while a request has it, EngineUnavailableError while the engine does not answer.
        """
        self._num_queries += 1
        query_id = f"sessions-{self._num_queries}"
        reply: asyncio.Future[SessionsReply] = asyncio.get_running_loop().create_future()
        self._waiting[query_id] = reply
        name = None if session_id is None else engine_name(key_id, session_id)
        self._send(SessionsQuery(query_id, model, name, delete))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await reply
        except TimeoutError:
            raise EngineUnavailableError("The engine does not answer.") from None
        finally:
            del self._waiting[query_id]
        if answer.error is not None:
            raise error_of(answer.error)
        return own_sessions(key_id, answer.sessions)

    def answered(self, reply: SessionsReply) -> None:
        """A reply that nobody waits for any longer is dropped."""
        query = self._waiting.get(reply.query_id)
        if query is not None and not query.done():
            query.set_result(reply)

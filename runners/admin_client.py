"""Admin queries of the HTTP process to the engine, and the answers' way back to who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runners.errors import EngineUnavailableError, WavelaneError
from runners.messages import AdminQuery, AdminReply
from runners.request_stream import error_of


class AdminClient:
    """Queries under way; `send` brings one to the engine, `answered` takes its reply."""

    def __init__(self, send: Callable[[AdminQuery], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[AdminReply]] = {}
        self._num_queries = 0

    async def ask(self, make_query: Callable[[str], AdminQuery]) -> None:
        """Send the query made for an id, and wait until it is done, however long that takes.

        Raises the engine's refusal, EngineUnavailableError when the engine dies meanwhile.
        """
        self._num_queries += 1
        query = make_query(f"admin-{self._num_queries}")
        reply: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        self._waiting[query.query_id] = reply
        self._send(query)
        try:
            answer = await reply
        finally:
            del self._waiting[query.query_id]
        if answer.error is not None:
            raise error_of(answer.error)

    def answered(self, reply: AdminReply) -> None:
        """A reply that nobody waits for any longer is dropped."""
        query = self._waiting.get(reply.query_id)
        if query is not None and not query.done():
            query.set_result(reply)

    def fail(self, error: WavelaneError | None = None) -> None:
        """The engine is gone, and with it the answers."""
        for query in self._waiting.values():
            if not query.done():
                query.set_exception(error or EngineUnavailableError("The engine stopped before this was done."))

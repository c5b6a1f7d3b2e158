"""`/v1/sessions`: the conversations whose KV the engine keeps."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec

from runners.api.endpoint import Endpoint, Exchange
from runners.messages import SessionFacts


class Sessions(Endpoint):
    """The caller's sessions of a model (`?model=`, the first one when it is not named), or one of them; DELETE forgets
    it. 404 for an unknown one, 409 while a request has it."""

    methods = ("GET", "HEAD", "DELETE")

    async def handle(self, exchange: Exchange) -> None:
        session_id: str | None = exchange.scope["path_params"].get("session_id")
        delete = exchange.scope["method"] == "DELETE"
        if session_id is None:
            self.require_method(exchange, "GET", "HEAD")
        query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
        model, _ = self.model(query.get("model", [None])[0])
        found = await self.engine.sessions(model, session_id, key_id=exchange.key_id, delete=delete)
        if session_id is None:
            answer: dict[str, Any] = {"object": "list", "data": [_session_object(facts) for facts in found]}
        elif delete:
            answer = {"id": session_id, "object": "session.deleted", "deleted": True}
        else:
            answer = _session_object(found[0])
        await exchange.reply(msgspec.json.encode(answer))


def _session_object(facts: SessionFacts) -> dict[str, Any]:
    return {
        "id": facts.session_id,
        "object": "session",
        "tokens": facts.num_tokens,
        "blocks": facts.num_blocks,
        "turns": facts.num_turns,
        "busy": facts.busy,
        "idle_s": round(facts.idle_s, 3),
        "expires_in_s": None if facts.expires_in_s is None else round(facts.expires_in_s, 3),
    }

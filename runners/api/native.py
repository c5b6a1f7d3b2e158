"""Text for callers inside the process, such as BentoML's own endpoint: no HTTP, the same checks and the same engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from starlette.datastructures import State

from runners.api.access import Access
from runners.api.completions import Completions
from runners.api.protocol import CompletionRequest


class NativeCompletions:
    """`state` is the application's."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._completions = Completions(state)

    async def stream(
        self, request: CompletionRequest, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> AsyncIterator[str]:
        """Pieces of the completion, as they are generated. `headers` are the caller's, with its API key.

        Raises `runners.errors`.
        """
        access: Access = self._state.access
        with access.request(headers, needs_admin=False) as caller:
            key_id = "" if caller is None else caller.name
            async with self._completions.generation(request, key_id) as (generation, _):
                async for delta in generation.choices[0].deltas():
                    if delta.text:
                        yield delta.text

"""What the HTTP layer asks of the engine client, as protocols: tests put a scripted one in its place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from runners.messages import EngineStats, ModelInfo, SessionFacts, TokenLogprobs
from runners.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from configs.schema import ModelSection


class OutputChunk(Protocol):
    """New tokens of one request: one, or several when the reader has lagged."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def embedding(self) -> bytes: ...


class RequestStream(Protocol):
    """The output of one request. Iterating raises `runners.errors` when the engine fails the request."""

    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...
    def abort(self) -> None:
        """The client is gone: free everything. Idempotent, and nothing after the end."""

    def finish(self, keep_tokens: int) -> None:
        """A stop string ended the request after `keep_tokens` generated tokens."""


class EngineState(Protocol):
    """`phase` is starting, loading, ready, restarting, draining or failed; `fraction` in 0..1 where known."""

    @property
    def phase(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def fraction(self) -> float | None: ...
    @property
    def since(self) -> float: ...


class Engine(Protocol):
    """The async half of the engine, as `runners.engine_client.EngineClient` offers it."""

    @property
    def state(self) -> EngineState: ...
    @property
    def models(self) -> Sequence[ModelInfo]: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def model_stats(self) -> Mapping[str, EngineStats]:
        """By each model's first name."""
        ...

    @property
    def is_ready(self) -> bool: ...

    async def submit(
        self,
        model: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        key_id: str = "",
        deadline_s: float | None = None,
        session_id: str | None = None,
        append_to_session: bool = False,
        cache_salt: str = "",
        follows: bool = False,
    ) -> RequestStream: ...

    async def sessions(
        self, model: str, session_id: str | None = None, *, key_id: str = "", delete: bool = False
    ) -> list[SessionFacts]: ...


class AdminStatus(Protocol):
    """`status` is loading, ready or unloading; `info` is there once the model has been loaded."""

    @property
    def name(self) -> str: ...
    @property
    def section(self) -> ModelSection: ...
    @property
    def status(self) -> str: ...
    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def quota_blocks(self) -> int | None: ...


class Admin(Protocol):
    """Models that come and go, as `runners.model_admin.ModelAdmin` does it. Raises `runners.errors`."""

    def status(self) -> Sequence[AdminStatus]: ...
    def find(self, name: str) -> AdminStatus: ...
    async def load(self, section: ModelSection) -> ModelInfo: ...
    async def unload(self, name: str, deadline_s: float | None = None) -> None: ...
    async def set_quota(self, name: str, quota_blocks: int | None) -> None: ...

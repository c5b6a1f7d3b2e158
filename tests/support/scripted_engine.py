"""An engine client whose replies the test writes: same surface as `runners.engine_client.EngineClient`, no process."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from runners.errors import ConflictError, EngineUnavailableError, NotFoundError, WavelaneError
from runners.messages import EngineStats, ModelInfo, SessionFacts, TokenLogprobs
from runners.request import FinishReason, SamplingParams
from runners.request_stream import OutputChunk


def model_info(
    *, name: str = "tiny", vocab_size: int = 512, max_context: int = 2048, eos_token_ids: Sequence[int] = ()
) -> ModelInfo:
    return ModelInfo(
        served_names=[name],
        source="test",
        path="",
        architecture="llama",
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=list(eos_token_ids),
        dtype="float32",
        quantization="none",
        parameters=0,
        weight_bytes=0,
        device="cpu",
        executor="scripted",
        slots=4,
        block_tokens=16,
        total_blocks=128,
        kv_bytes=0,
        peak_concurrency=1.0,
    )


@dataclass
class State:
    phase: str = "ready"
    detail: str = ""
    fraction: float | None = None
    since: float = field(default_factory=time.monotonic)


def embedding(prompt_ids: Sequence[int]) -> bytes:
    """What the scripted engine pools out of a prompt: three numbers."""
    return array("f", [float(len(prompt_ids)), float(prompt_ids[0]), 0.5]).tobytes()


@dataclass
class Reply:
    """What the engine will say to one request.

    `token_ids` are cut by max_tokens, end markers and stop ids as the real engine does; when they run out before
    that, the reply ends there with "stop". `tokens_per_chunk` stands for a reader that lags. `error` is raised after
    the tokens. `gate` holds the first token back (a prefill that takes its time).
    """

    token_ids: Sequence[int] = ()
    tokens_per_chunk: int = 1
    error: Exception | None = None
    gate: asyncio.Event | None = None
    chosen_logprob: float = -0.5
    cached_tokens: int = 0


@dataclass
class Submission:
    """One call of `submit` and what became of it."""

    model: str
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    deadline_s: float | None
    cache_salt: str
    session_id: str | None = None
    append_to_session: bool = False
    follows: bool = False
    is_aborted: bool = False
    kept_tokens: int | None = None
    tokens_read: int = 0


class ScriptedStream:
    def __init__(self, reply: Reply, submission: Submission, info: ModelInfo) -> None:
        self._reply = reply
        self._submission = submission
        self._info = info
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self._chunks()

    def abort(self) -> None:
        self._is_closed = True
        self._submission.is_aborted = True

    def finish(self, keep_tokens: int) -> None:
        self._is_closed = True
        self._submission.kept_tokens = keep_tokens

    def _generated(self) -> tuple[list[int], FinishReason]:
        params = self._submission.params
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._info.eos_token_ids))
        ids: list[int] = []
        for token_id in self._reply.token_ids:
            if len(ids) == params.max_tokens:
                return ids, FinishReason.LENGTH
            ids.append(token_id)
            if token_id in ends and len(ids) > params.min_tokens:
                return ids, FinishReason.STOP
        return ids, FinishReason.LENGTH

    async def _chunks(self) -> AsyncIterator[OutputChunk]:
        reply, params = self._reply, self._submission.params
        if reply.gate is not None:
            await reply.gate.wait()
        ids, reason = self._generated()
        if not ids and reply.error is not None:
            raise reply.error
        step = reply.tokens_per_chunk
        for start in range(0, max(len(ids), 1), step):
            await asyncio.sleep(0)
            if self._is_closed:
                return
            part = ids[start : start + step]
            self._submission.tokens_read += len(part)
            is_last = start + step >= len(ids) and reply.error is None
            yield OutputChunk(
                part,
                reason if is_last else None,
                None if params.logprobs is None else [self._logprobs(i, params.logprobs) for i in part],
                self._prompt_logprobs() if start == 0 else None,
                reply.cached_tokens if start == 0 else 0,
                embedding(self._submission.prompt_ids) if params.pooling else b"",
            )
        if reply.error is not None:
            raise reply.error

    def _logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        tops = [(token_id + k) % self._info.vocab_size for k in range(count)]
        values = [self._reply.chosen_logprob - k for k in range(count)]
        return TokenLogprobs(token_id, self._reply.chosen_logprob, tops, values)

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        count = self._submission.params.prompt_logprobs
        if count is None:
            return None
        return [None, *(self._logprobs(token_id, count) for token_id in self._submission.prompt_ids[1:])]


class ScriptedEngine:
    """`reply` answers every request: a `Reply`, or a function of (prompt ids, params)."""

    def __init__(
        self,
        reply: Reply | Callable[[list[int], SamplingParams], Reply] | None = None,
        *,
        info: ModelInfo | None = None,
    ) -> None:
        self.reply = reply if reply is not None else Reply()
        self.models = [info if info is not None else model_info()]
        self.state = State()
        self.stats = EngineStats()
        self.model_stats: dict[str, EngineStats] = {}
        self.submissions: list[Submission] = []
        self.known_sessions: dict[str, SessionFacts] = {}
        self.submit_error: WavelaneError | None = None
        self.refuse_after: int | None = None
        self.submitted = asyncio.Event()

    async def sessions(
        self, model: str, session_id: str | None = None, *, key_id: str = "", delete: bool = False
    ) -> list[SessionFacts]:
        if session_id is not None and session_id not in self.known_sessions:
            raise NotFoundError(f"no session {session_id!r}", code="session_not_found")
        found = [facts for name, facts in self.known_sessions.items() if session_id in (None, name)]
        if delete and found[0].busy:
            raise ConflictError("in use", code="session_busy")
        if delete and session_id is not None:
            del self.known_sessions[session_id]
        return found

    @property
    def is_ready(self) -> bool:
        return self.state.phase == "ready"

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
    ) -> ScriptedStream:
        if not self.is_ready:
            raise EngineUnavailableError(f"The engine is not ready: {self.state.phase}.")
        if self.submit_error is not None and len(self.submissions) >= (self.refuse_after or 0):
            raise self.submit_error
        submission = Submission(
            model,
            prompt_ids,
            params,
            request_id,
            priority,
            deadline_s,
            cache_salt,
            session_id,
            append_to_session,
            follows,
        )
        self.submissions.append(submission)
        self.submitted.set()
        reply = self.reply(prompt_ids, params) if callable(self.reply) else self.reply
        return ScriptedStream(reply, submission, self.models[0])

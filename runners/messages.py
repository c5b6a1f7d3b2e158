"""What the HTTP process and the engine process say to each other.

Every message is a tagged msgspec struct in msgpack. Token ids travel as packed little-endian int32 bytes
(`pack_ids`): one memcpy either way, four bytes a token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

from runners.request import FinishReason, SamplingParams


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes. OverflowError on an id outside int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`. ValueError when the length is no multiple of four."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


# --- HTTP process -> engine ---------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The first message of an HTTP process: from now on the engine sends it progress, beats and outputs."""


class AddRequest(_Message, frozen=True):
    """A new request. `arrival_time` and `deadline` are seconds of the machine's monotonic clock.

    `follows`: another choice of a prompt that was let in already; a full queue does not refuse it.
    """

    request_id: str
    model: str
    prompt: bytes
    params: SamplingParams
    arrival_time: float
    deadline: float | None = None
    priority: int = 0
    key_id: str = ""
    session_id: str | None = None
    append_to_session: bool = False
    cache_salt: str = ""
    follows: bool = False


class AbortRequests(_Message, frozen=True):
    """The clients of these requests are gone. Unknown ids are ignored (they may have just finished)."""

    request_ids: list[str]


class FinishRequest(_Message, frozen=True):
    """A stop string matched in the HTTP process: the request ends with `keep_tokens` generated tokens kept."""

    request_id: str
    keep_tokens: int


class Acknowledge(_Message, frozen=True):
    """The HTTP process has handled every `StepOutputs` up to and including `sequence`."""

    sequence: int


class SessionsQuery(_Message, frozen=True):
    """Asks for one session, or all (`session_id` None); with `delete` that one goes. Answered by SessionsReply."""

    query_id: str
    model: str
    session_id: str | None = None
    delete: bool = False


class LoadModel(_Message, frozen=True):
    """Load one more model while the others serve; `section` is its `models` entry as JSON. Answered by AdminReply."""

    query_id: str
    section: bytes


class UnloadModel(_Message, frozen=True):
    """Take no more requests of this model, free everything once those in flight have ended. `deadline` is when they end
    with an error [seconds of the machine's monotonic clock]. Answered by AdminReply."""

    query_id: str
    model: str
    deadline: float


class SetQuota(_Message, frozen=True):
    """Bound the KV blocks of a model; None: all of its pool. Answered by AdminReply."""

    query_id: str
    model: str
    quota_blocks: int | None


class WatchSteps(_Message, frozen=True):
    """Somebody looks at the steps of this HTTP process's engine (`StepsReport`), or nobody does any more."""

    is_on: bool


class Shutdown(_Message, frozen=True):
    """Stop now; the HTTP process has drained what it wanted drained."""


AdminQuery = LoadModel | UnloadModel | SetQuota
EngineInput = (
    Hello
    | AddRequest
    | AbortRequests
    | FinishRequest
    | Acknowledge
    | SessionsQuery
    | AdminQuery
    | WatchSteps
    | Shutdown
)


# --- engine -> HTTP process ---------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token (natural logarithm) and of its most likely alternatives, best first."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class OutputError(msgspec.Struct, frozen=True):
    """Why the engine failed one request; `code` is an error code of `runners.errors`."""

    message: str
    code: str


class RequestOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request, and its end when it has ended.

    `logprobs` has one entry a token of `token_ids` when they were asked for. `prompt_logprobs` comes once, with the
    first output: one entry a prompt token, the first None. `cached_tokens` counts prompt tokens served from cache.
    `embedding` is the pooled hidden state as little-endian float32, where one was asked for. `queue_s`, too, comes with
    the first output: how long the request waited for its place.
    """

    request_id: str
    token_ids: bytes = b""
    finish_reason: FinishReason | None = None
    error: OutputError | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    embedding: bytes = b""
    queue_s: float | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class StepOutputs(_Message, frozen=True):
    """All new tokens of one step for one HTTP process. `sequence` rises by one a message."""

    sequence: int
    outputs: list[RequestOutput]


class SessionFacts(msgspec.Struct, frozen=True):
    """One session: `idle_s` since its last use, `expires_in_s` None while a request has it."""

    session_id: str
    num_tokens: int
    num_blocks: int
    num_turns: int
    busy: bool
    idle_s: float
    expires_in_s: float | None


class SessionsReply(_Message, frozen=True):
    """Answer to a SessionsQuery: the sessions asked for, as they were before a deletion."""

    query_id: str
    sessions: list[SessionFacts] = []
    error: OutputError | None = None


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """A snapshot for health and metrics; counters count from the start of the engine process, or of the model.

    `free_blocks` could be handed out now, `used_blocks` are held by requests and sessions of this model.
    """

    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    queued_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    corrupt_messages: int = 0
    used_blocks: int = 0


def sum_stats(stats: Iterable[EngineStats]) -> EngineStats:
    """Of all models together. Models that share a pool count its free blocks once each."""
    return EngineStats(*(sum(column) for column in zip(*map(msgspec.structs.astuple, stats), strict=True)))


class AdminReply(_Message, frozen=True):
    """Answer to an AdminQuery, sent when it is done; a change of the models is announced before it (`Ready`).

    `models` are the stats of each model then.
    """

    query_id: str
    error: OutputError | None = None
    models: dict[str, EngineStats] = {}


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Durations of one kind of step, counted by the bounds of `runners.loop_profile`, and their sum."""

    counts: list[int]
    total_s: float


class LoopTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the engine loop's time went since its start: by kind of step, and by phase of its turns [seconds]."""

    steps: dict[str, StepTimes] = {}
    phases: dict[str, float] = {}


class Beat(_Message, frozen=True):
    """Sent by the engine's I/O thread about once a second, whatever the loop is doing.

    `loop_stamp` is the monotonic time at which the loop last began or ended a step; `step_limit_s` is how long the
    step in progress may take before the engine counts as hung, None while idle or in an announced long operation.
    `models` are the stats of each model by its first name, `stats` those of all together.
    """

    time: float
    loop_stamp: float
    step_limit_s: float | None = None
    stats: EngineStats = EngineStats()
    times: LoopTimes = LoopTimes()
    models: dict[str, EngineStats] = {}


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step that has ended: `start` and `end` in seconds of the monotonic clock, `num_tokens` of its forward pass.

    `decode_slots` is a hexadecimal number with a bit for each slot that decoded; `chunks` are (slot, tokens).
    """

    step_id: int
    kind: str
    start: float
    end: float
    num_tokens: int
    width: int
    decode_slots: str
    chunks: list[tuple[int, int]]


class SlotFacts(msgspec.Struct, frozen=True, array_like=True):
    """Who sits in a slot, as counts of tokens; `decodes` once the prompt has been launched."""

    slot: int
    decodes: bool
    prompt_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    max_tokens: int


class StepsReport(_Message, frozen=True):
    """Sent some twenty times a second while steps run and somebody watches; lost ones are lost.

    Stats and slots are of the moment `time`; `cached_blocks` of the free ones still hold known beginnings. `skipped`
    steps ran beside those reported.
    """

    model: str
    time: float
    stats: EngineStats
    slots: list[SlotFacts]
    cached_blocks: int
    steps: list[StepRecord]
    skipped: int = 0


class Progress(_Message, frozen=True):
    """Start-up phase: "resolving", "downloading", "loading", "warming"; `fraction` in 0..1 where it is known."""

    phase: str
    detail: str = ""
    fraction: float | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about a served model, known once it has been loaded. Bytes are bytes, context is tokens."""

    served_names: list[str]
    source: str
    path: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: list[int]
    dtype: str
    quantization: str
    parameters: int
    weight_bytes: int
    device: str
    executor: str
    slots: int
    block_tokens: int
    total_blocks: int
    kv_bytes: int
    peak_concurrency: float
    pooling: str = "mean"


class Ready(_Message, frozen=True):
    """The engine takes requests for these models; sent again when one has been loaded or is to be unloaded."""

    models: list[ModelInfo]


class StartupFailed(_Message, frozen=True):
    """Start-up stopped: one line that says which file, where, why. The process exits after it."""

    reason: str


EngineOutput = StepOutputs | SessionsReply | AdminReply | Beat | StepsReport | Progress | Ready | StartupFailed

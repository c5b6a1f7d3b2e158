"""A request: what was asked (`SamplingParams`), where it stands (`RequestStatus`), how it ended (`FinishReason`)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from runners.kv_cache.sessions import BlockTable, Session
    from runners.messages import TokenLogprobs
    from runners.scheduling.waiting import Account


class FinishReason(enum.StrEnum):
    """Why a request ended normally; OpenAI's words. The last one is the HTTP process's: the engine knows no tools."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class RequestStatus(enum.Enum):
    """WAITING → PREFILLING → RUNNING → FINISHED | ABORTED | FAILED, and RUNNING → PREEMPTED → WAITING."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (RequestStatus.FINISHED, RequestStatus.ABORTED, RequestStatus.FAILED)


_ENDS = frozenset({RequestStatus.FINISHED, RequestStatus.ABORTED, RequestStatus.FAILED})

ALLOWED_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    # A waiting request may end before it runs: `max_tokens` 0, an abort, a deadline, a prompt that cannot fit.
    RequestStatus.WAITING: frozenset({RequestStatus.PREFILLING}) | _ENDS,
    RequestStatus.PREFILLING: frozenset({RequestStatus.RUNNING}) | _ENDS,
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED}) | _ENDS,
    RequestStatus.PREEMPTED: frozenset({RequestStatus.WAITING}) | _ENDS,
    RequestStatus.FINISHED: frozenset(),
    RequestStatus.ABORTED: frozenset(),
    RequestStatus.FAILED: frozenset(),
}


class InvalidTransitionError(RuntimeError):
    """A request was moved along an edge that its state machine does not have."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Validated by the HTTP layer; the engine trusts it.

    `temperature` 0 is greedy. `top_k` 0 is off. `seed` is always set (the HTTP layer draws one when the client
    sent none): a row's randomness is a function of (seed, position) alone. `logprobs` is the number of alternatives
    to report beside the chosen token (0 reports the chosen one only), None reports nothing. `grammar` constrains the
    text to a grammar of `runners.grammar`, empty means none. `pooling` ("mean", "last") asks for the prompt's embedding
    instead of tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    pooling: str = ""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Request:
    """One request inside the engine, from its arrival to its end.

    Tokens known and tokens computed are separate counts, because the device runs one step ahead of what was read:

        token_ids       prompt, then every generated token that has been read back
        num_computed    positions whose KV was computed by a launched step; the next decode row sits there
        length_limit    tokens at which the request ends whatever they are: prompt + max_tokens, or the context

    So a running request has `num_computed + 1 - len(token_ids)` tokens under way. `number` counts arrivals: of two
    requests the one with the higher number is the younger.
    """

    __slots__ = (
        "account",
        "arrival_time",
        "cached_tokens",
        "capacity",
        "deadline",
        "decoding",
        "key_id",
        "length_limit",
        "num_computed",
        "num_owed",
        "num_prefilled",
        "num_prompt_tokens",
        "num_sent_blocks",
        "number",
        "one_shot",
        "params",
        "priority",
        "prompt_logprobs",
        "queue_s",
        "queue_ticket",
        "request_id",
        "row",
        "session",
        "session_shared",
        "slot",
        "slot_ready",
        "started",
        "status",
        "stop_token_ids",
        "table",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        table: BlockTable,
        number: int = 0,
        arrival_time: float = 0.0,
        deadline: float | None = None,
        priority: int = 0,
        key_id: str = "",
        length_limit: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        session: Session | None = None,
        session_shared: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.params = params
        self.number = number
        self.arrival_time = arrival_time
        self.deadline = deadline
        self.priority = priority
        self.key_id = key_id
        self.length_limit = len(token_ids) + params.max_tokens if length_limit is None else length_limit
        self.stop_token_ids = stop_token_ids
        self.session = session
        self.session_shared = session_shared  # leading tokens that the session already had
        self.status = RequestStatus.WAITING
        self.num_computed = 0
        self.num_prefilled = 0  # of these, prompt positions whose step was committed
        self.decoding = False  # the step that ends the prompt was committed: from then on every token is
        self.num_owed = 0  # tokens of launched steps that come back after a preemption
        self.table = table
        self.capacity = 0  # tokens that the table has room for
        self.num_sent_blocks = 0  # leading entries of the table that the executor knows
        self.slot: int | None = None
        self.slot_ready = False  # the executor was told whose slot it is
        self.row: int | None = None  # place in the decode batch
        self.cached_tokens: int | None = None  # prompt tokens that its first admission found in the cache
        self.queue_s: float | None = None  # how long it waited for its first place
        self.started = False  # an output has left
        self.one_shot = False  # a chunk of it has failed: the rest of its prompt goes in one piece
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.queue_ticket = 0  # which entry of the waiting queue is its own; 0: none
        self.account: Account | None = None  # whom its tokens are charged to

    def move_to(self, status: RequestStatus) -> None:
        """InvalidTransitionError unless the state machine has this edge."""
        if status not in ALLOWED_TRANSITIONS[self.status]:
            raise InvalidTransitionError(f"request {self.request_id}: {self.status.value} -> {status.value}")
        self.status = status

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_certain(self) -> int:
        """Positions whose KV was computed by committed steps. The last known token has none: its step comes next."""
        return len(self.token_ids) - 1 if self.decoding else self.num_prefilled

    @property
    def wants_tokens(self) -> bool:
        """False when only the prompt is to be computed (`max_tokens` 0)."""
        return self.length_limit > self.num_prompt_tokens

    @property
    def may_use_cache(self) -> bool:
        """False when every prompt token's logits or hidden state is wanted: they exist only where they are computed."""
        return self.params.prompt_logprobs is None and not self.params.pooling

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, tokens={len(self.token_ids)}, "
            f"computed={self.num_computed}, slot={self.slot}, row={self.row})"
        )

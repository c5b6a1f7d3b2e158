"""A request: what was asked (`SamplingParams`), where it stands (`RequestStatus`), how it ended (`FinishReason`)."""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why a request ended normally; OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


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
    to report beside the chosen token (0 reports the chosen one only), None reports nothing.
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

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

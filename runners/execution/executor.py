"""The executor contract: carry out step plans on a device, give results back by step."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from runners.messages import OutputError, TokenLogprobs
from runners.scheduling.scheduler_output import StepPlan


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor can do; a policy that needs more falls back, with one log line.

    `pipeline_depth` is how many launched steps may be uncommitted when the next one is scheduled: 1 where the device
    feeds its own next step, 0 where launching blocks anyway and running ahead would only waste rows. `embed`: EMBED
    plans are carried out.
    """

    wave: bool = True
    mix: bool = True
    overlap: bool = False
    seq: bool = False
    pipeline_depth: int = 0
    embed: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced, in the order of `StepPlan.sampling_request_ids`.

    A request in `failures` has no usable token (its entry in `token_ids` is ignored). `logprobs` and
    `prompt_logprobs` hold entries only for the requests that asked for them. A chunk `start..end` yields the prompt
    logprobs of tokens `start+1..end` (ids from `SlotInit.token_ids`), as far as those are prompt tokens. `pooled` has
    the embedding of each request of an EMBED plan: float32, little-endian, of length 1.
    """

    step_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failures: Mapping[str, OutputError] = field(default_factory=dict)
    pooled: Mapping[str, bytes] = field(default_factory=dict)


class LaunchError(RuntimeError):
    """A launch that raised before anything ran on the device; the step may be planned again, request by request."""


class DeviceLostError(RuntimeError):
    """The device context is unusable: every request in flight ends, the engine process restarts."""


class Executor(abc.ABC):
    """Owns the device. Called from the engine's loop thread only."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abc.abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Start one step. Raises LaunchError if nothing ran, DeviceLostError if the device is gone."""

    @abc.abstractmethod
    def collect(self) -> StepResult:
        """Result of the oldest launched step not yet collected (flights excepted); blocks until it is there."""

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """True when `collect` would not block. False with nothing in flight."""

    def completed_flights(self) -> tuple[tuple[int, StepResult], ...]:
        """(flight_id, result) of every overlap prefill that has completed since the last call."""
        return ()

    def use_idle_time(self) -> bool:
        """A short piece of preparation, asked for while nothing is in flight and nobody waits; False: nothing to do."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Free the device. Nothing may be launched afterwards."""

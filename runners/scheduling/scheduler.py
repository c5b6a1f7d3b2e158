"""The scheduler's surface (see class docstring for the loop that drives it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runners.execution.executor import Capabilities, StepResult
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, EngineStats, OutputError, RequestOutput
from runners.scheduling.scheduler_output import StepPlan, Wait


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the model and the executor allow. `max_context` in tokens, `slots` requests on the device at once."""

    max_context: int
    slots: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)


class Scheduler:
    """Decides every step; pure: no torch, no clock, no I/O. The loop that drives it:

        while running:
            for each input: scheduler.add_request / abort / finish (…, now)
            plan = scheduler.schedule(now)
            if plan is a StepPlan:
                try: executor.launch(plan)
                except LaunchError as error: scheduler.launch_failed(plan, OutputError(str(error), "request_failed"), now)
            if scheduler.num_uncommitted > pipeline_depth or (plan is a Wait and scheduler.num_uncommitted > 0):
                scheduler.commit(executor.collect(), executor.completed_flights(), now)
            elif scheduler.num_flights > 0:                     # poll, or wait for the flight when plan is a Wait
                scheduler.commit(None, executor.completed_flights(), now)
            send(scheduler.take_outputs())                      # whatever any call above produced, in order
            log(scheduler.take_notices())
            if plan is a Wait and nothing is in flight: sleep for input, at most until plan.until

    Outputs never come back from a call: every call may put some into the outbox, `take_outputs` empties it.
    An aborted request gets no output; every other request ends with exactly one final output (unless the front end
    ended it itself with `finish`).
    """

    def __init__(
        self, profile: Any, capabilities: Capabilities, cache: CacheManager, limits: SchedulerLimits, *, check: bool = False
    ) -> None: ...

    def add_request(self, message: AddRequest, now: float) -> None: ...
    def abort(self, request_id: str, now: float) -> None: ...
    def finish(self, request_id: str, keep_tokens: int, now: float) -> None: ...
    def schedule(self, now: float) -> StepPlan | Wait: ...
    def launch_failed(self, plan: StepPlan, error: OutputError, now: float) -> None: ...
    def commit(
        self, result: StepResult | None, completed_flights: Sequence[tuple[int, StepResult]], now: float
    ) -> None: ...
    def fail_all(self, error: OutputError, now: float) -> None:
        """The device is gone: every request ends with `error`."""

    def take_outputs(self) -> list[RequestOutput]: ...
    def take_notices(self) -> list[str]: ...

    @property
    def has_work(self) -> bool:
        """True while any request is not finished or any step or flight is uncommitted."""
    @property
    def num_uncommitted(self) -> int: ...
    @property
    def num_flights(self) -> int: ...
    def stats(self) -> EngineStats: ...
    def set_quota_blocks(self, quota_blocks: int) -> None: ...

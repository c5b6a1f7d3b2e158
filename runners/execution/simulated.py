"""The executor without a device: a clock instead of kernels, made-up tokens, scripted faults.

Under a `VirtualClock` a simulation runs as fast as the host can schedule, and the same arrivals give the same times to
the last bit. Under `RealTimeClock` the same executor serves the HTTP path, with steps that take their modelled time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from runners.execution.cost_model import CostModel
from runners.execution.executor import Capabilities, DeviceLostError, Executor, LaunchError, StepResult
from runners.messages import OutputError, TokenLogprobs
from runners.scheduling.scheduler_output import PlanKind, PrefillChunk, SlotInit, StepPlan

ALL_CAPABILITIES = Capabilities(wave=True, mix=True, overlap=True, seq=True, pipeline_depth=1)

_MADE_UP_LOGPROB = -1.0


class Clock(Protocol):
    """Seconds from any origin; `wait_until` returns once that time has come."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class VirtualClock:
    """Stands still unless told to move."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)


class RealTimeClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        delay_s = moment - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)


def simulated_token(request_id: str, position: int, vocab_size: int) -> int:
    """The token at `position` of a request: a hash, so that it depends on nothing else."""
    return crc32(b"%d" % position, crc32(request_id.encode())) % vocab_size


@dataclass(slots=True)
class Faults:
    """What goes wrong, and when."""

    launch: Callable[[StepPlan], str | None] = lambda plan: None
    """A message: this launch raises LaunchError with it."""
    token: Callable[[str, int], str | None] = lambda request_id, position: None
    """A message: the token at this position of this request fails with it."""
    lost_at_step: int | None = None
    """Collecting this step, or a later one, raises DeviceLostError."""


class SimulatedExecutor(Executor):
    """Carries plans out in modelled time.

    `token_of(request_id, position)` names the token at a position of a sequence; by default a hash below `vocab_size`.
    So tokens depend on no batching, preemption or caching, as on an executor that is right. Steps run one after
    another; a flight runs beside them, and they slow each other down as the cost model says.
    """

    def __init__(
        self,
        cost_model: CostModel,
        clock: Clock,
        *,
        capabilities: Capabilities = ALL_CAPABILITIES,
        vocab_size: int = 32000,
        token_of: Callable[[str, int], int] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._cost_model = cost_model
        self._clock = clock
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self._token_of = token_of or self._hashed_token
        self._faults = faults
        self._steps: deque[tuple[StepPlan, float]] = deque()  # with the time at which they are done
        self._flights: deque[tuple[StepPlan, float]] = deque()
        self._slots: dict[int, SlotInit] = {}
        self._device_free_at = clock.now()
        self.last_launch = (clock.now(), clock.now())
        """(start, end) of the step launched last, in seconds of the clock."""

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def launch(self, plan: StepPlan) -> None:
        if self._faults is not None:
            message = self._faults.launch(plan)
            if message is not None:
                raise LaunchError(message)
        for init in plan.slot_inits:
            self._slots[init.slot] = init
        start = max(self._clock.now(), self._device_free_at)
        duration_s = self._cost_model.step_s(plan)
        beside = plan.kind is PlanKind.OVERLAP_PREFILL or any(done_at > start for _, done_at in self._flights)
        end = start + duration_s * (self._cost_model.overlap_slowdown if beside else 1.0)
        if plan.kind is PlanKind.OVERLAP_PREFILL:
            self._flights.append((plan, end))
        else:
            self._device_free_at = end
            self._steps.append((plan, end))
        self.last_launch = (start, end)

    def collect(self) -> StepResult:
        plan, done_at = self._steps.popleft()
        self._clock.wait_until(done_at)
        if self._faults is not None and self._faults.lost_at_step is not None:
            lost_at = self._faults.lost_at_step
            if plan.step_id >= lost_at:
                raise DeviceLostError(f"the simulated device is lost at step {lost_at}")
        return self._result(plan)

    def is_ready(self) -> bool:
        return bool(self._steps) and self._steps[0][1] <= self._clock.now()

    def completed_flights(self) -> tuple[tuple[int, StepResult], ...]:
        done = []
        while self._flights and self._flights[0][1] <= self._clock.now():
            plan, _ = self._flights.popleft()
            assert plan.flight_id is not None
            done.append((plan.flight_id, self._result(plan)))
        return tuple(done)

    def next_completion(self) -> float | None:
        """When the next step or flight will be done; None with nothing in flight."""
        return min((done_at for _, done_at in (*self._steps, *self._flights)), default=None)

    def close(self) -> None:
        self._steps.clear()
        self._flights.clear()
        self._slots.clear()

    # --- results --------------------------------------------------------------------------------------------------

    def _hashed_token(self, request_id: str, position: int) -> int:
        return simulated_token(request_id, position, self._vocab_size)

    def _result(self, plan: StepPlan) -> StepResult:
        sampled = [(row.request_id, row.slot, row.position + 1) for row in plan.decode_rows]
        sampled += [(chunk.request_id, chunk.slot, chunk.end) for chunk in plan.chunks if chunk.samples]
        token_ids = tuple([self._token_of(request_id, position) for request_id, _, position in sampled])
        logprobs = {
            request_id: self._made_up_logprobs(token_id, count)
            for (request_id, slot, _), token_id in zip(sampled, token_ids, strict=True)
            if (count := self._slots[slot].sampling.logprobs) is not None
        }
        prompt_logprobs = {
            chunk.request_id: self._prompt_logprobs(chunk, count)
            for chunk in plan.chunks
            if (count := self._slots[chunk.slot].sampling.prompt_logprobs) is not None
        }
        return StepResult(plan.step_id, token_ids, logprobs, prompt_logprobs, self._failures(sampled))

    def _failures(self, sampled: list[tuple[str, int, int]]) -> dict[str, OutputError]:
        if self._faults is None:
            return {}
        messages = {request_id: self._faults.token(request_id, position) for request_id, _, position in sampled}
        return {
            request_id: OutputError(message, "request_failed")
            for request_id, message in messages.items()
            if message is not None
        }

    def _prompt_logprobs(self, chunk: PrefillChunk, count: int) -> tuple[TokenLogprobs, ...]:
        init = self._slots[chunk.slot]
        predicted = init.token_ids[chunk.start + 1 : min(chunk.end + 1, init.num_prompt_tokens)]
        return tuple([self._made_up_logprobs(token_id, count) for token_id in predicted])

    def _made_up_logprobs(self, token_id: int, count: int) -> TokenLogprobs:
        top_ids = [(token_id + place) % self._vocab_size for place in range(count)]
        return TokenLogprobs(token_id, _MADE_UP_LOGPROB, top_ids, [_MADE_UP_LOGPROB - place for place in range(count)])

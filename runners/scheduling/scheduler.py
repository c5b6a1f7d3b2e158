"""Decides what the device does next.

Pure: requests and results go in, plans come out; the caller brings the time. The loop that drives it:

    while running:
        for each message: scheduler.add_request / abort / finish (…, now)
        plan = scheduler.schedule(now)
        if plan is a StepPlan:
            try: executor.launch(plan)
            except LaunchError as error: scheduler.launch_failed(plan, OutputError(str(error), "request_failed"), now)
        if scheduler.num_uncommitted > pipeline_depth or (plan is a Wait and scheduler.num_uncommitted > 0):
            scheduler.commit(executor.collect(), executor.completed_flights(), now)
        elif scheduler.num_flights > 0:               # when plan is a Wait there is nothing else to do: poll or block
            scheduler.commit(None, executor.completed_flights(), now)
        send(scheduler.take_outputs())                # whatever any call above produced, in order
        log(scheduler.take_notices())
        if plan is a Wait and nothing is in flight: sleep for messages, at most until plan.until
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runners.errors import ConflictError, InvalidRequestError, RateLimitError, WavelaneError
from runners.execution.executor import Capabilities, StepResult
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, EngineStats, OutputError, RequestOutput
from runners.request import FinishReason
from runners.scheduling.admission import AdmissionPolicy
from runners.scheduling.admitter import Admitter
from runners.scheduling.commit import commit_step
from runners.scheduling.deadlines import Deadlines
from runners.scheduling.intake import make_request
from runners.scheduling.invariants import check_invariants
from runners.scheduling.live_set import LiveSet
from runners.scheduling.plans import StepRecord
from runners.scheduling.policies import Policies, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan, Wait
from runners.scheduling.stepper import Stepper
from runners.scheduling.waiting import WaitingQueue

if TYPE_CHECKING:
    from configs.schema import Profile

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """One model's requests on one executor.

    Outputs never come back from a call: any call may put some into the outbox, and `take_outputs` empties it. An
    aborted request gets no output, nor does one that the front end ended with `finish`; every other request ends with
    exactly one final output. `check` verifies every invariant after every call (slow; for tests and debugging).
    """

    def __init__(
        self,
        profile: Profile,
        capabilities: Capabilities,
        cache: CacheManager,
        limits: SchedulerLimits,
        *,
        check: bool = False,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.policies = Policies.resolve(profile, capabilities)
        self.live = LiveSet(
            cache,
            limits.slots,
            WaitingQueue(ageing_s=profile.fairness.ageing_s, key_weights=profile.fairness.key_weights),
        )
        self.uncommitted: deque[StepRecord] = deque()
        self.flight_records: dict[int, StepRecord] = {}
        self._depth = capabilities.pipeline_depth
        self._embeds = capabilities.embed
        self._admission = AdmissionPolicy(self.policies.admission)
        self._deadlines = Deadlines()
        self._notices = list(self.policies.notices)
        self._stepper = Stepper(self.policies, self.live, limits.slots, self._notices)
        self._admitter = Admitter(self.policies, self._admission, self.live, self._stepper)
        self._last: StepRecord | None = None  # launched, as far as we know; a failure is reported before anything else
        self._check = check
        self._generation_tokens = 0

    # --- requests -------------------------------------------------------------------------------------------------

    def add_request(self, message: AddRequest, now: float) -> None:
        """A new request. One that cannot be served gets its error as an output."""
        live = self.live
        try:
            # As the front end counts: who will get a free slot is not queued. Else a burst that it let pass would be
            # refused here, after the status of the answer has left.
            num_queued = len(live.waiting) - live.slots.num_free
            if num_queued >= self.policies.max_queued_requests and not message.follows:
                raise RateLimitError(f"The queue is full: {len(live.waiting)} requests are waiting.")
            if message.request_id in live.requests:
                raise InvalidRequestError(f"A request {message.request_id!r} is being served already.")
            if message.params.pooling and not self._embeds:
                raise InvalidRequestError("This executor computes no embeddings.", code="invalid_request")
            request = make_request(message, self.cache, self.limits, now)
        except WavelaneError as error:
            live.outputs.append(RequestOutput(message.request_id, error=_output_error(error)))
            return
        wants_prompt = request.session is not None or not request.may_use_cache
        if not (request.wants_tokens or wants_prompt):
            live.outputs.append(RequestOutput(request.request_id, finish_reason=FinishReason.LENGTH))
            return
        idle = not live.requests and not live.flights
        self._admission.arrived(now, message.arrival_time, engine_idle=idle)
        live.add(request)
        self._deadlines.add(request)
        self._checked()

    def abort(self, request_id: str, now: float) -> None:
        """Nobody reads this request's tokens any more. Unknown ids may have just ended: nothing happens."""
        request = self.live.requests.get(request_id)
        if request is not None:
            self.live.abort(request, now)
        self._checked()

    def finish(self, request_id: str, keep_tokens: int, now: float) -> None:
        """A stop string matched in the front end: the request ends with `keep_tokens` of its generated tokens.

        One that has ended meanwhile (its end token came first) has its session trimmed all the same.
        """
        request = self.live.requests.get(request_id)
        if request is None:
            self.cache.trim_ended_turn(request_id, keep_tokens)
        else:
            self.live.finish(request, now, keep_tokens=keep_tokens)
        self._checked()

    # --- steps ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | Wait:
        """The next launch, or until when there is none. At most `pipeline_depth` steps may be uncommitted."""
        self._confirm_launch()
        self._expire(now)
        if len(self.uncommitted) > self._depth:
            return Wait()
        until = self._admission.cold_until(now, len(self.live.waiting))
        if until is not None:
            deadline = self._deadlines.next()
            return Wait(until if deadline is None else min(until, deadline))
        launched = None
        progress = (-1, -1)
        # A request that fails or is preempted while planning may leave room for another one to start at once.
        while launched is None and progress != (progress := (len(self.live.requests), self.live.num_preemptions)):
            self._admitter.admit(now)
            launched = self._stepper.next_step(now)
        if launched is None:
            self._checked()
            return Wait(self._deadlines.next())
        plan, record = launched
        self._last = record
        if plan.flight_id is None:
            self.uncommitted.append(record)
        else:
            self.flight_records[plan.flight_id] = record
        self._checked()
        return plan

    def launch_failed(self, plan: StepPlan, error: OutputError, now: float) -> None:
        """The launch of the last plan raised and nothing ran: its requests are planned again one by one."""
        record, self._last = self._last, None
        if record is None or record.step_id != plan.step_id:
            raise ValueError(f"step {plan.step_id} is not the one launched last")
        if plan.flight_id is None:
            self.uncommitted.pop()
        else:
            del self.flight_records[plan.flight_id]
        self._stepper.launch_failed(plan, record, error, now)
        self._checked()

    def commit(
        self, result: StepResult | None, completed_flights: Sequence[tuple[int, StepResult]], now: float
    ) -> None:
        """The result of the oldest uncommitted step, and of the flights that have come back."""
        self._confirm_launch()
        live = self.live
        if result is not None:
            self._generation_tokens += commit_step(live, self.uncommitted.popleft(), result, now)
        for flight_id, flight_result in completed_flights:
            record = self.flight_records.pop(flight_id)
            request = live.land(flight_id)
            self._generation_tokens += commit_step(live, record, flight_result, now)
            if request is not None and not request.status.is_terminal and request.decoding:
                live.leave_prefill(request)
        self._checked()

    def _confirm_launch(self) -> None:
        """The last plan was launched without an error: who has no token left to launch leaves, who prefilled joins."""
        record, self._last = self._last, None
        if record is None:
            return
        live = self.live
        for request in [request for request in record.rows if request.num_computed + 1 >= request.length_limit]:
            live.leave_rows(request)
        if record.step_id in live.flights:
            return
        for request, end, _ in record.chunks:
            if end == len(request.token_ids) and not request.status.is_terminal:
                live.leave_prefill(request)

    def _expire(self, now: float) -> None:
        self.cache.sessions.expire(now)
        for request in self._deadlines.take_expired(now):
            error = OutputError("The request's deadline passed before it finished.", "deadline_exceeded")
            self.live.fail(request, error, now)

    # --- what the engine loop asks --------------------------------------------------------------------------------

    def take_outputs(self) -> list[RequestOutput]:
        """Everything since the last call, in order."""
        outputs = self.live.outputs
        if outputs:
            self.live.outputs = []
        return outputs

    def take_notices(self) -> list[str]:
        """Lines for the log: policies that fell back, launches that failed."""
        notices, self._notices[:] = list(self._notices), []
        return notices

    @property
    def has_work(self) -> bool:
        """True while a request has not ended, or a step or flight is under way."""
        return bool(self.live.requests or self.uncommitted or self.flight_records)

    @property
    def num_uncommitted(self) -> int:
        return len(self.uncommitted)

    @property
    def num_flights(self) -> int:
        return len(self.flight_records)

    def set_quota_blocks(self, quota_blocks: int) -> None:
        """Lower or raise the KV quota while running. ValueError outside the pool."""
        self.cache.set_quota(quota_blocks)

    def stats(self) -> EngineStats:
        live, pool = self.live, self.cache.pool
        return EngineStats(
            waiting=len(live.waiting),
            running=len(live.requests) - len(live.waiting),
            free_blocks=max(0, self.cache.num_available),
            total_blocks=pool.quota_blocks,
            queued_tokens=live.waiting.num_tokens,
            steps=self._stepper.num_steps,
            preemptions=live.num_preemptions,
            evictions=self.cache.prefix.evictions,
            prompt_tokens=live.prompt_tokens,
            cached_tokens=live.cached_tokens,
            generation_tokens=self._generation_tokens,
            used_blocks=self.cache.num_used,
        )

    def _checked(self) -> None:
        if self._check:
            check_invariants(self)


def _output_error(error: WavelaneError) -> OutputError:
    code = error.code or ("session_busy" if isinstance(error, ConflictError) else "invalid_request")
    return OutputError(error.message, code)

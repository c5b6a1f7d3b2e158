"""Run a trace through one profile, and keep what happened."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runners.execution.cost_model import CostModel
from runners.execution.executor import Capabilities
from runners.execution.simulated import ALL_CAPABILITIES, SimulatedExecutor, VirtualClock
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, RequestOutput, pack_ids
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.simulation.trace import Arrival
from runners.simulation.virtual_engine import StepTrace, VirtualEngine

if TYPE_CHECKING:
    from configs.schema import Profile

_MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class Device:
    """What is simulated: step times, what the executor can do, KV blocks, longest context [tokens]."""

    cost_model: CostModel
    blocks: int
    max_context: int = 131_072
    capabilities: Capabilities = ALL_CAPABILITIES


@dataclass(slots=True)
class RequestRecord:
    """One request: seconds of the virtual clock, None where it did not get so far."""

    arrival: Arrival
    arrived_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class Simulation:
    """Everything that a report or a plot needs. `steps` stays empty unless they were asked for."""

    profile_name: str
    slots: int
    total_blocks: int
    requests: list[RequestRecord] = field(default_factory=list)
    inter_token_s: array[float] = field(default_factory=lambda: array("d"))
    step_kinds: Counter[str] = field(default_factory=Counter)
    steps: list[StepTrace] = field(default_factory=list)
    busy_s: float = 0.0
    end_s: float = 0.0
    block_seconds: float = 0.0
    max_blocks: int = 0
    preemptions: int = 0
    evictions: int = 0
    notices: list[str] = field(default_factory=list)


def simulate(
    arrivals: Sequence[Arrival], profile: Profile, device: Device, *, name: str = "", keep_steps: bool = False
) -> Simulation:
    """The whole trace, to its end. Turns of one session follow one another, however slow the profile is."""
    return _Run(arrivals, profile, device, name, keep_steps).simulation


class _Run:
    def __init__(
        self, arrivals: Sequence[Arrival], profile: Profile, device: Device, name: str, keep_steps: bool
    ) -> None:
        clock = VirtualClock()
        kv = profile.kv
        blocks = device.blocks if kv.quota_blocks is None else min(kv.quota_blocks, device.blocks)
        self._cache = CacheManager(
            blocks,
            kv.block_tokens,
            prefix_cache=kv.prefix_cache,
            shared_by_keys=kv.prefix_cache_scope == "server",
            session_ttl_s=kv.session_ttl_s,
        )
        executor = SimulatedExecutor(
            device.cost_model, clock, capabilities=device.capabilities, token_of=lambda _, position: position % 997
        )
        limits = SchedulerLimits(device.max_context, profile.engine.slots)
        self._scheduler = Scheduler(profile, device.capabilities, self._cache, limits)
        self._keep_steps = keep_steps
        self._records: dict[str, RequestRecord] = {}
        self._later_turns: dict[str, list[Arrival]] = {}
        self.simulation = Simulation(name, profile.engine.slots, blocks)
        self._engine = VirtualEngine(self._scheduler, executor, clock, on_step=self._on_step, on_output=self._on_output)
        for arrival in arrivals:
            if arrival.session is None:
                self._schedule(arrival, arrival.at_s)
            elif arrival.session in self._later_turns:
                self._later_turns[arrival.session].append(arrival)
            else:
                self._later_turns[arrival.session] = []
                self._schedule(arrival, arrival.at_s)
        self._engine.run()
        self._close(clock.now())

    def _schedule(self, arrival: Arrival, at: float) -> None:
        self._engine.at(at, lambda now: self._submit(arrival, at, now))

    def _submit(self, arrival: Arrival, at: float, now: float) -> None:
        number = len(self._records)
        request_id = f"{number}"
        record = RequestRecord(arrival, at)
        self._records[request_id] = record
        self.simulation.requests.append(record)
        params = SamplingParams(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
        self._scheduler.add_request(
            AddRequest(
                request_id,
                _MODEL,
                self._prompt(arrival, number),
                params,
                at,
                priority=arrival.priority,
                key_id=arrival.key,
                session_id=arrival.session,
            ),
            now,
        )

    def _prompt(self, arrival: Arrival, number: int) -> bytes:
        """Tokens that no other request begins with; a session's turn begins with the session's own."""
        known: list[int] = []
        if arrival.session is not None:
            known = self._cache.sessions.token_ids(arrival.session)[: arrival.prompt_tokens - 1]
        fresh = arrival.prompt_tokens - len(known)
        return pack_ids(known) + pack_ids((1000 + number,)) + bytes(4 * (fresh - 1))

    def _on_step(self, trace: StepTrace) -> None:
        simulation = self.simulation
        simulation.step_kinds[trace.plan.kind.value] += 1
        duration_s = trace.end - trace.start
        if trace.plan.flight_id is None:
            simulation.busy_s += duration_s
        blocks = self._cache.pool.num_out - self._cache.prefix.num_idle
        simulation.block_seconds += blocks * duration_s
        simulation.max_blocks = max(simulation.max_blocks, blocks)
        if self._keep_steps:
            simulation.steps.append(trace)

    def _on_output(self, now: float, output: RequestOutput) -> None:
        record = self._records[output.request_id]
        if output.token_ids:
            if record.last_token_at is None:
                record.first_token_at = now
                record.cached_tokens = output.cached_tokens
            else:
                self.simulation.inter_token_s.append(now - record.last_token_at)
            record.last_token_at = now
            record.output_tokens += len(output.token_ids) // 4
        if output.is_final:
            if output.error is not None:
                record.error = output.error.message
            turns = self._later_turns.get(record.arrival.session) if record.arrival.session is not None else None
            if turns:
                turn = turns.pop(0)
                self._schedule(turn, max(now, turn.at_s))

    def _close(self, now: float) -> None:
        simulation = self.simulation
        stats = self._scheduler.stats()
        simulation.preemptions = stats.preemptions
        simulation.evictions = stats.evictions
        simulation.notices = list(self._engine.notices)
        simulation.end_s = now

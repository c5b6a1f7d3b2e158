"""Scenarios for the scheduler: requests at given times, exact plans and exact virtual times out.

Times are milliseconds. Step times are by plan kind and nothing else, so that a test can add them up by hand.
"""

from __future__ import annotations

from typing import Any

from configs.schema import Profile
from runners.execution.cost_model import CostModel, StepCost
from runners.execution.executor import Capabilities
from runners.execution.simulated import Faults, VirtualClock, simulated_token
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, OutputError, RequestOutput, pack_ids, unpack_ids
from runners.request import FinishReason, SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import PlanKind, StepPlan
from runners.simulation.virtual_engine import StepTrace, VirtualEngine
from tests.support.checked_executor import CheckedExecutor

STEP_MS = {
    PlanKind.DECODE: 4.0,
    PlanKind.SEQUENTIAL: 3.0,
    PlanKind.WAVE: 8.0,
    PlanKind.CHUNK: 6.0,
    PlanKind.MIXED: 10.0,
    PlanKind.OVERLAP_PREFILL: 18.0,
}
VOCAB = 1000
EOS = 1000  # no made-up token is it; `eos_at` puts it where a test wants it


def cost_model() -> CostModel:
    return CostModel({kind: StepCost(milliseconds / 1000) for kind, milliseconds in STEP_MS.items()})


class Scenario:
    """One engine under a virtual clock, every invariant checked after every call.

    By default without cold-burst wait, hold or prefix cache, so that a test names the policy that it is about.
    `sections` overrides the profile: `Scenario(mix={"mode": "off"})`.
    """

    def __init__(
        self,
        *,
        slots: int = 64,
        blocks: int = 4096,
        depth: int = 1,
        lacks: tuple[str, ...] = (),
        max_context: int = 100_000,
        faults: Faults | None = None,
        eos_at: dict[str, int] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        defaults: dict[str, dict[str, Any]] = {
            "admission": {"cold_window_us": 0, "max_hold_steps": 0},
            "kv": {"prefix_cache": False},
            "seq": {"enabled": False},
        }
        merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
        self.profile = Profile.model_validate(merged)
        capabilities = Capabilities(
            wave="wave" not in lacks,
            mix="mix" not in lacks,
            overlap="overlap" not in lacks,
            seq="seq" not in lacks,
            pipeline_depth=depth,
        )
        self.clock = VirtualClock()
        self.cache = CacheManager(
            blocks,
            self.profile.kv.block_tokens,
            prefix_cache=self.profile.kv.prefix_cache,
            shared_by_keys=self.profile.kv.prefix_cache_scope == "server",
            session_ttl_s=self.profile.kv.session_ttl_s,
        )
        self.eos_at = eos_at or {}
        self.executor = CheckedExecutor(
            cost_model(), self.clock, capabilities=capabilities, token_of=self.token_of, faults=faults
        )
        self.scheduler = Scheduler(
            self.profile,
            capabilities,
            self.cache,
            SchedulerLimits(max_context, slots, frozenset({EOS})),
            check=True,
        )
        self.steps: list[StepTrace] = []
        self.outputs: list[tuple[float, RequestOutput]] = []
        self.engine = VirtualEngine(
            self.scheduler,
            self.executor,
            self.clock,
            on_step=self.steps.append,
            on_output=lambda now, output: self.outputs.append((round(now * 1000, 6), output)),
        )
        self.prompts: dict[str, list[int]] = {}

    # --- in -------------------------------------------------------------------------------------------------------

    def token_of(self, request_id: str, position: int) -> int:
        """EOS as the generated token number `eos_at[request_id]` (from 1), else a made-up one."""
        if request_id in self.eos_at and position == len(self.prompts[request_id]) + self.eos_at[request_id] - 1:
            return EOS
        return simulated_token(request_id, position, VOCAB)

    def request(
        self,
        request_id: str,
        prompt: int | list[int],
        max_tokens: int,
        at: float = 0.0,
        *,
        deadline: float | None = None,
        message: dict[str, Any] | None = None,
        **params: Any,
    ) -> list[int]:
        """A request that arrives at `at` ms; returns its prompt. A number makes up so many prompt tokens."""
        if isinstance(prompt, int):
            prompt = [simulated_token(f"prompt of {request_id}", position, VOCAB) for position in range(prompt)]
        self.prompts[request_id] = prompt
        self.engine.submit(
            AddRequest(
                request_id,
                "model",
                pack_ids(prompt),
                SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
                at / 1000,
                None if deadline is None else deadline / 1000,
                **(message or {}),
            )
        )
        return prompt

    def abort(self, request_id: str, at: float) -> None:
        self.engine.at(at / 1000, lambda now: self.scheduler.abort(request_id, now))

    def finish(self, request_id: str, keep_tokens: int, at: float) -> None:
        self.engine.at(at / 1000, lambda now: self.scheduler.finish(request_id, keep_tokens, now))

    def run(self, until: float | None = None) -> Scenario:
        """Run to the end, or until so many ms; at the end nothing may be left behind."""
        self.engine.run(None if until is None else until / 1000)
        if until is None:
            assert not self.scheduler.has_work
            assert self.scheduler.live.slots.num_free == self.scheduler.live.slots.num_slots
        return self

    # --- out ------------------------------------------------------------------------------------------------------

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for _, output in self.outputs
            if output.request_id == request_id
            for token in unpack_ids(output.token_ids)
        ]

    def expected(self, request_id: str, count: int) -> list[int]:
        """What `count` tokens of this request are, whatever else happened."""
        start = len(self.prompts[request_id])
        return [self.token_of(request_id, start + number) for number in range(count)]

    def token_times(self, request_id: str) -> list[float]:
        """When each output with tokens left [ms]."""
        return [now for now, output in self.outputs if output.request_id == request_id and output.token_ids]

    def first_token(self, request_id: str) -> float:
        return self.token_times(request_id)[0]

    def end(self, request_id: str) -> FinishReason | OutputError | None:
        """How the request ended; None when it has not."""
        ends = [output for _, output in self.outputs if output.request_id == request_id and output.is_final]
        assert len(ends) <= 1
        return (ends[0].finish_reason or ends[0].error) if ends else None

    def cached_tokens(self, request_id: str) -> int:
        return next(output.cached_tokens for _, output in self.outputs if output.request_id == request_id)

    def log(self) -> list[str]:
        """One line a step: `start-end kind rows | chunks`, e.g. `10-20 mixed a,b | c:0+2000*`; * where it samples."""
        return [line(trace) for trace in self.steps]

    def kinds(self) -> list[str]:
        return [trace.plan.kind.value for trace in self.steps]

    def plans(self, kind: PlanKind | None = None) -> list[StepPlan]:
        return [trace.plan for trace in self.steps if kind is None or trace.plan.kind is kind]


def line(trace: StepTrace) -> str:
    plan = trace.plan
    rows = ",".join(row.request_id for row in plan.decode_rows)
    chunks = " ".join(
        f"{chunk.request_id}:{chunk.start}+{len(chunk.token_ids)}{'*' if chunk.samples else ''}"
        for chunk in plan.chunks
    )
    start, end = trace.start * 1000, trace.end * 1000
    return " ".join(f"{start:g}-{end:g} {plan.kind.value} {rows} | {chunks}".split()).removesuffix(" |")

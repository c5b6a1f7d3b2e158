"""Any profile, any trace, any faults: every invariant after every call, and every request gets exactly its tokens.

`WAVELANE_TEST_EXAMPLES` sets the number of examples (2,000 by default).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import Profile
from runners.execution.cost_model import CostModel
from runners.execution.executor import Capabilities
from runners.execution.simulated import Faults, VirtualClock, simulated_token
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, RequestOutput, pack_ids, unpack_ids
from runners.request import FinishReason, SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.simulation.virtual_engine import StepTrace, VirtualEngine
from tests.support.checked_executor import CheckedExecutor
from tests.support.scenario import line

EXAMPLES = int(os.environ.get("WAVELANE_TEST_EXAMPLES", "2000"))
BLOCK_TOKENS = 16
MAX_CONTEXT = 240
END_S = 1000.0

profiles = st.fixed_dictionaries(
    {
        "admission": st.fixed_dictionaries(
            {
                "min_batch": st.integers(1, 4),
                "max_hold_steps": st.integers(0, 3),
                "max_batch": st.sampled_from(["auto", 1, 3]),
                "max_long_prompts": st.integers(1, 3),
                "cold_window_us": st.sampled_from([0, 4000]),
                "cold_silence_us": st.sampled_from([0, 800]),
            }
        ),
        "wave": st.fixed_dictionaries(
            {
                "enabled": st.booleans(),
                "grouping": st.sampled_from(["varlen", "same_length"]),
                "max_prompt_tokens": st.integers(1, 80),
                "max_rows": st.integers(90, 300),
                "sub_wave": st.integers(1, 4),
            }
        ),
        "chunk": st.fixed_dictionaries({"tokens": st.sampled_from([0, 20, 64])}),
        "mix": st.fixed_dictionaries(
            {
                "mode": st.sampled_from(["off", "merge", "overlap"]),
                "token_budget": st.integers(16, 200),
                "min_prompt_tokens": st.sampled_from(["auto", 1, 30]),
            }
        ),
        "seq": st.fixed_dictionaries({"enabled": st.booleans()}),
        "decode": st.fixed_dictionaries({"width": st.sampled_from(["exact", "pow2"])}),
    }
)

capabilities = st.builds(
    Capabilities,
    wave=st.booleans(),
    mix=st.booleans(),
    overlap=st.booleans(),
    seq=st.booleans(),
    pipeline_depth=st.integers(0, 1),
)


@dataclass(frozen=True)
class Arrival:
    at_ms: int
    prompt: tuple[int, int]
    """Tokens from a beginning that many prompts share, and tokens of its own."""
    max_tokens: int
    ignore_eos: bool
    session: str | None
    append: bool
    priority: int
    key: str
    deadline_ms: int | None
    prompt_logprobs: int | None
    end: tuple[str, int] | None
    """`abort` or `finish`, so many ms after the arrival."""


arrivals = st.builds(
    Arrival,
    at_ms=st.one_of(st.just(0), st.integers(0, 200)),
    prompt=st.tuples(st.integers(0, 60), st.integers(1, 100)),
    max_tokens=st.sampled_from([0, 1, 2, 7, 20, 60]),
    ignore_eos=st.booleans(),
    session=st.sampled_from([None, None, None, "s", "t"]),
    append=st.booleans(),
    priority=st.sampled_from([0, 0, 0, 1]),
    key=st.sampled_from("ab"),
    deadline_ms=st.sampled_from([None, None, None, None, 40]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    end=st.one_of(
        st.none(), st.none(), st.none(), st.tuples(st.sampled_from(["abort", "finish"]), st.integers(0, 150))
    ),
)


@dataclass(frozen=True)
class World:
    """What the executor and the pool are like, and what goes wrong."""

    slots: int
    blocks: int
    prefix_cache: bool
    session_ttl_s: float
    eos: bool
    launches_that_fail: frozenset[int]
    """Launches counted from 1; every later multiple of 50 behaves alike."""
    bad_tokens: frozenset[int]
    """A token fails when the hash of its request and position is one of these, modulo 200."""
    new_quota: tuple[int, int] | None
    """At so many ms, so many blocks."""


worlds = st.builds(
    World,
    slots=st.integers(1, 6),
    blocks=st.integers(4, 40),
    prefix_cache=st.booleans(),
    session_ttl_s=st.sampled_from([0.05, 100.0]),
    eos=st.booleans(),
    launches_that_fail=st.one_of(st.just(frozenset()), st.frozensets(st.integers(1, 50), max_size=12)),
    bad_tokens=st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 199), max_size=3)),
    new_quota=st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 200), st.integers(1, 40))),
)
VOCAB = 50


class Run:
    """One example, carried out."""

    def __init__(self, profile: dict[str, Any], abilities: Capabilities, world: World, trace: list[Arrival]) -> None:
        self.trace = trace
        self.launches = 0
        self.world = world
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.log: list[str] = []
        clock = VirtualClock()
        self.cache = CacheManager(
            world.blocks, BLOCK_TOKENS, prefix_cache=world.prefix_cache, session_ttl_s=world.session_ttl_s
        )
        executor = CheckedExecutor(
            CostModel.constant(0.005),
            clock,
            capabilities=abilities,
            vocab_size=VOCAB,
            faults=Faults(launch=self.launch_fault, token=self.token_fault),
            block_tokens=BLOCK_TOKENS,
        )
        limits = SchedulerLimits(MAX_CONTEXT, world.slots, frozenset({0}) if world.eos else frozenset())
        self.scheduler = Scheduler(Profile.model_validate(profile), abilities, self.cache, limits, check=True)
        engine = VirtualEngine(
            self.scheduler,
            executor,
            clock,
            on_step=lambda step: self.log.append(line(StepTrace(step.plan, step.start, step.end))),
            on_output=lambda _, output: self.outputs.setdefault(output.request_id, []).append(output),
        )
        for number, arrival in enumerate(trace):
            self.submit(engine, f"r{number}", arrival)
        if world.new_quota is not None:
            at_ms, quota = world.new_quota
            engine.at(at_ms / 1000, lambda now: self.scheduler.set_quota_blocks(min(quota, world.blocks)))
        engine.run(until=END_S)

    def launch_fault(self, plan: Any) -> str | None:
        self.launches += 1
        return "out of memory" if 1 + (self.launches - 1) % 50 in self.world.launches_that_fail else None

    def token_fault(self, request_id: str, position: int) -> str | None:
        return "NaN" if simulated_token(request_id + "!", position, 200) in self.world.bad_tokens else None

    def submit(self, engine: VirtualEngine, request_id: str, arrival: Arrival) -> None:
        at = arrival.at_ms / 1000
        engine.submit(
            AddRequest(
                request_id,
                "model",
                pack_ids(self.prompt(request_id, arrival)),
                SamplingParams(
                    max_tokens=arrival.max_tokens,
                    ignore_eos=arrival.ignore_eos,
                    prompt_logprobs=arrival.prompt_logprobs,
                ),
                at,
                None if arrival.deadline_ms is None else at + arrival.deadline_ms / 1000,
                arrival.priority,
                arrival.key,
                arrival.session,
                arrival.append,
            )
        )
        if arrival.end is not None:
            kind, after_ms = arrival.end
            moment = at + after_ms / 1000
            if kind == "abort":
                engine.at(moment, lambda now: self.scheduler.abort(request_id, now))
            else:
                engine.at(moment, lambda now: self.scheduler.finish(request_id, after_ms % 5, now))

    @staticmethod
    def prompt(request_id: str, arrival: Arrival) -> list[int]:
        shared, own = arrival.prompt
        return [simulated_token("shared", position, VOCAB) for position in range(shared)] + [
            simulated_token("prompt of " + request_id, position, VOCAB) for position in range(own)
        ]

    def check(self) -> None:
        assert not self.scheduler.has_work, "somebody starves"
        assert self.scheduler.live.slots.num_free == self.world.slots
        for number, arrival in enumerate(self.trace):
            self.check_request(f"r{number}", arrival)
        for session in self.cache.sessions.list(END_S):
            self.cache.sessions.delete(session.session_id, END_S)
        assert self.cache.num_available == self.cache.pool.quota_blocks

    def check_request(self, request_id: str, arrival: Arrival) -> None:
        outputs = self.outputs.get(request_id, [])
        finals = [output for output in outputs if output.is_final]
        assert len(finals) <= 1
        assert finals or arrival.end is not None, "every request that nobody ended has an end"
        assert not finals or outputs[-1] is finals[0], "nothing comes after the end"
        tokens = [token for output in outputs for token in unpack_ids(output.token_ids)]
        assert len(tokens) <= arrival.max_tokens
        if finals and finals[0].finish_reason is FinishReason.LENGTH:
            assert len(tokens) == arrival.max_tokens
        if finals and finals[0].finish_reason is FinishReason.STOP:
            assert tokens[-1] == 0
        if not arrival.ignore_eos and self.world.eos:
            assert 0 not in tokens[:-1]
        if arrival.session is None or not arrival.append:
            start = len(self.prompt(request_id, arrival))
            assert tokens == [simulated_token(request_id, start + place, VOCAB) for place in range(len(tokens))]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(profile=profiles, abilities=capabilities, world=worlds, trace=st.lists(arrivals, min_size=1, max_size=14))
def test_every_policy_under_random_traces_and_faults(profile, abilities, world, trace):
    Run(profile, abilities, world, trace).check()


@settings(max_examples=max(20, EXAMPLES // 20), deadline=None, suppress_health_check=list(HealthCheck))
@given(profile=profiles, abilities=capabilities, world=worlds, trace=st.lists(arrivals, min_size=1, max_size=14))
def test_the_same_arrivals_at_the_same_times_give_the_same_plans(profile, abilities, world, trace):
    assert Run(profile, abilities, world, trace).log == Run(profile, abilities, world, trace).log


@settings(max_examples=max(20, EXAMPLES // 20), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    profile=profiles,
    abilities=capabilities,
    slots=st.integers(1, 6),
    trace=st.lists(arrivals, min_size=1, max_size=14),
)
def test_cached_and_uncached_runs_give_equal_output(profile, abilities, slots, trace):
    def run(prefix_cache: bool) -> dict[str, list[int]]:
        world = World(slots, 200, prefix_cache, 100.0, True, frozenset(), frozenset(), None)
        done = Run(profile, abilities, world, [undisturbed(arrival) for arrival in trace])
        return {
            request_id: [token for output in outputs for token in unpack_ids(output.token_ids)]
            for request_id, outputs in done.outputs.items()
        }

    assert run(True) == run(False)


def undisturbed(arrival: Arrival) -> Arrival:
    """The same without what depends on how fast it goes: deadlines, ends from outside, sessions in use."""
    return Arrival(
        arrival.at_ms,
        arrival.prompt,
        arrival.max_tokens,
        arrival.ignore_eos,
        None,
        False,
        arrival.priority,
        arrival.key,
        None,
        arrival.prompt_logprobs,
        None,
    )

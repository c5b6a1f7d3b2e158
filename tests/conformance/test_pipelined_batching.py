"""Continuous batching changes nothing on the executor that runs a step ahead of its reader.

The cuda executor in its form for a CPU under the real scheduler: each request gets the ids that the torch executor
gives it alone.
"""

from __future__ import annotations

import random

import pytest

from runners.execution.cuda_executor import CudaExecutor
from runners.execution.device_streams import HostStreams
from runners.execution.step_graphs import EagerSteps
from runners.kv_cache.device_cache import DeviceCache
from runners.messages import AddRequest
from runners.models.decoder import Decoder
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan
from tests.conformance.test_continuous_batching import (
    PROFILES,
    SLOTS,
    STEP_S,
    Engine,
    alone,
    decoder,
    make_request,
    requests,
)

__all__ = ["alone", "decoder", "requests"]


class PipelinedEngine(Engine):
    """Commits a step when the next one has been launched, as the engine loop does. `ends`: tokens that stop."""

    def __init__(
        self, decoder: Decoder, *, blocks: int, ends: frozenset[int] = frozenset(), **sections: object
    ) -> None:
        super().__init__(decoder, blocks=blocks, **sections)
        cache = DeviceCache(decoder.config, blocks, 16, decoder.dtype)
        self.executor = CudaExecutor(  # type: ignore[assignment]
            decoder,
            cache,
            HostStreams(),
            EagerSteps(),
            slots=SLOTS,
            max_context=decoder.max_context,
            eos_token_ids=ends,
        )
        self.scheduler = Scheduler(
            self.profile,
            self.executor.capabilities,
            self.scheduler.cache,
            SchedulerLimits(max_context=decoder.max_context, slots=SLOTS, eos_token_ids=ends),
            check=True,
        )

    def run(self, arrivals: list[tuple[int, AddRequest]]) -> dict[str, list[int]]:
        arrivals, turn = sorted(arrivals, key=lambda arrival: arrival[0]), 0
        scheduler, executor = self.scheduler, self.executor
        while arrivals or scheduler.has_work:
            now = turn * STEP_S
            while arrivals and arrivals[0][0] <= turn:
                scheduler.add_request(arrivals.pop(0)[1], now)
            plan = scheduler.schedule(now)
            if isinstance(plan, StepPlan):
                self.kinds.add(plan.kind)
                executor.launch(plan)
            if scheduler.num_uncommitted > (1 if isinstance(plan, StepPlan) else 0):
                scheduler.commit(executor.collect(), executor.completed_flights(), now)
            elif scheduler.num_flights > 0:
                scheduler.commit(None, executor.completed_flights(), now)
            for output in scheduler.take_outputs():
                self._read(output)
            turn += 1
            assert turn < 5000
        return dict(self.tokens)


@pytest.mark.parametrize("blocks", [300, 15], ids=["roomy", "preempting"])
@pytest.mark.parametrize("name", [*PROFILES, "pow2"])
def test_sixteen_requests_a_step_ahead_get_what_each_gets_alone(
    decoder: Decoder,
    requests: list[AddRequest],
    alone: dict[str, list[int]],
    name: str,
    blocks: int,
) -> None:
    rng = random.Random(blocks)
    engine = PipelinedEngine(decoder, blocks=blocks, **PROFILES.get(name, {"decode": {"width": "pow2"}}))
    assert engine.run([(rng.randint(0, 30), request) for request in requests]) == alone
    if blocks == 15:
        assert engine.scheduler.stats().preemptions > 0


def test_rows_that_end_unforeseen_leave_no_trace(
    decoder: Decoder,
    requests: list[AddRequest],
    alone: dict[str, list[int]],
) -> None:
    """An end token is only seen when the next step is under way: that step's token is dropped."""
    ends = frozenset({3, 40, 41, 77})
    engine = PipelinedEngine(decoder, blocks=40, ends=ends)
    stopped = engine.run([(index, request) for index, request in enumerate(requests)])
    shortened = 0
    for name, tokens in alone.items():
        end = next((index for index, token in enumerate(tokens) if token in ends), None)
        expected = tokens if end is None else tokens[: end + 1]
        shortened += end is not None
        assert stopped[name] == expected
    assert shortened > 3
    message = make_request("again", list(range(60)), max_tokens=5)
    again = engine.run([(0, message)])["again"]
    assert again == Engine(decoder).run([(0, message)])["again"][: len(again)]

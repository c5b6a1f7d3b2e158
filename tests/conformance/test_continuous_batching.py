"""Continuous batching changes nothing: scheduler and torch executor together, in float32, whatever the policy.

Requests arrive while others run, prompts are chunked, mixed, cached and preempted; each gets the ids it gets alone.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from configs.schema import Profile
from runners.execution.torch_executor import TorchExecutor
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.device_cache import DeviceCache
from runners.messages import AddRequest, RequestOutput, pack_ids, unpack_ids
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan
from tests.support.memory_checkpoint import random_checkpoint, small_config

VOCAB_SIZE = 97
SLOTS = 8
STEP_S = 0.01


class Engine:
    """The engine loop without processes: one request list in, tokens by request out."""

    def __init__(self, decoder: Decoder, *, blocks: int = 300, prefix_cache: bool = True, **sections: object) -> None:
        cache = DeviceCache(decoder.config, blocks, 16, decoder.dtype)
        self.executor = TorchExecutor(decoder, cache, slots=SLOTS, max_context=decoder.max_context)
        self.profile = Profile.model_validate(sections)
        self.scheduler = Scheduler(
            self.profile,
            self.executor.capabilities,
            CacheManager(blocks, 16, prefix_cache=prefix_cache),
            SchedulerLimits(max_context=decoder.max_context, slots=SLOTS),
            check=True,
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.cached: dict[str, int] = defaultdict(int)
        self.kinds: set[str] = set()

    def run(self, arrivals: list[tuple[int, AddRequest]]) -> dict[str, list[int]]:
        """Arrivals (turn, request), until every request has ended."""
        arrivals, turn = sorted(arrivals, key=lambda arrival: arrival[0]), 0
        while arrivals or self.scheduler.has_work:
            now = turn * STEP_S
            while arrivals and arrivals[0][0] <= turn:
                self.scheduler.add_request(arrivals.pop(0)[1], now)
            plan = self.scheduler.schedule(now)
            if isinstance(plan, StepPlan):
                self.kinds.add(plan.kind)
                self.executor.launch(plan)
            if self.scheduler.num_uncommitted > 0:
                self.scheduler.commit(self.executor.collect(), self.executor.completed_flights(), now)
            elif self.scheduler.num_flights > 0:
                self.scheduler.commit(None, self.executor.completed_flights(), now)
            for output in self.scheduler.take_outputs():
                self._read(output)
            turn += 1
            assert turn < 5000
        return dict(self.tokens)

    def _read(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        self.tokens[output.request_id] += unpack_ids(output.token_ids)
        self.cached[output.request_id] += output.cached_tokens


def make_request(request_id: str, prompt: list[int], **sampling: object) -> AddRequest:
    params = SamplingParams(**({"max_tokens": 20, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return AddRequest(request_id, "model", pack_ids(prompt), params, arrival_time=0.0)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="float32")


@pytest.fixture(scope="module")
def requests() -> list[AddRequest]:
    """Sixteen, greedy and seeded, short and long, half of them with a common beginning."""
    rng = random.Random(11)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(50)]
    made = []
    for index in range(16):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 8, 15, 16, 17, 33, 90]))]
        sampling: dict[str, object] = {"max_tokens": rng.randint(20, 45)}
        if index % 2:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": index}
        if index % 3 == 0:
            sampling |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
        made.append(make_request(f"r{index}", common + own if index % 4 < 2 else own, **sampling))
    return made


@pytest.fixture(scope="module")
def alone(decoder: Decoder, requests: list[AddRequest]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for request in requests:
        tokens |= Engine(decoder, prefix_cache=False).run([(0, request)])
    assert {name: len(ids) for name, ids in tokens.items()} == {
        request.request_id: request.params.max_tokens for request in requests
    }
    return tokens


PROFILES: dict[str, dict[str, object]] = {
    "defaults": {},
    "chunked": {"chunk": {"tokens": 16}, "mix": {"mode": "off"}},
    "merge": {"mix": {"mode": "merge", "token_budget": 40}},
    "overlap": {"mix": {"mode": "overlap"}},
    "no waves": {"wave": {"enabled": False}, "mix": {"mode": "off"}, "seq": {"enabled": False}},
}


@pytest.mark.parametrize("blocks", [300, 15], ids=["roomy", "preempting"])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_sixteen_requests_together_get_what_each_gets_alone(
    decoder: Decoder,
    requests: list[AddRequest],
    alone: dict[str, list[int]],
    profile: dict[str, object],
    blocks: int,
) -> None:
    rng = random.Random(blocks)
    engine = Engine(decoder, blocks=blocks, **profile)
    assert engine.run([(rng.randint(0, 30), request) for request in requests]) == alone
    if blocks == 15:
        assert engine.scheduler.stats().preemptions > 0
    assert sum(engine.cached.values()) > 0


@pytest.mark.parametrize("prompt_tokens", [15, 16, 17, 32])
def test_a_prompt_sent_four_times_gets_the_same_ids_from_the_cache(decoder: Decoder, prompt_tokens: int) -> None:
    prompt = [(13 * index) % VOCAB_SIZE for index in range(prompt_tokens)]
    engine = Engine(decoder)
    runs = [engine.run([(0, make_request(f"r{turn}", prompt))])[f"r{turn}"] for turn in range(4)]
    assert runs == [runs[0]] * 4
    # A whole prompt in the cache still computes its last block: there would be no logits otherwise.
    assert engine.cached["r3"] == (prompt_tokens - 1) // 16 * 16

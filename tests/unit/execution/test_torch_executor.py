from __future__ import annotations

import random

import pytest

from kernels import ops
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.stepping import Stepper

VOCAB_SIZE = 97
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="float32")


def make_requests(count: int) -> dict[str, tuple[list[int], dict[str, object]]]:
    """Prompts of 1 to 70 tokens; every other request is sampled, some with filters and penalties."""
    rng = random.Random(5)
    requests: dict[str, tuple[list[int], dict[str, object]]] = {}
    for index in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 70]))]
        sampling: dict[str, object] = {}
        if index % 2:
            sampling = {"temperature": 0.8, "seed": 1000 + index, "top_p": 0.9 if index % 4 == 1 else 1.0}
        if index % 3 == 0:
            sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
        if index % 5 == 0:
            sampling |= {"top_k": 20, "logit_bias": {3: 2.0}}
        requests[f"r{index}"] = (prompt, sampling)
    return requests


def run_each_alone(decoder: Decoder, requests: dict[str, tuple[list[int], dict[str, object]]]) -> dict[str, list[int]]:
    alone = {}
    for request_id, (prompt, sampling) in requests.items():
        stepper = Stepper(decoder)
        stepper.add(request_id, prompt, **sampling)
        alone[request_id] = stepper.run_alone(request_id, NUM_TOKENS)
    return alone


@pytest.mark.parametrize("seed", range(4))
def test_sixteen_requests_in_mixed_plans_get_what_each_gets_alone(decoder: Decoder, seed: int) -> None:
    """Waves, chunks, decode rows and preemptions in random order: the same ids, greedy and seeded."""
    requests = make_requests(16)
    expected = run_each_alone(decoder, requests)
    rng = random.Random(seed)
    stepper = Stepper(decoder, seed=seed)
    for request_id, (prompt, sampling) in requests.items():
        stepper.add(request_id, prompt, **sampling)

    def num_left(request_id: str) -> int:
        request = stepper.requests[request_id]
        return len(request.prompt) + len(request.generated) - request.num_computed

    while True:
        unfinished = [name for name, request in stepper.requests.items() if len(request.generated) < NUM_TOKENS]
        if not unfinished:
            break
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        for request_id in chosen:
            if stepper.requests[request_id].generated and rng.random() < 0.03:
                stepper.preempt(request_id)
        decode = [name for name in chosen if stepper.requests[name].num_computed and num_left(name) == 1]
        prefill = {
            name: None if rng.random() < 0.5 else rng.randint(1, num_left(name))
            for name in chosen
            if name not in decode
        }
        stepper.step(prefill, decode)
    assert {name: request.generated for name, request in stepper.requests.items()} == expected


def test_greedy_ids_vary(decoder: Decoder) -> None:
    """Guards the test above: a model that repeats one token would pass whatever the executor does."""
    alone = run_each_alone(decoder, make_requests(8))
    assert len({tuple(ids) for ids in alone.values()}) == 8
    assert all(len(set(ids)) > 2 for ids in alone.values())


@pytest.mark.gpu
def test_a_gpu_gets_what_the_cpu_gets(decoder: Decoder) -> None:
    requests = make_requests(8)
    on_gpu = build_decoder(random_checkpoint(small_config()), dtype="float32", device="cuda", quantization="none")
    with ops.reference_only():
        assert run_each_alone(on_gpu, requests) == run_each_alone(decoder, requests)

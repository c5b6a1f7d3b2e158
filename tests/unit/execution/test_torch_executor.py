from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kernels import ops
from runners.execution.executor import LaunchError
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.scheduling.scheduler_output import BlockAppend, BlockCopy, DecodeRow, PlanKind, PrefillChunk
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


def test_chunks_without_a_sample_return_no_token(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("a", range(40))
    result = stepper.step({"a": 30}, kind=PlanKind.CHUNK)
    assert result.token_ids == ()
    assert len(stepper.step({"a": 10}, kind=PlanKind.CHUNK).token_ids) == 1


def test_every_kind_of_plan_runs(decoder: Decoder) -> None:
    expected = None
    for kind in (PlanKind.WAVE, PlanKind.CHUNK, PlanKind.MIXED):
        stepper = Stepper(decoder)
        stepper.add("a", range(20))
        stepper.step({"a": None}, kind=kind)
        for decode_kind in (PlanKind.DECODE, PlanKind.SEQUENTIAL, PlanKind.MIXED):
            stepper.step(decode=["a"], kind=decode_kind)
        expected = expected or stepper.requests["a"].generated
        assert stepper.requests["a"].generated == expected
    assert expected is not None
    assert len(expected) == 4


def test_overlap_prefill_comes_back_as_a_flight(decoder: Decoder) -> None:
    stepper, alone = Stepper(decoder), Stepper(decoder)
    for target in (stepper, alone):
        target.add("a", range(9))
        target.add("b", range(30, 60))
        target.step({"a": None})
    plan = stepper.plan({"b": None}, kind=PlanKind.OVERLAP_PREFILL, flight_id=4)
    stepper.executor.launch(plan)
    assert not stepper.executor.is_ready()
    stepper.step(decode=["a"])
    ((flight_id, result),) = stepper.executor.completed_flights()
    assert flight_id == 4
    assert stepper.executor.completed_flights() == ()
    stepper.commit(plan, result)
    alone.step({"b": None}, decode=["a"])
    for request_id in "ab":
        assert stepper.requests[request_id].generated == alone.requests[request_id].generated


def test_results_come_in_launch_order(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("a", [1, 2])
    stepper.add("b", [3, 4])
    plans = [stepper.plan({"a": None}), stepper.plan({"b": None})]
    for plan in plans:
        stepper.executor.launch(plan)
    assert stepper.executor.is_ready()
    assert [stepper.executor.collect().step_id for _ in plans] == [plan.step_id for plan in plans]
    with pytest.raises(RuntimeError, match="no step in flight"):
        stepper.executor.collect()


def test_a_cached_prefix_gives_the_same_ids(decoder: Decoder) -> None:
    prompt = list(range(40))
    first = Stepper(decoder)
    first.add("a", prompt)
    expected = first.run_alone("a", 6)
    # Another request takes over the two full blocks and computes the rest only.
    first.add("b", prompt)
    request = first.requests["b"]
    request.block_ids = first.requests["a"].block_ids[:2]
    request.num_computed = 32
    plan = first.plan({"b": None})
    shared = BlockAppend(request.slot, 0, tuple(request.block_ids[:2]))
    plan = replace(plan, block_appends=(shared, *plan.block_appends))
    first.executor.launch(plan)
    first.commit(plan, first.executor.collect())
    while len(request.generated) < 6:
        first.step(decode=["b"])
    assert request.generated == expected


def test_copy_on_write_leaves_the_shared_block_alone(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("a", range(20))
    stepper.step({"a": None})
    source = stepper.requests["a"].block_ids[1]
    before = stepper.cache.pool[source].clone()
    target = stepper.free_blocks.pop()
    plan = stepper.plan(decode=["a"])
    swap = BlockAppend(stepper.requests["a"].slot, 1, (target,))
    plan = replace(plan, block_appends=(swap,), block_copies=(BlockCopy(source, target),))
    stepper.executor.launch(plan)
    stepper.executor.collect()
    assert torch.equal(stepper.cache.pool[source], before)
    assert torch.equal(stepper.cache.pool[target][:, :, :, :4], before[:, :, :, :4])
    assert not torch.equal(stepper.cache.pool[target][:, :, :, 4], before[:, :, :, 4])


def test_nan_in_one_row_fails_that_request_alone(decoder: Decoder) -> None:
    for sampling in ({}, {"temperature": 0.7, "seed": 3}, {"presence_penalty": 1.0}):
        stepper, clean = Stepper(decoder), Stepper(decoder)
        for target in (stepper, clean):
            for index, request_id in enumerate("abc"):
                target.add(request_id, range(index, index + 20), **sampling)
            target.step(dict.fromkeys("abc"))
        stepper.cache.pool[stepper.requests["b"].block_ids[0]] = float("nan")
        result = stepper.step(decode="abc")
        clean.step(decode="abc")
        assert set(result.failures) == {"b"}
        assert result.failures["b"].code == "request_failed"
        for request_id in "ac":
            assert stepper.requests[request_id].generated == clean.requests[request_id].generated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_rows": (DecodeRow("a", 99, 5),)}, "99"),
        ({"decode_rows": (DecodeRow("a", 31, 16),)}, "position 16 has no block .slot 31 holds 1 blocks of 16 tokens"),
        ({"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (1, 97), True),)}, "a: token id outside .* of 97"),
        ({"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (-1,), True),)}, "a: token id outside"),
        (
            {"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (), True), PrefillChunk("a", 31, 2, (1,), True))},
            "empty",
        ),
        ({"decode_rows": ()}, "no tokens"),
        ({"block_appends": (BlockAppend(31, 1, (400,)),)}, "block 400 is outside the pool of 400"),
        ({"block_appends": (BlockAppend(31, 15, (1, 2)),)}, "lie outside a table of 32 slots with 16 blocks"),
        ({"block_copies": (BlockCopy(0, 400),)}, "400"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(
    decoder: Decoder, changes: dict[str, object], message: str
) -> None:
    stepper, clean = Stepper(decoder), Stepper(decoder)
    for target in (stepper, clean):
        target.add("a", [1, 2])
        target.step({"a": None})
    bad_plan = replace(stepper.plan(decode=["a"]), **changes)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=message):
        stepper.executor.launch(bad_plan)
    assert not stepper.executor.is_ready()
    for _ in range(3):
        stepper.step(decode=["a"])
        clean.step(decode=["a"])
    assert stepper.requests["a"].generated == clean.requests["a"].generated


def test_a_step_that_broke_in_the_middle_runs_again_with_the_same_outcome(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper, clean = Stepper(decoder), Stepper(decoder)
    for target in (stepper, clean):
        target.add("a", range(20), frequency_penalty=0.5, temperature=0.9, seed=8)
        target.step({"a": None})
    plan = stepper.plan(decode=["a"])
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", lambda self, hidden: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(LaunchError, match="RuntimeError: out of memory"):
            stepper.executor.launch(plan)
    stepper.executor.launch(plan)
    stepper.commit(plan, stepper.executor.collect())
    clean.step(decode=["a"])
    for _ in range(4):
        stepper.step(decode=["a"])
        clean.step(decode=["a"])
    assert stepper.requests["a"].generated == clean.requests["a"].generated


def test_a_closed_executor_refuses_plans(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.add("a", [1])
    stepper.executor.close()
    with pytest.raises(LaunchError, match="closed"):
        stepper.executor.launch(stepper.plan({"a": None}))

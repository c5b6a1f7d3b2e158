"""What every executor does alike: kinds of plans, flights, shared blocks, plans that do not fit, steps that break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from runners.execution.executor import LaunchError
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.models.fused_forward import FusedForward
from runners.scheduling.scheduler_output import BlockAppend, BlockCopy, DecodeRow, PlanKind, PrefillChunk
from tests.support.cuda_stepping import CudaStepper
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.stepping import Stepper

StepperType: TypeAlias = type[Stepper]


@pytest.fixture(params=[Stepper, CudaStepper], ids=["torch", "cuda"])
def make_stepper(request: pytest.FixtureRequest) -> StepperType:
    """The cuda executor in its form for a CPU."""
    stepper: StepperType = request.param
    return stepper


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="float32", quantization="none")


def test_a_cached_prefix_gives_the_same_ids(make_stepper: StepperType, decoder: Decoder) -> None:
    prompt = list(range(40))
    first = make_stepper(decoder)
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


def test_every_kind_of_plan_runs(make_stepper: StepperType, decoder: Decoder) -> None:
    expected = None
    for kind in (PlanKind.WAVE, PlanKind.CHUNK, PlanKind.MIXED):
        stepper = make_stepper(decoder)
        stepper.add("a", range(20))
        stepper.step({"a": None}, kind=kind)
        for decode_kind in (PlanKind.DECODE, PlanKind.SEQUENTIAL, PlanKind.MIXED):
            stepper.step(decode=["a"], kind=decode_kind)
        expected = expected or stepper.requests["a"].generated
        assert stepper.requests["a"].generated == expected
    assert expected is not None
    assert len(expected) == 4


def test_chunks_without_a_sample_return_no_token(make_stepper: StepperType, decoder: Decoder) -> None:
    stepper = make_stepper(decoder)
    stepper.add("a", range(40))
    result = stepper.step({"a": 30}, kind=PlanKind.CHUNK)
    assert result.token_ids == ()
    assert len(stepper.step({"a": 10}, kind=PlanKind.CHUNK).token_ids) == 1


def test_overlap_prefill_comes_back_as_a_flight(make_stepper: StepperType, decoder: Decoder) -> None:
    stepper, alone = make_stepper(decoder), make_stepper(decoder)
    for target in (stepper, alone):
        target.add("a", range(9))
        target.add("b", range(30, 60), temperature=0.9, seed=4)
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
    for _ in range(3):
        stepper.step(decode=["a", "b"])
        alone.step(decode=["a", "b"])
    for name in "ab":
        assert stepper.requests[name].generated == alone.requests[name].generated


def test_copy_on_write_leaves_the_shared_block_alone(make_stepper: StepperType, decoder: Decoder) -> None:
    stepper = make_stepper(decoder)
    stepper.add("a", range(20))
    stepper.step({"a": None})
    source = stepper.requests["a"].block_ids[1]
    before = stepper.cache.pool[source].clone()
    target = stepper.free_blocks.pop()
    swap = BlockAppend(stepper.requests["a"].slot, 1, (target,))
    plan = replace(stepper.plan(decode=["a"]), block_appends=(swap,), block_copies=(BlockCopy(source, target),))
    stepper.executor.launch(plan)
    stepper.executor.collect()
    assert torch.equal(stepper.cache.pool[source], before)
    assert torch.equal(stepper.cache.pool[target][:, :, :, :4], before[:, :, :, :4])
    assert not torch.equal(stepper.cache.pool[target][:, :, :, 4], before[:, :, :, 4])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}, {"presence_penalty": 1.0}, {"logprobs": 1}])
def test_nan_in_one_row_fails_that_request_alone(
    make_stepper: StepperType, decoder: Decoder, sampling: dict[str, Any]
) -> None:
    stepper, clean = make_stepper(decoder), make_stepper(decoder)
    for target in (stepper, clean):
        for index, name in enumerate("abc"):
            target.add(name, range(index, index + 20), **sampling)
        target.step(dict.fromkeys("abc"))
    stepper.cache.pool[stepper.requests["b"].block_ids[0]] = float("nan")
    result = stepper.step(decode="abc")
    clean.step(decode="abc")
    assert {name: error.code for name, error in result.failures.items()} == {"b": "request_failed"}
    for name in "ac":
        assert stepper.requests[name].generated == clean.requests[name].generated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_rows": (DecodeRow("a", 99, 5),)}, "99"),
        ({"decode_rows": (DecodeRow("a", -1, 5),)}, r"slots? \[?-1"),
        ({"decode_rows": (DecodeRow("a", 31, 16),)}, "position 16 has no block .slot 31 holds 1 blocks of 16 tokens"),
        ({"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (1, 97), True),)}, "a: token id outside .* of 97"),
        ({"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (-1,), True),)}, "a: token id outside"),
        ({"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (), True),)}, "no tokens"),
        (
            {"decode_rows": (), "chunks": (PrefillChunk("a", 31, 2, (), True), PrefillChunk("a", 31, 2, (1,), True))},
            "empty",
        ),
        ({"block_appends": (BlockAppend(31, 1, (400,)),)}, "block 400 is outside the pool of 400"),
        ({"block_appends": (BlockAppend(31, 15, (1, 2)),)}, "lie outside a table of 32 slots with 16 blocks"),
        ({"block_copies": (BlockCopy(0, 400),)}, "400"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(
    make_stepper: StepperType, decoder: Decoder, changes: dict[str, Any], message: str
) -> None:
    stepper, clean = make_stepper(decoder), make_stepper(decoder)
    for target in (stepper, clean):
        target.add("a", [1, 2])
        target.step({"a": None})
    bad_plan = replace(stepper.plan(decode=["a"]), **changes)
    with pytest.raises(LaunchError, match=message):
        stepper.executor.launch(bad_plan)
    assert not stepper.executor.is_ready()
    for _ in range(3):
        stepper.step(decode=["a"])
        clean.step(decode=["a"])
    assert stepper.requests["a"].generated == clean.requests["a"].generated


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a kernel's own error")])
def test_a_step_that_broke_in_the_middle_runs_again_with_the_same_outcome(
    make_stepper: StepperType, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stepper, clean = make_stepper(decoder), make_stepper(decoder)
    for target in (stepper, clean):
        target.add("a", range(20), frequency_penalty=0.5, temperature=0.9, seed=8)
        target.step({"a": None})
    plan = stepper.plan(decode=["a"])
    with monkeypatch.context() as patch:
        for forward in (Decoder, FusedForward):
            patch.setattr(forward, "logits", lambda self, hidden: (_ for _ in ()).throw(error))
        with pytest.raises(LaunchError, match=str(error)):
            stepper.executor.launch(plan)
    assert not stepper.executor.is_ready()
    stepper.executor.launch(plan)
    stepper.commit(plan, stepper.executor.collect())
    clean.step(decode=["a"])
    for _ in range(4):
        stepper.step(decode=["a"])
        clean.step(decode=["a"])
    assert stepper.requests["a"].generated == clean.requests["a"].generated


def test_results_come_in_launch_order_and_a_closed_executor_refuses(
    make_stepper: StepperType, decoder: Decoder
) -> None:
    stepper = make_stepper(decoder)
    stepper.add("a", [1, 2])
    stepper.add("b", [3, 4])
    plans = [stepper.plan({"a": None}), stepper.plan({"b": None})]
    for plan in plans:
        stepper.executor.launch(plan)
    assert [stepper.executor.collect().step_id for _ in plans] == [plan.step_id for plan in plans]
    with pytest.raises(RuntimeError, match="no step in flight"):
        stepper.executor.collect()
    stepper.executor.close()
    with pytest.raises(LaunchError, match="closed"):
        stepper.executor.launch(plans[0])

"""The cuda executor on a GPU: graphs against eager steps, bf16 against the references, overlap against solo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import ops
from runners.execution.step_graphs import CapturedSteps, EagerSteps
from runners.loading.checkpoint import open_checkpoint
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.scheduling.scheduler_output import PlanKind
from tests.support.cuda_stepping import CudaStepper
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.paged import paged_context
from tests.support.stepping import Stepper
from tests.support.tiny_models import FAMILIES, tiny_model
from tests.unit.execution.test_cuda_executor import decode_plan, make_requests, run_ahead

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="bfloat16", device="cuda", quantization="none")


def family_decoder(family: str, folder: Path) -> Decoder:
    tiny_model(family).save_pretrained(folder)
    return build_decoder(open_checkpoint(folder), dtype="bfloat16", device="cuda", quantization="none")


@pytest.mark.parametrize("count", [1, 5, 12])
def test_a_graph_does_what_its_eager_step_does_bit_for_bit(decoder: Decoder, count: int) -> None:
    outcomes = []
    for graphs in (EagerSteps(), CapturedSteps(torch.device("cuda"))):
        stepper = CudaStepper(decoder, graphs=graphs)
        requests = make_requests(count)
        # The same plans three times over: eager, captured, replayed.
        generated = []
        for round_number in range(3):
            names = []
            for name, (prompt, sampling) in requests.items():
                names.append(f"{name}-{round_number}")
                stepper.add(names[-1], prompt, **(sampling | {"prompt_logprobs": None}))
            stepper.step(dict.fromkeys(names), kind=PlanKind.WAVE)
            results = run_ahead(stepper.executor, [decode_plan(stepper, names, step) for step in range(6)])
            generated.append([result.token_ids for result in results])
            for name in names:
                request = stepper.requests.pop(name)
                stepper.free_blocks += reversed(request.block_ids)
                stepper.free_slots.append(request.slot)
        assert graphs.num_graphs > 0 or isinstance(graphs, EagerSteps)
        outcomes.append((generated, stepper.cache.pool.clone()))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1].view(torch.int16), outcomes[1][1].view(torch.int16))


def step_both(decoder: Decoder, width: int) -> list[tuple[Any, Any]]:
    """(reference, device) log-probabilities of a packed prefill, then of decode steps while the ids agree."""
    reference, device = (kind(decoder, slots=64, blocks=900) for kind in (Stepper, CudaStepper))
    names = [f"r{index}" for index in range(width)]
    for stepper in (reference, device):
        for index, name in enumerate(names):
            stepper.add(name, [(7 * index + 3 * step) % 97 for step in range(3 + 5 * index % 67)], logprobs=20)
    pairs: list[tuple[Any, Any]] = []
    for step in range(4):
        if not names:
            break
        prefill, decode = (dict.fromkeys(names), []) if step == 0 else ({}, names)
        with ops.reference_only():
            expected = reference.step(prefill, decode)
        actual = device.step(prefill, decode)
        pairs += [(expected.logprobs[name], actual.logprobs[name]) for name in names]
        # Where the device chose another of two near-equals the sequences part: it is given the reference's token.
        names = [name for name in names if reference.requests[name].generated == device.requests[name].generated]
    assert len(names) > width // 2 or width == 1
    return pairs


def check_logprobs(pairs: list[tuple[Any, Any]]) -> None:
    for expected, actual in pairs:
        known = dict(zip(actual.top_ids, actual.top_logprobs, strict=True))
        shared = [
            (value, known[token])
            for token, value in zip(expected.top_ids, expected.top_logprobs, strict=True)
            if token in known
        ]
        wanted, found = torch.tensor(shared, dtype=torch.float64).unbind(1)
        assert len(shared) > 10
        assert (found - wanted).norm() / wanted.norm() < 2e-2
        margin = expected.top_logprobs[0] - expected.top_logprobs[1]
        if margin > 1e-2 * abs(expected.top_logprobs[0]) + 0.05:
            assert actual.token_id == expected.token_id


@pytest.mark.parametrize("width", [1, 2, 7, 16, 31, 48, 64])
def test_decode_widths_agree_with_the_references(decoder: Decoder, width: int) -> None:
    check_logprobs(step_both(decoder, width))


@pytest.mark.parametrize("width", [1, 5, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree_with_the_references(family: str, width: int, tmp_path: Path) -> None:
    check_logprobs(step_both(family_decoder(family, tmp_path), width))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_mixed_steps_agree_with_one_shot(family: str, tmp_path: Path) -> None:
    """Longer than the sliding windows of the families that have one."""
    decoder = family_decoder(family, tmp_path)
    prompt = [(5 * step) % 97 for step in range(150)]
    results = []
    for pieces in ([150], [64, 64, 22], [1, 100, 49]):
        stepper = CudaStepper(decoder)
        stepper.add("other", range(40))
        stepper.step({"other": None})
        stepper.add("long", prompt, logprobs=20)
        for piece in pieces:
            result = stepper.step({"long": piece}, ["other"])
        results.append(result.logprobs["long"])
    for other in results[1:]:
        check_logprobs([(results[0], other)])


def test_a_batch_invariant_step_gives_a_row_the_same_bits_whoever_runs_beside_it(decoder: Decoder) -> None:
    """Tokens and log-probabilities of requests in company, against each of them alone."""
    requests = {f"r{index}": [(7 * index + 3 * step) % 97 for step in range(3 + 5 * index)] for index in range(20)}

    def decoded(groups: list[list[str]]) -> dict[str, list[Any]]:
        stepper = CudaStepper(decoder, batch_invariant=True)
        found: dict[str, list[Any]] = {name: [] for name in requests}
        for group in groups:
            for name in group:
                stepper.add(name, requests[name], logprobs=5)
                stepper.step({name: None})
            for _ in range(6):
                result = stepper.step(decode=group)
                for name in group:
                    found[name].append(result.logprobs[name])
        return found

    names = list(requests)
    assert decoded([[name] for name in names]) == decoded([names]) == decoded([names[:3], names[3:]])


def test_whole_prompts_agree_with_pieces_of_them(tmp_path: Path) -> None:
    """Dense attention of the vendor, alone and beside rows, eager and from a graph, against pages."""
    config = small_config(max_context=1400, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256)
    wide = build_decoder(random_checkpoint(config), dtype="bfloat16", device="cuda", quantization="none")
    prompt = [(5 * step + step // 7) % 97 for step in range(700)]
    results = []
    for pieces in ([699], [300, 399]):
        for is_captured in (False, True):
            stepper = CudaStepper(wide)
            stepper.add("other", range(40))
            stepper.step({"other": None})
            for round_number in range(3):
                stepper.add(f"long{round_number}", prompt[:699], logprobs=20)
                for piece in pieces:
                    result = stepper.step({f"long{round_number}": piece}, ["other"])
                if is_captured:
                    while stepper.executor.use_idle_time():
                        pass
                results.append(result.logprobs[f"long{round_number}"])
            assert stepper.executor._graphs.num_graphs > 0 or not is_captured
    for other in results[1:]:
        check_logprobs([(results[0], other)])


def test_overlap_equals_a_solo_run(decoder: Decoder) -> None:
    prompt = [(5 * step) % 97 for step in range(200)]
    alone = CudaStepper(decoder)
    alone.add("b", prompt)
    expected = alone.run_alone("b", 6)
    stepper = CudaStepper(decoder)
    stepper.add("a", range(20))
    stepper.step({"a": None})
    for _ in range(3):
        stepper.step(decode=["a"])
    stepper.add("b", prompt)
    plan = stepper.plan({"b": None}, kind=PlanKind.OVERLAP_PREFILL, flight_id=9)
    stepper.executor.launch(plan)
    flights: tuple[tuple[int, Any], ...] = ()
    while not flights:
        stepper.step(decode=["a"])
        flights = stepper.executor.completed_flights()
    stepper.commit(plan, flights[0][1])
    while len(stepper.requests["b"].generated) < 6:
        stepper.step(decode=["b"])
    assert stepper.requests["b"].generated == expected


def test_memory_that_runs_out_fails_one_launch(decoder: Decoder) -> None:
    from runners.execution.executor import LaunchError

    stepper = CudaStepper(decoder)
    stepper.add("a", range(20))
    stepper.step({"a": None})
    plan = stepper.plan(decode=["a"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "decode_inputs", lambda *_: torch.empty(1 << 46, device="cuda"))
        with pytest.raises(LaunchError, match="out of device memory"):
            stepper.executor.launch(plan)
    stepper.executor.launch(plan)
    stepper.commit(plan, stepper.executor.collect())
    assert len(stepper.requests["a"].generated) == 2


def test_where_inputs_lie_calls_for_no_other_kernel() -> None:
    """A packed step's fields follow one another without gaps, so they begin at any multiple of four bytes."""
    from kernels.triton_ops.prefill_attention import prefill_attention, prefill_attention_kernel

    def num_compiled() -> int:
        return sum(len(caches[0]) for caches in prefill_attention_kernel.device_caches.values())

    paged = paged_context([40, 50], 2, 64, torch.bfloat16, torch.device("cuda"))
    q = torch.randn(10, 4, 64, dtype=torch.bfloat16, device="cuda")
    words = torch.zeros(64, dtype=torch.int32, device="cuda")
    compiled = []
    for offset in range(4):
        context_lens, cu_seqlens = words[offset : offset + 2], words[32 + 3 * offset : 35 + 3 * offset]
        context_lens.copy_(paged.context_lens)
        cu_seqlens.copy_(torch.tensor([0, 4, 10]))
        caches = (paged.key_cache, paged.value_cache, paged.block_tables)
        out = prefill_attention(q, *caches, context_lens, cu_seqlens, 0.125, None, None, 6)
        assert torch.isfinite(out).all()
        compiled.append(num_compiled())
    assert compiled == [compiled[0]] * 4

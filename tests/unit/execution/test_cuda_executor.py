"""The cuda executor in its form for a CPU, against the torch executor: the same ids for the same plans."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import ops
from runners.execution.cuda_executor import CudaExecutor
from runners.execution.cuda_loading import (
    common_keys,
    largest_pass,
    later_keys,
    sampling_variants,
    uncaptured_passes,
    whole_prompts,
)
from runners.execution.device_memory import MemoryAccount, workspace_bytes
from runners.execution.executor import DeviceLostError, StepResult
from runners.execution.step_keys import (
    MAX_GRAPH_TOKENS,
    DecodeKey,
    PackedKey,
    context_bucket,
    packed_key,
    token_bucket,
    width_bucket,
)
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.models.fused_forward import FusedForward, PlainForward, choose_forward
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, StepPlan
from tests.support.cuda_stepping import CudaStepper
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.stepping import Stepper

VOCAB_SIZE = 97
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(random_checkpoint(small_config()), dtype="float32", quantization="none")


def make_requests(count: int) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 70 tokens; greedy, drawn, filtered, penalised, biased, held back from ending, with logprobs."""
    rng = random.Random(5)
    requests: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for index in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 70]))]
        sampling: dict[str, Any] = {}
        if index % 2:
            sampling = {"temperature": 0.8, "seed": 2**64 - 1000 + index, "top_p": 0.9 if index % 4 == 1 else 1.0}
        if index % 3 == 0:
            sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
        if index % 5 == 0:
            sampling |= {"top_k": 20, "min_p": 0.02, "logit_bias": {3: 2.0, 8: -100.0}}
        if index % 7 == 2:
            sampling |= {"min_tokens": 6, "stop_token_ids": (11, 12)}
        if index % 4 == 3:
            sampling |= {"logprobs": index % 3, "prompt_logprobs": 2}
        requests[f"r{index}"] = (prompt, sampling)
    return requests


def random_plans(stepper: Stepper, seed: int, *, preempt: float = 0.03) -> None:
    """Run every request of `stepper` to its end in steps of random rows and chunks."""
    rng = random.Random(seed)
    while unfinished := [name for name, request in stepper.requests.items() if len(request.generated) < NUM_TOKENS]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        for name in chosen:
            if stepper.requests[name].generated and rng.random() < preempt:
                stepper.preempt(name)

        def num_left(name: str) -> int:
            request = stepper.requests[name]
            return len(request.prompt) + len(request.generated) - request.num_computed

        decode = [name for name in chosen if stepper.requests[name].num_computed and num_left(name) == 1]
        prefill = {
            name: None if rng.random() < 0.5 else rng.randint(1, num_left(name))
            for name in chosen
            if name not in decode
        }
        stepper.results.append(stepper.step(prefill, decode))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_give_the_ids_and_logprobs_of_the_torch_executor(decoder: Decoder, seed: int) -> None:
    outcomes = []
    for kind in (Stepper, CudaStepper):
        stepper = kind(decoder, seed=seed, eos_token_ids=(5,))
        stepper.results = []  # type: ignore[attr-defined]
        for name, (prompt, sampling) in make_requests(16).items():
            stepper.add(name, prompt, **sampling)
        random_plans(stepper, seed)
        outcomes.append(stepper)
    expected, actual = outcomes
    assert {n: r.generated for n, r in actual.requests.items()} == {
        n: r.generated for n, r in expected.requests.items()
    }
    for one, other in zip(expected.results, actual.results, strict=True):
        assert_same(one, other)


def assert_same(expected: StepResult, actual: StepResult) -> None:
    assert (actual.step_id, actual.token_ids) == (expected.step_id, expected.token_ids)
    assert actual.failures == expected.failures
    assert actual.logprobs.keys() == expected.logprobs.keys()
    assert actual.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
    pairs = [(actual.logprobs[name], expected.logprobs[name]) for name in expected.logprobs]
    for name, entries in expected.prompt_logprobs.items():
        pairs += zip(actual.prompt_logprobs[name], entries, strict=True)
    for one, other in pairs:
        assert (one.token_id, one.top_ids) == (other.token_id, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("width", range(1, 17))
def test_steps_launched_ahead_feed_themselves(decoder: Decoder, width: int) -> None:
    """Every decode step is launched before the one before it is read."""
    names = list(make_requests(width))
    torch_stepper, stepper = Stepper(decoder), CudaStepper(decoder)
    for target in (torch_stepper, stepper):
        for name, (prompt, sampling) in make_requests(width).items():
            target.add(name, prompt, **sampling)
        target.step(dict.fromkeys(names))
    for _ in range(5):
        torch_stepper.step(decode=names)
    results = run_ahead(stepper.executor, [decode_plan(stepper, names, step) for step in range(5)])
    for position, name in enumerate(names):
        generated = [*stepper.requests[name].generated, *(result.token_ids[position] for result in results)]
        assert generated == torch_stepper.requests[name].generated


def decode_plan(stepper: Stepper, names: list[str], step: int, width: int = 0) -> StepPlan:
    """The decode step `step` after what the stepper has committed."""
    rows, appends = [], []
    for name in names:
        request = stepper.requests[name]
        position = len(request.prompt) + len(request.generated) - 1 + step
        appends += stepper._grow(request, position + 1)
        rows.append(DecodeRow(name, request.slot, position))
    return StepPlan(1000 + step, PlanKind.DECODE, tuple(rows), width=width or len(rows), block_appends=tuple(appends))


def run_ahead(executor: CudaExecutor, plans: list[StepPlan]) -> list[StepResult]:
    results, under_way = [], deque[StepPlan]()
    for plan in plans:
        executor.launch(plan)
        under_way.append(plan)
        if len(under_way) > executor.capabilities.pipeline_depth:
            results.append(executor.collect())
            assert results[-1].step_id == under_way.popleft().step_id
    assert executor.is_ready() or torch.cuda.is_available()
    return [*results, *(executor.collect() for _ in under_way)]


def test_a_batch_invariant_executor_has_one_decode_key(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, reference = CudaStepper(decoder, slots=12, batch_invariant=True), Stepper(decoder)
    keys: set[Any] = set()
    step = stepper.executor._program.step
    monkeypatch.setattr(stepper.executor._program, "step", lambda key, words: keys.add(key) or step(key, words))
    for target in (stepper, reference):
        for name, (prompt, sampling) in make_requests(5).items():
            target.add(name, prompt, **(sampling | {"logprobs": None, "prompt_logprobs": None}))
            target.step({name: None})
        for names in (["r0"], ["r0", "r1", "r2"], list(target.requests), ["r4"]):
            target.step(decode=names)
    decode_keys = {(key.width, key.max_context) for key in keys if isinstance(key, DecodeKey)}
    assert decode_keys == {(12, decoder.max_context)}
    for name, request in reference.requests.items():
        assert stepper.requests[name].generated == request.generated


def test_rows_leave_move_and_come_while_steps_are_under_way(decoder: Decoder) -> None:
    """A row that has ended runs one step too many; its slot and blocks go to another request at once."""
    requests = make_requests(5)
    alone = {}
    for name, (prompt, sampling) in requests.items():
        reference = Stepper(decoder)
        reference.add(name, prompt, **sampling)
        alone[name] = reference.run_alone(name, 8)
    stepper = CudaStepper(decoder, slots=5)
    for name in ("r0", "r1", "r2", "r3"):
        stepper.add(name, requests[name][0], **requests[name][1])
    stepper.step(dict.fromkeys(("r0", "r1", "r2", "r3")))
    plans = [decode_plan(stepper, ["r0", "r1", "r2", "r3"], 0), decode_plan(stepper, ["r0", "r1", "r2", "r3"], 1)]
    for plan in plans:
        stepper.executor.launch(plan)
    first = stepper.executor.collect()
    # r1 has ended with the first of the two; r3 takes its row, r4 its slot and blocks, before the second is read.
    ended = stepper.requests.pop("r1")
    stepper.free_blocks += ended.block_ids
    stepper.free_slots.append(ended.slot)
    stepper.add("r4", requests["r4"][0], **requests["r4"][1])
    assert stepper.requests["r4"].slot == ended.slot
    wave = stepper.plan({"r4": None}, kind=PlanKind.WAVE)
    stepper.executor.launch(wave)
    second, third = stepper.executor.collect(), stepper.executor.collect()
    stepper.commit(wave, third)
    for name, place in (("r0", 0), ("r2", 2), ("r3", 3)):
        request = stepper.requests[name]
        request.generated += [first.token_ids[place], second.token_ids[place]]
        request.num_computed += 2
    for _ in range(5):
        stepper.step(decode=["r0", "r3", "r2", "r4"], kind=PlanKind.DECODE)
    for name in ("r0", "r2", "r3", "r4"):
        generated = stepper.requests[name].generated
        assert generated == alone[name][: len(generated)], name


def test_padding_rows_change_nothing(decoder: Decoder) -> None:
    outcomes = []
    for width in (3, 8):
        stepper = CudaStepper(decoder, slots=16)
        for name, (prompt, sampling) in make_requests(3).items():
            stepper.add(name, prompt, **sampling)
        stepper.step(dict.fromkeys(stepper.requests))
        pool = stepper.cache.pool.clone()
        plans = [decode_plan(stepper, ["r0", "r1", "r2"], step, width) for step in range(4)]
        results = run_ahead(stepper.executor, plans)
        outcomes.append([result.token_ids for result in results])
        written = (stepper.cache.pool != pool).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(written) <= {block for request in stepper.requests.values() for block in request.block_ids}
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_the_torch_executor(decoder: Decoder, pooling: str) -> None:
    results = []
    for kind in (Stepper, CudaStepper):
        stepper = kind(decoder)
        for name, length in (("a", 5), ("b", 40)):
            stepper.add(name, range(length), max_tokens=0, pooling=pooling)
        plan = stepper.plan(dict.fromkeys("ab"), kind=PlanKind.EMBED)
        plan = replace(plan, chunks=tuple(replace(chunk, samples=False) for chunk in plan.chunks))
        stepper.executor.launch(plan)
        results.append(stepper.executor.collect())
    assert results[0].pooled.keys() == results[1].pooled.keys() == {"a", "b"}
    for name, expected in results[0].pooled.items():
        actual = torch.frombuffer(bytearray(results[1].pooled[name]), dtype=torch.float32)
        assert torch.allclose(actual, torch.frombuffer(bytearray(expected), dtype=torch.float32), atol=1e-6)
        assert actual.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_a_device_error_at_a_read_loses_the_device(decoder: Decoder) -> None:
    class LostFence:
        def is_passed(self) -> bool:
            raise torch.AcceleratorError("an illegal memory access was encountered")

        wait = is_passed

    stepper = CudaStepper(decoder)
    stepper.add("a", [1, 2])
    stepper.executor._streams.fence = LostFence
    stepper.executor.launch(stepper.plan({"a": None}))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        stepper.executor.is_ready()
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        stepper.executor.collect()


def test_models_with_norms_after_attention_take_the_plain_form() -> None:
    config = small_config()
    decoder = build_decoder(random_checkpoint(config), dtype="float32", quantization="none")
    assert isinstance(choose_forward(decoder), FusedForward)
    packed = build_decoder(random_checkpoint(config), dtype="bfloat16", quantization="none")
    assert isinstance(choose_forward(packed), FusedForward)
    layer = replace(decoder.layers[0], post_attention_norm=torch.ones(config.hidden_size))
    decoder.layers = (layer, *decoder.layers[1:])
    assert isinstance(choose_forward(decoder), PlainForward)


@pytest.mark.parametrize("rows", [0, 3])
def test_whole_prompts_by_dense_attention_give_the_same_results(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside decode rows, in two pieces, and after a prefix: only the first two may take the dense way."""
    monkeypatch.setattr(ops, "prefers_causal_attention", lambda *_: True)
    dense_calls: list[int] = []
    causal_attention = ops.causal_attention

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        dense_calls.append(len(q))
        return causal_attention(q, *rest)

    monkeypatch.setattr(ops, "causal_attention", counted)
    decoder = build_decoder(random_checkpoint(small_config(max_context=1400)), dtype="float32", quantization="none")
    prompt = [(5 * step + step // 7) % 97 for step in range(1300)]
    generated, results = [], []
    for kind in (Stepper, CudaStepper):
        stepper = kind(decoder)
        others = [f"row{number}" for number in range(rows)]
        for number, name in enumerate(others):
            stepper.add(name, range(number, number + 20))
        if others:
            stepper.step(dict.fromkeys(others))
        stepper.add("a", prompt[:600])
        stepper.add("b", prompt, logprobs=2, prompt_logprobs=1)
        stepper.add("c", prompt[:513])
        stepper.add("d", prompt[:700])
        all_chunks: list[dict[str, int | None]] = [{"a": None}, {"b": None}, {"c": 500}, {"c": 13, "d": None}]
        results.append([stepper.step(chunks, others) for chunks in all_chunks])
        for _ in range(4):
            stepper.step(decode=["a", "b", "c", "d", *others])
        generated.append({name: request.generated for name, request in stepper.requests.items()})
        stepper.add("e", prompt[:900], max_tokens=0, pooling="mean")
        plan = stepper.plan({"e": None}, kind=PlanKind.EMBED)
        stepper.executor.launch(replace(plan, chunks=(replace(plan.chunks[0], samples=False),)))
        results[-1].append(stepper.executor.collect())
    assert generated[0] == generated[1]
    for expected, actual in zip(*results, strict=True):
        assert_same(expected, actual)
    embeddings = [torch.frombuffer(bytearray(run[-1].pooled["e"]), dtype=torch.float32) for run in results]
    assert torch.allclose(*embeddings, atol=1e-6)
    assert dense_calls == [768 if rows else 640] * 3 + [1408] * 3 + [640 if rows else 512] * 3 + [1024] * 3


def test_warming_up_with_padding_changes_nothing(decoder: Decoder) -> None:
    stepper, clean = CudaStepper(decoder, slots=12), CudaStepper(decoder, slots=12)
    executor = stepper.executor
    executor.warm_up(common_keys(12, decoder.max_context))
    executor.compile(uncaptured_passes(12, decoder.max_context, 64))
    executor.compile(sampling_variants(decoder.max_context, VOCAB_SIZE))
    executor.capture_later(later_keys(12, decoder.max_context)[:2])
    assert [executor.use_idle_time() for _ in range(3)] == [True, True, False]
    assert not stepper.cache.pool.any()
    for target in (stepper, clean):
        for name, (prompt, sampling) in make_requests(3).items():
            target.add(name, prompt, **sampling)
        target.step(dict.fromkeys(target.requests))
        for _ in range(3):
            target.step(decode=list(target.requests))
    for name, request in clean.requests.items():
        assert stepper.requests[name].generated == request.generated


def test_buckets_hold_what_they_are_for() -> None:
    for number in (1, 15, 16, 17, 64, 65, 100, 129, 500, 513, 1000):
        assert number <= token_bucket(number) <= 2 * max(number, 8)
        assert number <= width_bucket(number) < number + 16
        assert width_bucket(number) == number or number > 64
        assert min(number, 4096) <= context_bucket(number, 4096) <= 4096
        assert len({token_bucket(number), token_bucket(token_bucket(number))}) == 1


def test_long_passes_are_hardly_padded_and_tell_whole_prompts() -> None:
    def key(rows: int, *lens: int, whole: bool = True) -> tuple[PackedKey, bool]:
        return packed_key(rows, list(lens), 2100, 8192, is_whole_prompt=whole)

    for rows in (0, 1, 8, 40, 48, 49, 64):
        packed, in_buckets = key(rows, 2000)
        assert in_buckets
        assert packed.rows == -(-rows // 8) * 8
        assert 0 <= packed.tokens - packed.rows - 2000 < 16
        assert packed.whole_prompt == (2048 if rows <= 48 else 2176)
        assert (packed.first_token, packed.first_row) == (0, packed.tokens - packed.rows)
    assert key(3, 128, 128)[0].tokens == 8 + 256
    assert not key(300, 2048)[1]
    assert [key(8, length)[0].whole_prompt for length in (100, 385, 1985, 8000)] == [0, 512, 2048, 8192]
    alone = whole_prompts(8192)
    assert [key.whole_prompt for key in alone] == [key.tokens for key in alone] == list(range(2304, 511, -128))
    for limit in (100, 1400, 8192):
        largest = largest_pass(limit)
        assert largest.tokens > MAX_GRAPH_TOKENS - limit
        assert largest.tokens <= MAX_GRAPH_TOKENS
    beside_others = key(8, 2000, whole=False)[0]
    assert (beside_others.whole_prompt, beside_others.first_token, beside_others.first_row) == (0, 8, 0)


def test_workspace_grows_with_the_longest_pass() -> None:
    config = small_config()
    sizes = [workspace_bytes(config, tokens, 64, 2) for tokens in (1024, 2048)]
    ffn = 2 * config.hidden_size + 3 * config.intermediate_size
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    attention = 2 * config.hidden_size + 2 * heads * config.head_dim
    assert sizes[1] - sizes[0] == 2 * 1024 * 2 * max(ffn, attention)


def test_the_memory_account_adds_up() -> None:
    gib = 1 << 30
    text = str(MemoryAccount(100 * gib, 15 * gib, 60 * gib, 5 * gib, 18 * gib))
    assert "weights 15.0 GiB, KV pool 60.0 GiB, graphs and workspace 5.0 GiB" in text
    assert "driver and other processes 2.0 GiB, free 18.0 GiB" in text

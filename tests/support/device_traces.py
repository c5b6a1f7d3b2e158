"""Random traces for an executor that runs ahead, each choice checked against the model's own reference pass.

Rounding differs between a step of many rows and a pass over one text, and behind a near-tie two texts part. So the
text that came out is read again, alone and in one pass of reference ops: every token must be what that pass would
choose after the tokens before it, or be short of its choice by no more than rounding explains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from configs.schema import Profile
from kernels import ops
from runners.execution.executor import Executor
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, RequestOutput, pack_ids, unpack_ids
from runners.models.decoder import Decoder
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan
from tests.support.forward import logits_in_pieces

BLOCK_TOKENS = 16
STEP_S = 0.01
TOP_K = 4
# Of the logits' standard deviation: bf16 activations move logits of these models by at most a tenth of that.
NEAR_TIE = 0.25


@dataclass
class TraceReport:
    """What came out. `shortfalls`: how far each token's logit was below the reference's choice, where it was."""

    num_tokens: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_cached: int = 0
    preemptions: int = 0
    kinds: set[str] = field(default_factory=set)
    shortfalls: list[float] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


def random_profile(rng: random.Random, slots: int) -> Profile:
    """Any mix of policies."""
    return Profile.model_validate(
        {
            "engine": {"slots": slots},
            "admission": {"min_batch": rng.randint(1, 8), "max_hold_steps": rng.randint(0, 3)},
            "wave": {
                "enabled": rng.random() < 0.8,
                "grouping": rng.choice(["varlen", "same_length"]),
                "max_prompt_tokens": rng.choice([8, 32, 64]),
                "sub_wave": rng.choice([2, 8, 32]),
            },
            "chunk": {"tokens": rng.choice([0, 0, 24, 64])},
            "mix": {
                "mode": rng.choice(["merge", "merge", "overlap", "off"]),
                "token_budget": rng.choice([40, 128, 2048]),
            },
            "seq": {"enabled": rng.random() < 0.7},
            "decode": {"width": rng.choice(["exact", "exact", "pow2"])},
        }
    )


def random_requests(rng: random.Random, count: int, vocab_size: int, max_context: int) -> list[AddRequest]:
    """Prompts of one token to most of the context, half of them with a common beginning; greedy and drawn."""
    common = [rng.randrange(vocab_size) for _ in range(100)]
    requests = []
    for index in range(count):
        length = rng.choice([1, 2, 15, 16, 17, 40, rng.randint(1, max_context - 80)])
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        if rng.random() < 0.5:
            prompt = (common[: rng.choice([16, 50, 100])] + prompt)[: max_context - 80]
        sampling: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.4:
            sampling = {"temperature": rng.choice([0.7, 1.5]), "top_k": TOP_K, "seed": rng.getrandbits(60)}
        params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, **sampling)
        requests.append(AddRequest(f"r{index}", "", pack_ids(prompt), params, arrival_time=0.0))
    return requests


def run_trace(
    decoder: Decoder,
    make_executor: Callable[[int, int], Executor],
    seed: int,
    *,
    num_requests: int = 40,
) -> TraceReport:
    """One trace under the real scheduler. `make_executor(slots, blocks)` makes the executor and its pool."""
    rng = random.Random(seed)
    slots = rng.choice([4, 12, 32])
    max_context = decoder.max_context
    per_sequence = -(-max_context // BLOCK_TOKENS)
    blocks = per_sequence * slots if rng.random() < 0.6 else per_sequence + rng.randint(1, per_sequence)
    executor = make_executor(slots, blocks)
    scheduler = Scheduler(
        random_profile(rng, slots),
        executor.capabilities,
        CacheManager(blocks, BLOCK_TOKENS, prefix_cache=rng.random() < 0.8),
        SchedulerLimits(max_context=max_context, slots=slots),
        check=True,
    )
    requests = random_requests(rng, num_requests, decoder.config.vocab_size, max_context)
    spread = rng.choice([0, 40, 400])
    arrivals = sorted(((rng.randint(0, spread), request) for request in requests), key=lambda pair: pair[0])
    aborts = sorted(
        (turn + rng.randint(0, 60), request.request_id) for turn, request in arrivals if rng.random() < 0.15
    )
    report = TraceReport(num_requests=num_requests)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: set[str] = set()

    def read(output: RequestOutput) -> None:
        assert output.error is None, output.error
        report.num_cached += output.cached_tokens
        tokens[output.request_id] += unpack_ids(output.token_ids)
        if output.finish_reason is not None:
            ended.add(output.request_id)

    turn = 0
    depth = executor.capabilities.pipeline_depth
    while arrivals or scheduler.has_work:
        now = turn * STEP_S
        while arrivals and arrivals[0][0] <= turn:
            scheduler.add_request(arrivals.pop(0)[1], now)
        while aborts and aborts[0][0] <= turn:
            request_id = aborts.pop(0)[1]
            if request_id not in ended:
                scheduler.abort(request_id, now)
                report.num_aborted += 1
                ended.add(request_id)
        plan = scheduler.schedule(now)
        if isinstance(plan, StepPlan):
            report.kinds.add(plan.kind.value)
            executor.launch(plan)
        if scheduler.num_uncommitted > (depth if isinstance(plan, StepPlan) else 0):
            scheduler.commit(executor.collect(), executor.completed_flights(), now)
        elif scheduler.num_flights > 0:
            scheduler.commit(None, executor.completed_flights(), now)
        for output in scheduler.take_outputs():
            read(output)
        turn += 1
        assert turn < 100_000
    stats = scheduler.stats()
    assert stats.free_blocks == stats.total_blocks == blocks, "blocks have leaked"
    assert stats.running == stats.waiting == 0
    report.preemptions = stats.preemptions
    executor.close()
    for request in requests:
        _check_tokens(decoder, request, tokens[request.request_id], report)
    return report


def _check_tokens(decoder: Decoder, request: AddRequest, generated: Sequence[int], report: TraceReport) -> None:
    if not generated:
        return
    prompt = unpack_ids(request.prompt)
    sequence = [*prompt, *generated[:-1]]
    with torch.inference_mode(), ops.reference_only():
        logits = logits_in_pieces(decoder, sequence, [len(sequence)])[len(prompt) - 1 :].float().cpu()
    rank = 0 if request.params.temperature == 0 else TOP_K - 1
    wanted = logits.sort(dim=-1, descending=True).values[:, rank]
    found = logits.gather(1, torch.tensor(generated).unsqueeze(1)).squeeze(1)
    shortfall = ((wanted - found) / logits.std(dim=-1)).clamp_min(0)
    report.num_tokens += len(generated)
    report.shortfalls += shortfall[shortfall > 0].tolist()
    worst = int(shortfall.argmax())
    if float(shortfall[worst]) > NEAR_TIE:
        report.mismatches.append(
            f"{request.request_id} token {worst} of {len(generated)}: {float(shortfall[worst]):.3f}"
        )

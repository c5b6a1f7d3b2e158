"""Drives an executor by hand: gives requests slots and blocks and builds the plans a scheduler would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runners.execution.executor import Executor, StepResult
from runners.execution.torch_executor import TorchExecutor
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.device_cache import DeviceCache
from runners.models.decoder import Decoder
from runners.request import SamplingParams
from runners.scheduling.scheduler_output import BlockAppend, DecodeRow, PlanKind, PrefillChunk, SlotInit, StepPlan

BLOCK_TOKENS = 16


@dataclass
class SteppedRequest:
    slot: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_assigned: bool = False


class Stepper:
    """An executor with a pool of its own. `requests[id].generated` grows with every step's result."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int = 32,
        blocks: int = 400,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.cache = DeviceCache(decoder.config, blocks, BLOCK_TOKENS, decoder.dtype, decoder.device)
        self.executor = self.make_executor(
            decoder, slots=slots, max_context=decoder.max_context, eos_token_ids=eos_token_ids, grammars=grammars
        )
        self.requests: dict[str, SteppedRequest] = {}
        # Blocks are handed out in a shuffled order: neighbours in a sequence are no neighbours in the pool.
        self.free_blocks = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.free_slots = list(range(slots))
        self.next_step_id = 0

    def make_executor(self, decoder: Decoder, **settings: Any) -> Executor:
        return TorchExecutor(decoder, self.cache, **settings)

    def add(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> None:
        params = SamplingParams(**({"max_tokens": 100, "temperature": 0.0} | sampling))
        self.requests[request_id] = SteppedRequest(self.free_slots.pop(), params, tuple(prompt))

    def preempt(self, request_id: str) -> None:
        """Take slot and blocks away; what was generated stays known and is prefilled again."""
        request = self.requests[request_id]
        self.free_blocks += request.block_ids
        self.free_slots.insert(0, request.slot)
        request.slot, request.block_ids, request.num_computed = self.free_slots.pop(), [], 0
        request.is_assigned = False

    def plan(
        self,
        prefill: Mapping[str, int | None] | None = None,
        decode: Sequence[str] = (),
        kind: PlanKind = PlanKind.MIXED,
        flight_id: int | None = None,
    ) -> StepPlan:
        """`prefill` says how many tokens of each request to compute, None for all that are left."""
        inits, appends, chunks, rows = [], [], [], []
        for request_id, count in (prefill or {}).items():
            request = self.requests[request_id]
            known = (*request.prompt, *request.generated)
            if not request.is_assigned:
                inits.append(SlotInit(request.slot, request_id, request.sampling, known, len(request.prompt)))
            start = request.num_computed
            end = len(known) if count is None else start + count
            appends += self._grow(request, end)
            chunks.append(PrefillChunk(request_id, request.slot, start, known[start:end], end == len(known)))
        for request_id in decode:
            request = self.requests[request_id]
            position = len(request.prompt) + len(request.generated) - 1
            assert request.num_computed == position
            appends += self._grow(request, position + 1)
            rows.append(DecodeRow(request_id, request.slot, position))
        self.next_step_id += 1
        return StepPlan(
            step_id=self.next_step_id,
            kind=kind,
            decode_rows=tuple(rows),
            chunks=tuple(chunks),
            width=len(rows),
            slot_inits=tuple(inits),
            block_appends=tuple(appends),
            flight_id=flight_id,
        )

    def _grow(self, request: SteppedRequest, num_tokens: int) -> list[BlockAppend]:
        missing = -(-num_tokens // BLOCK_TOKENS) - len(request.block_ids)
        if missing <= 0:
            return []
        start, new = len(request.block_ids), [self.free_blocks.pop() for _ in range(missing)]
        request.block_ids += new
        return [BlockAppend(request.slot, start, tuple(new))]

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        assert result.step_id == plan.step_id
        for chunk in plan.chunks:
            self.requests[chunk.request_id].num_computed = chunk.end
            self.requests[chunk.request_id].is_assigned = True
        for row in plan.decode_rows:
            self.requests[row.request_id].num_computed = row.position + 1
        for request_id, token_id in zip(plan.sampling_request_ids, result.token_ids, strict=True):
            self.requests[request_id].generated.append(token_id)

    def step(
        self, prefill: Mapping[str, int | None] | None = None, decode: Sequence[str] = (), **kind: Any
    ) -> StepResult:
        """Plan, launch, collect, commit."""
        plan = self.plan(prefill, decode, **kind)
        self.executor.launch(plan)
        result = self.executor.collect()
        self.commit(plan, result)
        return result

    def run_alone(self, request_id: str, num_tokens: int) -> list[int]:
        """Prefill at once, then decode alone until `num_tokens` are generated."""
        self.step({request_id: None}, kind=PlanKind.WAVE)
        while len(self.requests[request_id].generated) < num_tokens:
            self.step(decode=[request_id], kind=PlanKind.DECODE)
        return self.requests[request_id].generated

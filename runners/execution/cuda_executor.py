"""The executor for GPUs: one step ahead of its reader, slots on the device, graphs, a second stream for overlap.

A launch checks the plan, sends what changed in one copy, and queues the work; nothing in it waits for the device,
unless a row has a grammar. A decode step finds its tokens and positions where the step before left them. With
`HostStreams` and `EagerSteps` the same code runs on a CPU, where tests compare it with the torch executor.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.arrival_counters import separate_counters
from runners.execution.device_sampler import DeviceSampler
from runners.execution.device_slots import DeviceSlots
from runners.execution.device_streams import DeviceStreams
from runners.execution.executor import Capabilities, DeviceLostError, Executor, LaunchError, StepResult
from runners.execution.grammar_slots import GrammarSlots
from runners.execution.hidden_results import HiddenResults
from runners.execution.packed_step import padding_words
from runners.execution.plan_upload import PlanUpload
from runners.execution.planned_step import PlannedStep, plan_step
from runners.execution.step_graphs import MAX_GRAPHS, StepGraphs
from runners.execution.step_keys import (
    GREEDY,
    MAX_TOKENS_CAPTURED_AT_ONCE,
    DecodeKey,
    PackedKey,
    StepKey,
    width_bucket,
)
from runners.execution.step_program import StepProgram
from runners.execution.step_results import PendingStep, SampledRow
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.device_cache import DeviceCache
from runners.models.decoder import Decoder
from runners.models.fused_forward import choose_forward
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, StepPlan

logger = logging.getLogger(__name__)

Masks = tuple[torch.Tensor, torch.Tensor]


class CudaExecutor(Executor):
    """Carries out plans on `streams.device`, in `graphs`. `max_context` bounds a sequence [tokens].

    After a LaunchError nothing of the plan counts. Without `grammars` a request with a grammar fails. With
    `batch_invariant` all decode steps have the key of the widest one with the longest context.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: DeviceCache,
        streams: DeviceStreams,
        graphs: StepGraphs,
        *,
        slots: int,
        max_context: int,
        eos_token_ids: Sequence[int] = (),
        grammars: GrammarCompiler | None = None,
        batch_invariant: bool = False,
    ) -> None:
        vocab_size = decoder.config.vocab_size
        self._streams = streams
        self._graphs = graphs
        self._cache = cache
        self._max_context = max_context
        self._batch_invariant = batch_invariant
        self._vocab_size = vocab_size
        max_blocks = -(-max_context // cache.block_tokens)
        self._slots = DeviceSlots(slots, max_blocks, cache.num_blocks, width_bucket(slots), streams.device)
        self._sampler = DeviceSampler(self._slots, vocab_size, eos_token_ids, streams.device)
        self._grammars = GrammarSlots(grammars, slots, vocab_size)
        self._program = StepProgram(choose_forward(decoder), cache, self._slots, self._sampler)
        self._upload = PlanUpload(streams, self._slots, self._sampler, cache)
        self._hidden = HiddenResults(self._program.forward, streams, self._slots.table)
        self._steps: deque[PendingStep] = deque()
        self._flights: list[tuple[int, PendingStep]] = []
        self._capture_later: deque[StepKey] = deque()
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(wave=True, mix=True, overlap=True, seq=True, pipeline_depth=1, embed=True)

    # --- the contract ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue the plan. LaunchError when nothing of it counts (it may be planned again), DeviceLostError when the
        device is gone."""
        if self._is_closed:
            raise LaunchError("the executor is closed")
        try:
            with self._streams.on_main():
                self._launch(plan)
        except (LaunchError, DeviceLostError):
            raise
        except torch.OutOfMemoryError as error:
            raise LaunchError(f"out of device memory: {error}") from error
        except Exception as error:
            self._raise_if_lost(error)
            # What was queued before the error writes nothing but KV of this plan, which another try writes alike.
            raise LaunchError(f"{type(error).__name__}: {error}") from error

    def collect(self) -> StepResult:
        """The oldest result; waits for its step only. RuntimeError when no step is in flight."""
        if not self._steps:
            raise RuntimeError("collect: no step in flight")
        return self._read(self._steps.popleft())

    def is_ready(self) -> bool:
        return bool(self._steps) and self._is_passed(self._steps[0])

    def completed_flights(self) -> tuple[tuple[int, StepResult], ...]:
        if not self._flights:
            return ()
        done = [flight for flight in self._flights if self._is_passed(flight[1])]
        self._flights = [flight for flight in self._flights if flight not in done]
        return tuple((flight_id, self._read(step)) for flight_id, step in done)

    def close(self) -> None:
        self._is_closed = True
        self._graphs.close()
        self._grammars.close()

    @property
    def tells_whole_prompts(self) -> bool:
        """Whether the key of a pass says that it carries one whole prompt (`packed_key`)."""
        return self._program.forward.tells_whole_prompts

    def use_idle_time(self) -> bool:
        """Capture one more graph: of a step that has run once, else the next of `capture_later`."""
        ran_once = [key for key in self._graphs.uncaptured() if self._is_worth_a_graph(key)]
        if not ran_once and not self._capture_later:
            return False
        key: StepKey = ran_once[0] if ran_once else self._capture_later.popleft()  # type: ignore[assignment]
        try:
            self.warm_up([key])
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for more graphs: %s", error)
            self._capture_later.clear()
            return False
        except Exception as error:
            self._raise_if_lost(error)
            raise
        return True

    def _is_worth_a_graph(self, key: Hashable) -> bool:
        """A long pass's sizes may never come again: such graphs leave room for the others."""
        if isinstance(key, PackedKey) and key.tokens > MAX_TOKENS_CAPTURED_AT_ONCE:
            return self._graphs.num_graphs < MAX_GRAPHS // 2
        return isinstance(key, DecodeKey | PackedKey)

    def capture_later(self, keys: Iterable[StepKey]) -> None:
        """Graphs to capture while idle, in this order."""
        self._capture_later.extend(keys)

    @torch.inference_mode()
    def warm_up(self, keys: Iterable[StepKey]) -> None:
        """Capture the graphs of these keys with rows that are all padding. Nothing may be in flight."""
        with self._streams.on_main():
            for key in keys:
                words = self._upload.padding(key)
                self._graphs.prepare(key, functools.partial(self._program.step, key, words))
            self._streams.fence().wait()

    @torch.inference_mode()
    def compile(self, keys: Iterable[StepKey]) -> None:
        """Run steps of padding eagerly, in buckets or not, so that their kernels are there when they are needed."""
        with self._streams.on_main():
            for key in keys:
                if key.mode.is_adjusted:
                    self._sampler.make_tables()
                if isinstance(key, DecodeKey):
                    words = self._upload.padding(key)
                else:
                    words = self._streams.upload(padding_words(key, self._slots.padding_slot))
                self._program.step(key, words)
            self._streams.fence().wait()

    # --- launching -------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> None:
        self._check(plan)
        if plan.slot_inits:
            # A matcher must have seen its last token before its slot goes to somebody else.
            self._follow_grammars()
        self._upload.assign(plan)
        for init in plan.slot_inits:
            self._grammars.assign(init)
        block_tokens = self._cache.block_tokens
        step = plan_step(
            plan,
            self._slots,
            self._sampler,
            block_tokens,
            self._max_context,
            self._vocab_size,
            tells_whole_prompts=self.tells_whole_prompts,
            batch_invariant=self._batch_invariant,
        )
        if plan.kind is PlanKind.OVERLAP_PREFILL and plan.flight_id is not None:
            self._upload.send(plan)
            with self._streams.on_flight(), separate_counters("flight"):
                pending = self._run_eagerly(step, self._streams.upload(step.words))
            self._flights.append((plan.flight_id, pending))
            return
        words = self._upload.send(plan, step.words, is_static=step.in_graph)
        run = self._run_in_graph if step.in_graph else self._run_eagerly
        self._steps.append(run(step, words))

    def _run_in_graph(self, step: PlannedStep, words: torch.Tensor) -> PendingStep:
        key = step.key
        may_capture = isinstance(key, DecodeKey) or key.tokens <= MAX_TOKENS_CAPTURED_AT_ONCE
        if not self._grammars.any_active(step.part_slots):
            results = self._graphs.run(key, lambda: self._program.step(key, words), may_capture=may_capture)
            return self._pending(step, results)
        forward_key = ("forward", replace(key, mode=GREEDY))
        scored = self._graphs.run(forward_key, lambda: self._program.score(key, words), may_capture=may_capture)
        return self._choose(step, scored)

    def _run_eagerly(self, step: PlannedStep, words: torch.Tensor) -> PendingStep:
        scored = self._program.score(step.key, words)
        if step.plan.kind is PlanKind.EMBED:
            pooled = self._hidden.pooled(step.plan, step.key, scored[3])
            return PendingStep(step.plan.step_id, [], None, self._streams.fence(), pooled=pooled)
        prompt_logprobs = self._hidden.prompt_logprobs(step.plan, step.key, scored[3])
        pending = self._choose(step, scored) if step.key.samples else self._pending(step, ())
        pending.prompt_logprobs = prompt_logprobs
        return pending

    def _choose(self, step: PlannedStep, scored: tuple[torch.Tensor, ...]) -> PendingStep:
        """Sampling apart from the forward pass: masks are computed while that runs."""
        logits, slot_ids, context_lens = scored[:3]
        masks, failures = self._masks(step)
        result = self._sampler.choose(logits, slot_ids, context_lens, step.key.mode, masks)
        pending = self._pending(step, (result,))
        if masks is not None:
            pending.grammar_slots, pending.grammar_failures = step.part_slots, failures
        return pending

    def _pending(self, step: PlannedStep, results: tuple[torch.Tensor, ...]) -> PendingStep:
        """The step is queued: have its result copied to the host, and know its slots to be a position further."""
        sampling = self._slots.table.sampling
        rows = [
            SampledRow(part.request_id, row, sampling[part.slot].logprobs)
            for part, row in zip(step.parts, step.rows, strict=True)
        ]
        host = self._streams.download(results[0]) if results else None
        self._slots.advanced(step.part_slots, step.part_ends)
        return PendingStep(step.plan.step_id, rows, host, self._streams.fence())

    def _check(self, plan: StepPlan) -> None:
        """Everything that can be checked before anything changes."""
        if not plan.num_tokens:
            raise LaunchError(f"step {plan.step_id} has no tokens")
        table = self._slots.table
        table.check_inits(plan.slot_inits)
        table.check_appends(plan.block_appends)
        parts: list[DecodeRow | PrefillChunk] = [*plan.decode_rows, *plan.chunks]
        for part in parts:
            if not 0 <= part.slot < table.num_slots:
                raise LaunchError(f"slot {part.slot} of request {part.request_id} is outside 0..{table.num_slots - 1}")
        for copy in plan.block_copies:
            if not (0 <= copy.source < table.pool_blocks and 0 <= copy.target < table.pool_blocks):
                raise LaunchError(f"block copy {copy.source} to {copy.target} leaves the pool of {table.pool_blocks}")

    # --- grammars --------------------------------------------------------------------------------------------------

    def _follow_grammars(self) -> None:
        """Show every matcher the tokens of the steps under way; waits for those steps that have any."""
        for step in (*self._steps, *(step for _, step in self._flights)):
            self._follow(step)

    def _follow(self, step: PendingStep) -> None:
        if step.grammar_slots is None:
            return
        result = step.result()
        skip = [place for place, row in enumerate(step.rows) if row.request_id in result.failures]
        self._grammars.advance(step.grammar_slots, result.token_ids, skip=skip)
        step.grammar_slots = None

    def _masks(self, step: PlannedStep) -> tuple[Masks | None, dict[int, str]]:
        """(row ids and bits of the rows with a grammar, why some of the step's parts cannot follow theirs)."""
        if not self._grammars.any_active(step.part_slots):
            return None, {}
        self._follow_grammars()
        self._grammars.start(step.part_slots)
        found = self._grammars.finish()
        assert found is not None
        for slot in step.part_slots[found.rows].tolist():
            if self._grammars.is_complete(slot):
                self._slots.allow_ends(slot)
        self._upload.send_changes()
        rows = np.array(step.rows, dtype=np.int32)[found.rows]
        words = self._streams.upload(np.concatenate([rows, found.bits.ravel()]))
        return (words[: len(rows)].long(), words[len(rows) :].view(found.bits.shape)), found.failures

    # --- reading and faults ----------------------------------------------------------------------------------------

    def _read(self, step: PendingStep) -> StepResult:
        try:
            self._follow(step)
            return step.result()
        except torch.AcceleratorError as error:
            raise DeviceLostError(str(error)) from error

    def _is_passed(self, step: PendingStep) -> bool:
        try:
            return step.fence.is_passed()
        except torch.AcceleratorError as error:
            raise DeviceLostError(str(error)) from error

    def _raise_if_lost(self, error: Exception) -> None:
        if isinstance(error, torch.AcceleratorError):
            raise DeviceLostError(str(error)) from error
        try:
            self._streams.check()
        except torch.AcceleratorError as lost:
            raise DeviceLostError(str(lost)) from error

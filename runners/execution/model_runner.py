"""`ModelRunner`: carries one step plan through batch, forward pass and sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from runners.execution.executor import LaunchError, StepResult
from runners.execution.grammar_slots import GrammarSlots
from runners.execution.input_batch import build_batch
from runners.execution.sampler import SampledRows, Sampler, token_logprobs
from runners.execution.slot_table import SlotTable
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.device_cache import DeviceCache
from runners.messages import OutputError, TokenLogprobs
from runners.models.decoder import Decoder
from runners.scheduling.scheduler_output import DecodeRow, PlanKind, PrefillChunk, StepPlan

# Prompt log-probabilities need the logits of every prompt row: 256 rows of a 128,256-token vocabulary are 125 MiB.
LOGPROB_ROWS = 256

BAD_LOGITS = OutputError("the model produced no usable logits (NaN, infinite, or every token banned)", "request_failed")


class ModelRunner:
    """A decoder, its KV cache and the slots that serve requests."""

    def __init__(
        self,
        decoder: Decoder,
        cache: DeviceCache,
        num_slots: int,
        max_context: int,
        eos_token_ids: Sequence[int],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        max_blocks = -(-max_context // cache.block_tokens)
        self.slots = SlotTable(num_slots, max_blocks, cache.num_blocks)
        vocab_size = decoder.config.vocab_size
        self.grammars = GrammarSlots(grammars, num_slots, vocab_size)
        self.sampler = Sampler(self.slots, vocab_size, eos_token_ids, decoder.device, self.grammars)
        self._max_context = max_context

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan to its result. LaunchError before the forward pass when the plan itself does not fit.

        A slot's token and counts advance only at the end, so a plan that failed anywhere may run again.
        """
        self._apply(plan)
        batch = build_batch(
            plan, self.slots, self.cache.block_tokens, self.decoder.config.vocab_size, self.decoder.device
        )
        sampling = _sampling_parts(plan)
        row_slots = np.array([part.slot for part in sampling], dtype=np.int64)
        if sampling and self.grammars.any_active(row_slots):
            self.grammars.start(row_slots)
        hidden = self.decoder.forward(batch, self.cache.layers)
        if plan.kind is PlanKind.EMBED:
            return StepResult(plan.step_id, pooled=self._pooled(plan, hidden))
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        if not sampling:
            return StepResult(plan.step_id, prompt_logprobs=prompt_logprobs)
        if batch.logits_indices is not None:
            hidden = hidden.index_select(0, batch.logits_indices)
        sampled = self.sampler.sample(self.decoder.logits(hidden), row_slots, _next_positions(plan))
        self.slots.last_tokens[row_slots] = sampled.token_ids
        return StepResult(
            step_id=plan.step_id,
            token_ids=tuple(sampled.token_ids),
            logprobs={sampling[row].request_id: entry for row, entry in sampled.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            failures={sampling[row].request_id: _failure(sampled, row) for row in sampled.failed_rows},
        )

    def _apply(self, plan: StepPlan) -> None:
        """Slot inits, block appends, block copies, in this order; all are checked before the first is applied."""
        if not plan.num_tokens:
            raise LaunchError(f"step {plan.step_id} has no tokens")
        self.slots.check_inits(plan.slot_inits)
        self.slots.check_appends(plan.block_appends)
        for copy in plan.block_copies:
            if not (0 <= copy.source < self.cache.num_blocks and 0 <= copy.target < self.cache.num_blocks):
                raise LaunchError(
                    f"block copy {copy.source} to {copy.target} leaves the pool of {self.cache.num_blocks}"
                )
        for init in plan.slot_inits:
            self.slots.assign(init)
            self.sampler.begin(init.slot)
            self.grammars.assign(init)
        for append in plan.block_appends:
            self.slots.append_blocks(append)
        self.cache.copy_blocks([(copy.source, copy.target) for copy in plan.block_copies])

    def _pooled(self, plan: StepPlan, hidden: torch.Tensor) -> dict[str, bytes]:
        """Embedding of each chunk, a whole prompt: the mean of its rows' hidden states or the last one, normalised."""
        pooled: dict[str, bytes] = {}
        offset = 0
        for chunk in plan.chunks:
            rows = hidden[offset : offset + len(chunk.token_ids)].float()
            offset += len(chunk.token_ids)
            vector = rows[-1] if self.slots.sampling[chunk.slot].pooling == "last" else rows.mean(dim=0)
            vector = torch.nn.functional.normalize(vector, dim=0)
            pooled[chunk.request_id] = vector.cpu().numpy().astype("<f4").tobytes()
        return pooled

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of the prompt tokens that the rows of each chunk predict: those after its first.

        A chunk from position s to e reports prompt tokens s + 1 to e, as far as the prompt goes.
        """
        results: dict[str, tuple[TokenLogprobs, ...]] = {}
        offset = len(plan.decode_rows)
        for chunk in plan.chunks:
            num_top = self.slots.sampling[chunk.slot].prompt_logprobs
            first_row, offset = offset, offset + len(chunk.token_ids)
            if num_top is None:
                continue
            num_prompt_tokens = int(self.slots.num_prompt_tokens[chunk.slot])
            targets = self.slots.token_ids[chunk.slot][chunk.start + 1 : min(chunk.end + 1, num_prompt_tokens)]
            entries: list[TokenLogprobs] = []
            for start in range(0, len(targets), LOGPROB_ROWS):
                ids = torch.tensor(targets[start : start + LOGPROB_ROWS], device=hidden.device)
                rows = hidden[first_row + start : first_row + start + len(ids)]
                entries += token_logprobs(self.decoder.logits(rows), ids, [num_top] * len(ids))
            results[chunk.request_id] = tuple(entries)
        return results


def _failure(sampled: SampledRows, row: int) -> OutputError:
    reason = sampled.grammar_failures.get(row)
    return BAD_LOGITS if reason is None else grammar_failure(reason)


def grammar_failure(reason: str) -> OutputError:
    return OutputError(f"the grammar cannot be followed: {reason}", "request_failed")


def _sampling_parts(plan: StepPlan) -> list[DecodeRow | PrefillChunk]:
    return [*plan.decode_rows, *(chunk for chunk in plan.chunks if chunk.samples)]


def _next_positions(plan: StepPlan) -> NDArray[np.int64]:
    """Index, in each sampling sequence, of the token this step chooses."""
    positions = [row.position + 1 for row in plan.decode_rows]
    positions += [chunk.end for chunk in plan.chunks if chunk.samples]
    return np.array(positions, dtype=np.int64)

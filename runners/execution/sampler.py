"""From logits to tokens: the short way for plain greedy rows, and the full one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import ops
from runners.execution.grammar_slots import GrammarMasks, GrammarSlots
from runners.execution.slot_table import SlotTable
from runners.messages import TokenLogprobs


@dataclass(slots=True)
class SampledRows:
    """Per row: the token, whether it is unusable (NaN, infinite or entirely banned logits), and log-probabilities.

    `grammar_failures` says of the failed rows whose grammar could not be followed why not.
    """

    token_ids: list[int]
    failed_rows: list[int] = field(default_factory=list)
    grammar_failures: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Chooses a token for each row of a step by its slot's parameters.

    Log-probabilities are the model's own: of the logits before bias, penalties, temperature and filters. A row's
    randomness is a function of its seed and the position of the token being drawn. `grammars` has the token masks of
    the rows that need them; the caller has called `grammars.start` for the rows of the step.
    """

    def __init__(
        self,
        slots: SlotTable,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        grammars: GrammarSlots | None = None,
    ) -> None:
        self._slots = slots
        self._grammars = grammars if grammars is not None else GrammarSlots(None, slots.num_slots, vocab_size)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._generated_counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def begin(self, slot: int) -> None:
        """Start the penalty counts of a slot that has just been assigned, from its known tokens."""
        if not self._slots.sampling[slot].has_penalties:
            return
        if self._generated_counts is None or self._in_prompt is None:
            # Made for the first request that needs them: 5 bytes a slot and token id.
            shape = (self._slots.num_slots, self._vocab_size)
            self._generated_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        num_prompt_tokens = int(self._slots.num_prompt_tokens[slot])
        token_ids = torch.tensor(self._slots.token_ids[slot], dtype=torch.int64, device=self._device)
        self._in_prompt[slot] = False
        self._in_prompt[slot, token_ids[:num_prompt_tokens]] = True
        generated = token_ids[num_prompt_tokens:]
        self._generated_counts[slot] = torch.bincount(generated, minlength=self._vocab_size).to(torch.int32)

    def sample(self, logits: torch.Tensor, row_slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SampledRows:
        """logits [n, V] float32; row_slots [n]; positions [n]: the index in its sequence of each token to choose."""
        if self._slots.is_plain[row_slots].all():
            best = ops.argmax(logits)
            return SampledRows(best.tolist(), _failed_rows(logits, best))
        masks = self._grammars.finish()
        adjusted = self._penalise(self._bias(logits, row_slots, positions), row_slots)
        if masks is not None:
            adjusted = self._mask(adjusted, masks)
        best = ops.argmax(adjusted)
        grammar_failures = {} if masks is None else masks.failures
        failed_rows = sorted({*_failed_rows(adjusted, best), *grammar_failures})
        is_sampled = self._slots.temperature[row_slots] != 0
        chosen = self._draw(adjusted, best, np.flatnonzero(is_sampled), row_slots, positions)
        token_ids: list[int] = chosen.tolist()
        logprobs = self._logprobs(logits, chosen, row_slots, failed_rows)
        # Last: a step that failed before may run again.
        self._count(row_slots, token_ids, failed_rows)
        self._grammars.advance(row_slots, token_ids, skip=failed_rows)
        return SampledRows(token_ids, failed_rows, grammar_failures, logprobs)

    def _mask(self, logits: torch.Tensor, masks: GrammarMasks) -> torch.Tensor:
        return ops.apply_token_mask(logits, self._from_numpy(masks.rows), self._from_numpy(masks.bits))

    def _bias(self, logits: torch.Tensor, row_slots: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Logit bias, and no end token before `min_tokens`."""
        rows: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for row, slot in enumerate(row_slots.tolist()):
            sampling = self._slots.sampling[slot]
            rows += [row] * len(sampling.logit_bias)
            token_ids += sampling.logit_bias.keys()
            values += sampling.logit_bias.values()
            too_short = positions[row] - self._slots.num_prompt_tokens[slot] < sampling.min_tokens
            if too_short and not self._grammars.is_complete(slot):  # a grammar may leave nothing but the end
                ends = set(sampling.stop_token_ids)
                if not sampling.ignore_eos:
                    ends.update(self._eos_token_ids)
                rows += [row] * len(ends)
                token_ids += ends
                values += [float("-inf")] * len(ends)
        if not rows:
            return logits
        return ops.add_logit_bias(
            logits, self._tensor(rows, torch.int64), self._tensor(token_ids, torch.int64), self._tensor(values)
        )

    def _penalise(self, logits: torch.Tensor, row_slots: NDArray[np.int64]) -> torch.Tensor:
        slots = self._slots
        if not any(slots.sampling[slot].has_penalties for slot in row_slots.tolist()):
            return logits
        assert self._generated_counts is not None
        assert self._in_prompt is not None
        return ops.apply_penalties(
            logits,
            self._generated_counts,
            self._in_prompt,
            self._from_numpy(row_slots),
            self._from_numpy(slots.presence[row_slots]),
            self._from_numpy(slots.frequency[row_slots]),
            self._from_numpy(slots.repetition[row_slots]),
        )

    def _draw(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        drawn_rows: NDArray[np.int64],
        row_slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> torch.Tensor:
        """`best` with the rows `drawn_rows` replaced by a draw; greedy rows do not pay for the filters of others."""
        if not len(drawn_rows):
            return best
        slots, chosen_slots = self._slots, row_slots[drawn_rows]
        top_k, top_p, min_p = slots.top_k[chosen_slots], slots.top_p[chosen_slots], slots.min_p[chosen_slots]
        params = ops.SamplingTensors(
            temperature=self._from_numpy(slots.temperature[chosen_slots]),
            top_k=self._from_numpy(top_k),
            top_p=self._from_numpy(top_p),
            min_p=self._from_numpy(min_p),
            seeds=self._from_numpy(slots.seeds[chosen_slots]),
            positions=self._from_numpy(positions[drawn_rows]),
            any_top_k=bool((top_k > 0).any()),
            any_top_p=bool((top_p < 1).any()),
            any_min_p=bool((min_p > 0).any()),
        )
        if len(drawn_rows) == len(row_slots):
            return ops.sample(logits, best, params)
        rows = self._from_numpy(drawn_rows)
        drawn = ops.sample(logits.index_select(0, rows), best.index_select(0, rows), params)
        return best.index_copy(0, rows, drawn)

    def _count(self, row_slots: NDArray[np.int64], token_ids: list[int], failed_rows: list[int]) -> None:
        """Add the chosen tokens to the counts of the slots that need them."""
        if self._generated_counts is None:
            return
        for row, slot in enumerate(row_slots.tolist()):
            if self._slots.sampling[slot].has_penalties and row not in failed_rows:
                self._generated_counts[slot, token_ids[row]] += 1

    def _logprobs(
        self, logits: torch.Tensor, chosen: torch.Tensor, row_slots: NDArray[np.int64], failed_rows: list[int]
    ) -> dict[int, TokenLogprobs]:
        wanted = {
            row: count
            for row, slot in enumerate(row_slots.tolist())
            if (count := self._slots.sampling[slot].logprobs) is not None and row not in failed_rows
        }
        if not wanted:
            return {}
        rows = self._tensor(list(wanted), torch.int64)
        entries = token_logprobs(logits.index_select(0, rows), chosen.index_select(0, rows), list(wanted.values()))
        return dict(zip(wanted, entries, strict=True))

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _from_numpy(self, values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row of logits [n, V]: the log-probability of token_ids [n] and the row's `num_top` likeliest."""
    chosen, top_ids, top = ops.top_logprobs(logits, token_ids, max(num_top))
    rows = zip(token_ids.tolist(), chosen.tolist(), top_ids.tolist(), top.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(token_id, logprob, ids[:count], logprobs[:count])
        for token_id, logprob, ids, logprobs, count in rows
    ]


def _failed_rows(logits: torch.Tensor, best: torch.Tensor) -> list[int]:
    """Rows whose largest logit is NaN or infinite; `argmax` of a row with NaN points at a NaN."""
    largest = logits.gather(1, best.unsqueeze(1)).squeeze(1).tolist()
    return [row for row, value in enumerate(largest) if not math.isfinite(value)]

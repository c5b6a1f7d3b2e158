"""Steps under way: what was asked of each, and its result once the device has passed its fence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from runners.execution.device_streams import Fence
from runners.execution.executor import StepResult
from runners.execution.model_runner import BAD_LOGITS, grammar_failure
from runners.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Row `row` of the step's result is a token for `request_id`; `num_logprobs` None: no log-probabilities."""

    request_id: str
    row: int
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some prompt tokens of a chunk, on their way to the host."""

    request_id: str
    token_ids: tuple[int, ...]
    num_top: int
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def entries(self) -> list[TokenLogprobs]:
        rows = zip(self.token_ids, self.logprobs.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        return [
            TokenLogprobs(token_id, logprob, ids[: self.num_top], top[: self.num_top])
            for token_id, logprob, ids, top in rows
        ]


@dataclass(slots=True)
class PendingStep:
    """A launched step; `host` [n, columns] int32 (`DeviceSampler.choose`) is valid once `fence` is passed.

    `grammar_slots` are the rows' slots where some row has a grammar that has not seen its token yet, else None;
    `grammar_failures` says of rows, by their place in `rows`, whose grammar could not be followed, why not.
    """

    step_id: int
    rows: list[SampledRow]
    host: torch.Tensor | None
    fence: Fence
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    grammar_slots: NDArray[np.int64] | None = None
    grammar_failures: dict[int, str] = field(default_factory=dict)
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)
    _result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for the fence."""
        if self._result is None:
            self.fence.wait()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for part in self.prompt_logprobs:
            prompt_logprobs[part.request_id] = (*prompt_logprobs.get(part.request_id, ()), *part.entries())
        if self.host is None or not self.rows:
            pooled = {name: vector.numpy().astype("<f4").tobytes() for name, vector in self.pooled.items()}
            return StepResult(self.step_id, prompt_logprobs=prompt_logprobs, pooled=pooled)
        table = self.host[:, :2].tolist()
        failures = {row.request_id: BAD_LOGITS for row in self.rows if table[row.row][1]}
        for place, reason in self.grammar_failures.items():
            failures[self.rows[place].request_id] = grammar_failure(reason)
        logprobs = {
            row.request_id: _logprobs(self.host[row.row], row.num_logprobs)
            for row in self.rows
            if row.num_logprobs is not None and row.request_id not in failures
        }
        return StepResult(
            self.step_id,
            token_ids=tuple([table[row.row][0] for row in self.rows]),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=failures,
        )


def _logprobs(words: torch.Tensor, count: int) -> TokenLogprobs:
    """From one row of a step's result."""
    num_top = (len(words) - 3) // 2
    values = words.view(torch.float32).tolist()
    return TokenLogprobs(
        token_id=int(words[0]),
        logprob=values[2],
        top_ids=words[3 : 3 + count].tolist(),
        top_logprobs=values[3 + num_top : 3 + num_top + count],
    )

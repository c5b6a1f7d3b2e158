"""What is read off the hidden states of a pass beside its tokens: prompt log-probabilities and embeddings."""

from __future__ import annotations

import numpy as np
import torch

from kernels import ops
from runners.execution.device_streams import DeviceStreams
from runners.execution.model_runner import LOGPROB_ROWS
from runners.execution.slot_table import SlotTable
from runners.execution.step_keys import DecodeKey, StepKey
from runners.execution.step_results import PromptLogprobs
from runners.models.fused_forward import Forward
from runners.scheduling.scheduler_output import StepPlan


class HiddenResults:
    """Queues the work and the copies to the host; `hidden` [T, hidden] is what `Forward.hidden` returned."""

    def __init__(self, forward: Forward, streams: DeviceStreams, table: SlotTable) -> None:
        self._forward = forward
        self._streams = streams
        self._table = table

    def pooled(self, plan: StepPlan, key: StepKey, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Embedding of each chunk, a whole prompt: the mean of its rows' hidden states or the last one, normalised."""
        normed = self._forward.normed(hidden).float()
        pooled: dict[str, torch.Tensor] = {}
        offset = _first_chunk_row(key)
        for chunk in plan.chunks:
            rows = normed[offset : offset + len(chunk.token_ids)]
            offset += len(chunk.token_ids)
            vector = rows[-1] if self._table.sampling[chunk.slot].pooling == "last" else rows.mean(dim=0)
            pooled[chunk.request_id] = self._streams.download(torch.nn.functional.normalize(vector, dim=0))
        return pooled

    def prompt_logprobs(self, plan: StepPlan, key: StepKey, hidden: torch.Tensor) -> list[PromptLogprobs]:
        """Of the prompt tokens that the rows of each chunk predict: a chunk from s to e reports s + 1 to e."""
        found: list[PromptLogprobs] = []
        offset = _first_chunk_row(key)
        for chunk in plan.chunks:
            first_row, offset = offset, offset + len(chunk.token_ids)
            num_top = self._table.sampling[chunk.slot].prompt_logprobs
            if num_top is None:
                continue
            end = min(chunk.end + 1, int(self._table.num_prompt_tokens[chunk.slot]))
            targets = self._table.token_ids[chunk.slot][chunk.start + 1 : end]
            if not targets:
                empty = torch.empty(0)
                found.append(PromptLogprobs(chunk.request_id, (), num_top, empty, empty, empty))
            for start in range(0, len(targets), LOGPROB_ROWS):
                ids = targets[start : start + LOGPROB_ROWS]
                on_device = self._streams.upload(np.array(ids, dtype=np.int32)).long()
                logits = self._forward.logits(hidden[first_row + start : first_row + start + len(ids)])
                parts = [self._streams.download(part) for part in ops.top_logprobs(logits, on_device, num_top)]
                found.append(PromptLogprobs(chunk.request_id, ids, num_top, parts[0], parts[1], parts[2]))
        return found


def _first_chunk_row(key: StepKey) -> int:
    return key.width if isinstance(key, DecodeKey) else key.first_token

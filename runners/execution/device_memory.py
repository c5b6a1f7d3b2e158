"""What a GPU's memory goes to: room kept beside the KV pool, and the account given at start-up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runners.execution.step_keys import MAX_GRAPH_TOKENS
from runners.kv_cache.sizing import format_bytes
from runners.models.config import ModelConfig

# Device memory of captured graphs beside their pool, of cuBLAS and of the kernels' code, as seen on an H200.
FIXED_BYTES = 2 << 30


def workspace_bytes(config: ModelConfig, max_step_tokens: int, max_rows: int, element_bytes: int) -> int:
    """Most that steps take beside weights and KV: activations of the longest pass, logits, and `FIXED_BYTES`.

    A layer of the pass holds the residual, the QKV product, q, k, v and attention, or gate and up and their product; a
    flight may hold the same again beside it, and the graphs hold it for the longest pass that is captured.
    """
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = 2 * config.hidden_size + 2 * (heads + config.num_heads) * config.head_dim
    ffn = 2 * config.hidden_size + 3 * config.intermediate_size
    activations = (2 * max_step_tokens + MAX_GRAPH_TOKENS) * max(attention, ffn) * element_bytes
    return FIXED_BYTES + activations + 4 * max_rows * config.vocab_size * 4


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of one GPU by what they serve. `steps_bytes`: graphs' buffers, staging, and what steps have taken."""

    total_bytes: int
    weight_bytes: int
    pool_bytes: int
    steps_bytes: int
    free_bytes: int

    @classmethod
    def read(cls, device: torch.device, weight_bytes: int, pool_bytes: int, held_before: int) -> MemoryAccount:
        """As it is now; torch held `held_before` bytes with weights and pool. What the driver reports as used counts
        other processes too, and they come and go."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        steps = torch.cuda.memory_reserved(device) - held_before
        return cls(total_bytes, weight_bytes, pool_bytes, steps, free_bytes)

    def __str__(self) -> str:
        taken = self.weight_bytes + self.pool_bytes + self.steps_bytes + self.free_bytes
        return (
            f"{format_bytes(self.total_bytes)} of device memory: weights {format_bytes(self.weight_bytes)}, KV pool "
            f"{format_bytes(self.pool_bytes)}, graphs and workspace {format_bytes(self.steps_bytes)}, driver and other "
            f"processes {format_bytes(self.total_bytes - taken)}, free {format_bytes(self.free_bytes)}"
        )

"""Plausible bounds on a model's sizes: a corrupt file must fail here, not in an allocation. Torch-free."""

from __future__ import annotations

from pathlib import Path

from runners.errors import StartupError
from runners.models.config import ModelConfig

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_HIDDEN_SIZE = 1 << 20
MAX_VOCAB_SIZE = 1 << 24


def check_heads(path: Path, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Query heads share KV heads evenly, and a head splits into two halves for RoPE."""
    if num_heads % num_kv_heads:
        raise StartupError(f"{path}: {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    if head_dim % 2 or head_dim == 0:
        raise StartupError(f"{path}: head size {head_dim} is not an even number over zero")


def check_end_tokens(path: Path, config: ModelConfig) -> None:
    """BOS and EOS ids lie inside the vocabulary."""
    for token_id in (*config.eos_token_ids, *(() if config.bos_token_id is None else (config.bos_token_id,))):
        if token_id >= config.vocab_size:
            raise StartupError(f"{path}: BOS or EOS id {token_id} is outside the vocabulary of {config.vocab_size}")

"""Settings that only the machine and the model can judge: the device, and how long a context may be. Torch-free."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from runners.errors import StartupError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """The device of `engine.device`; `auto` is cuda where there is one. StartupError when it cannot be used here."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StartupError(f"engine.device: {name!r} cannot be used on this machine: {reason[0]}") from error
    return device


def model_context(asked: int | Literal["auto"], trained: int) -> int:
    """Tokens of `models[0].max_context`. StartupError beyond what the model was trained for."""
    if asked == "auto":
        return trained
    if asked > trained:
        raise StartupError(f"models[0].max_context: {asked} tokens, but the model has a context of {trained}")
    return asked


def context_in_pool(asked: int | Literal["auto"], max_context: int, num_blocks: int, block_tokens: int) -> int:
    """`max_context`, or what the KV blocks hold where that is less and the profile names no length.

    A request that outgrows all blocks could only fail half-way; with a context that fits, it is refused at once.
    StartupError when the profile asks for more than fits.
    """
    fits = num_blocks * block_tokens
    if max_context <= fits:
        return max_context
    pool = f"the KV cache holds {fits} tokens ({num_blocks} blocks of {block_tokens}; kv.pool, kv.quota_blocks)"
    if asked != "auto":
        raise StartupError(f"models[0].max_context: {max_context} tokens, but {pool}")
    logger.warning("the context is cut from %d to %d tokens: %s", max_context, fits, pool)
    return fits

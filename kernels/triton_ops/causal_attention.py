"""Causal attention of one whole sequence over dense K and V, by the vendor's flash kernel (cuDNN through torch).

For prompts that start at their first position. On an H200 its kernel takes about half the time of ours over pages; for
every length it makes a plan once, so lengths come in buckets.
"""

from __future__ import annotations

import functools
import logging

import torch

from kernels.reference.causal_attention import causal_attention as reference_causal_attention

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 256
_PROBE_TOLERANCE = 1e-2


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`kernels.ops.causal_attention`: q [S, Hq, D], k and v [S, Hk, D], each dense → [S, Hq, D]."""
    batched = [part.unsqueeze(0).transpose(1, 2) for part in (q, k, v)]
    output = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batched, None, False, dropout_p=0.0, is_causal=True, return_debug_mask=False, scale=scale
    )[0]
    # Laid out like q, so that this is a view.
    return output.squeeze(0).transpose(0, 1).contiguous()


@functools.cache
def prefers_causal_attention(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether the vendor's kernel runs here for such heads, and gives what the reference gives."""
    if dtype not in (torch.bfloat16, torch.float16) or head_dim > 128 or head_dim % 8:
        return False
    if not torch.backends.cudnn.is_available():
        return False
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(_PROBE_TOKENS, heads, head_dim, generator=draw).to(device, dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    try:
        actual = causal_attention(q, k, v, head_dim**-0.5).float()
    except RuntimeError as error:
        logger.info("prompts keep to the paged attention kernel: %s", str(error).splitlines()[0])
        return False
    expected = reference_causal_attention(q, k, v, head_dim**-0.5).float()
    relative_error = ((actual - expected).norm() / expected.norm()).item()
    if not relative_error < _PROBE_TOLERANCE:
        logger.warning("the vendor's attention is off by %.1e: prompts keep to the paged kernel", relative_error)
        return False
    return True

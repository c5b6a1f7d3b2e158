"""Plain torch implementations, one file an op: the specification that every device implementation is tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.reference.add_logit_bias import add_logit_bias
from kernels.reference.add_rms_norm import add_rms_norm
from kernels.reference.advance_slots import advance_slots
from kernels.reference.apply_penalties import apply_penalties
from kernels.reference.apply_token_mask import apply_token_mask
from kernels.reference.argmax import argmax
from kernels.reference.causal_attention import causal_attention, prefers_causal_attention
from kernels.reference.copy_blocks import copy_blocks
from kernels.reference.decode_inputs import decode_inputs
from kernels.reference.embedding import embedding
from kernels.reference.fused_linear import fused_linear, fuses
from kernels.reference.gated_activation import gated_activation
from kernels.reference.kv_write import kv_write
from kernels.reference.linear import linear
from kernels.reference.logits import logits
from kernels.reference.pack_weight import pack_weight
from kernels.reference.paged_attention import paged_attention
from kernels.reference.qk_norm_rope_kv_split import qk_norm_rope_kv_split
from kernels.reference.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rope
from kernels.reference.rotary_decode_attention import rotary_decode_attention
from kernels.reference.sample import sample
from kernels.reference.top_logprobs import top_logprobs

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    implementation.__name__: implementation
    for implementation in (
        add_logit_bias,
        add_rms_norm,
        advance_slots,
        apply_penalties,
        apply_token_mask,
        argmax,
        causal_attention,
        copy_blocks,
        decode_inputs,
        embedding,
        fused_linear,
        fuses,
        gated_activation,
        kv_write,
        linear,
        logits,
        pack_weight,
        paged_attention,
        prefers_causal_attention,
        qk_norm_rope_kv_split,
        qk_norm_rope_kv_write,
        rms_norm,
        rope,
        rotary_decode_attention,
        sample,
        top_logprobs,
    )
}

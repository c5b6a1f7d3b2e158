"""The decoder of every supported family, written against `kernels.ops` only; what a family has is in its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import ops
from runners.execution.input_batch import ForwardBatch
from runners.models.config import ModelConfig

LayerCaches = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer; several weights, stacked by output, where they could not be stored as one."""

    weights: tuple[ops.LinearWeight, ...]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out]."""
        if len(self.weights) == 1:
            return ops.linear(x, self.weights[0], self.bias)
        joined = torch.cat([ops.linear(x, weight) for weight in self.weights], dim=-1)
        return joined if self.bias is None else joined + self.bias

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights) + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Norms are float32; `post_attention_norm` and `post_ffn_norm`: sandwich models only."""

    input_norm: torch.Tensor
    qkv_proj: Projection
    o_proj: Projection
    pre_ffn_norm: torch.Tensor
    gate_up_proj: Projection
    down_proj: Projection
    rope_table: torch.Tensor
    sliding_window: int | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_ffn_norm: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights; the rope table is shared between layers and not counted."""
        norms = (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.post_attention_norm,
            self.pre_ffn_norm,
            self.post_ffn_norm,
        )
        projections = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        return sum(norm.nbytes for norm in norms if norm is not None) + sum(part.nbytes for part in projections)


class Decoder:
    """Embedding, layers, final norm, head. `dtype` is the activations' type, `max_context` the rope tables' length."""

    def __init__(
        self,
        config: ModelConfig,
        embed_tokens: ops.LinearWeight,
        layers: Sequence[DecoderLayer],
        norm: torch.Tensor,
        lm_head: ops.LinearWeight,
        dtype: torch.dtype,
        max_context: int,
    ) -> None:
        self.config = config
        self.embed_tokens = embed_tokens
        self.layers = tuple(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.dtype = dtype
        self.max_context = max_context
        # The norm after each layer belongs to the next one: the residual addition before it is fused into it.
        self._following_norms = (*(layer.input_norm for layer in self.layers[1:]), norm)

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        head = 0 if self.lm_head is self.embed_tokens else self.lm_head.nbytes
        return self.embed_tokens.nbytes + head + self.norm.nbytes + sum(layer.nbytes for layer in self.layers)

    def forward(self, batch: ForwardBatch, layer_caches: LayerCaches) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden] in `dtype`; K and V of the batch are written on the way.

        `layer_caches[i]` are layer i's key and value views (`DeviceCache.layers`).
        """
        eps = self.config.norm_eps
        residual = ops.embedding(batch.input_ids, self.embed_tokens, self.config.embedding_scale, self.dtype)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for layer, following_norm, caches in zip(self.layers, self._following_norms, layer_caches, strict=True):
            x = self._attention(x, layer, batch, caches)
            if layer.post_attention_norm is not None:
                x = ops.rms_norm(x, layer.post_attention_norm, eps)
            x, residual = ops.add_rms_norm(x, residual, layer.pre_ffn_norm, eps)
            x = layer.down_proj(ops.gated_activation(layer.gate_up_proj(x), self.config.activation))
            if layer.post_ffn_norm is not None:
                x = ops.rms_norm(x, layer.post_ffn_norm, eps)
            x, residual = ops.add_rms_norm(x, residual, following_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H] → next-token logits [n, V] float32."""
        return ops.logits(hidden, self.lm_head, self.config.logit_soft_cap)

    def _attention(
        self, x: torch.Tensor, layer: DecoderLayer, batch: ForwardBatch, caches: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        config = self.config
        key_cache, value_cache = caches
        q = ops.qk_norm_rope_kv_write(
            layer.qkv_proj(x),
            layer.q_norm,
            layer.k_norm,
            config.norm_eps,
            layer.rope_table,
            batch.position_ids,
            key_cache,
            value_cache,
            batch.slot_mapping,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        mixed = ops.paged_attention(
            q,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.context_lens,
            batch.cu_seqlens_q,
            config.query_scale,
            layer.sliding_window,
            config.attention_soft_cap,
            batch.max_query_len,
            batch.max_context_len,
        )
        return layer.o_proj(mixed.view(x.shape[0], config.num_heads * config.head_dim))

"""The decoder's forward pass for a GPU, in two forms of one interface.

`FusedForward` takes norms, gates, residual sums and rotation into their neighbours' launches: five a layer for one
decode row. It needs weights that `ops.fused_linear` takes (plain ones of the activations' type, blocks packed for the
device) and norms before attention and FFN only. `PlainForward` is `Decoder.forward`. Hidden states of the two are not
interchangeable: the fused ones have not seen the final norm.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels import ops
from runners.execution.input_batch import ForwardBatch
from runners.models.decoder import Decoder, DecoderLayer, LayerCaches, Projection


class Forward(Protocol):
    """What an executor asks of a model.

    `tells_whole_prompts`: `hidden` is faster where a batch says that its only chunk is a whole prompt.
    """

    @property
    def tells_whole_prompts(self) -> bool: ...

    def hidden(self, batch: ForwardBatch, layer_caches: LayerCaches) -> torch.Tensor:
        """[T, hidden] for `logits`; K and V of the batch are written on the way."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden] of what `hidden` returned → [n, V] float32."""
        ...

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden] of what `hidden` returned, after the final norm."""
        ...


def choose_forward(decoder: Decoder) -> Forward:
    """The fused form where the decoder's weights allow it."""
    return FusedForward(decoder) if FusedForward.supports(decoder) else PlainForward(decoder)


class PlainForward:
    """`Decoder.forward` and `Decoder.logits`."""

    tells_whole_prompts = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def hidden(self, batch: ForwardBatch, layer_caches: LayerCaches) -> torch.Tensor:
        return self._decoder.forward(batch, layer_caches)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class FusedForward:
    """Layers by `ops.fused_linear` and `ops.rotary_decode_attention`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        config = decoder.config
        self._eps = config.norm_eps
        self._activation = config.activation.value
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.tells_whole_prompts = (
            config.attention_soft_cap is None
            and all(layer.sliding_window is None for layer in decoder.layers)
            and ops.prefers_causal_attention(decoder.device, decoder.dtype, *sizes)
        )

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Weights that the fused product takes, no norm after attention or FFN."""

        def fits(projection: Projection) -> bool:
            return all(ops.fuses(weight, decoder.dtype) for weight in projection.weights)

        return ops.fuses(decoder.lm_head, decoder.dtype) and all(
            layer.post_attention_norm is None
            and layer.post_ffn_norm is None
            and all(map(fits, (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)))
            for layer in decoder.layers
        )

    def hidden(self, batch: ForwardBatch, layer_caches: LayerCaches) -> torch.Tensor:
        decoder, eps = self._decoder, self._eps
        config = decoder.config
        features = config.num_heads * config.head_dim
        x = ops.embedding(batch.input_ids, decoder.embed_tokens, config.embedding_scale, decoder.dtype)
        rows_only = _has_rows_only(batch)
        for layer, caches in zip(decoder.layers, layer_caches, strict=True):
            qkv = _project(layer.qkv_proj, x, layer.input_norm, eps, feeds_attention=rows_only)
            mixed = self._attention(qkv, layer, batch, *caches).view(x.shape[0], features)
            x = _project(layer.o_proj, mixed, residual=x)
            gated = _project(layer.gate_up_proj, x, layer.pre_ffn_norm, eps, activation=self._activation)
            x = _project(layer.down_proj, gated, residual=x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        decoder = self._decoder
        scores = ops.fused_linear(hidden, decoder.lm_head, None, decoder.norm, self._eps, out_dtype=torch.float32)
        soft_cap = decoder.config.logit_soft_cap
        return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(hidden, self._decoder.norm, self._eps)

    def _attention(
        self,
        qkv: torch.Tensor,
        layer: DecoderLayer,
        batch: ForwardBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        config = self._decoder.config
        if _has_rows_only(batch):
            return ops.rotary_decode_attention(
                qkv,
                layer.q_norm,
                layer.k_norm,
                self._eps,
                layer.rope_table,
                batch.position_ids,
                key_cache,
                value_cache,
                batch.slot_mapping,
                batch.block_tables,
                batch.context_lens,
                config.num_heads,
                config.query_scale,
                layer.sliding_window,
                config.attention_soft_cap,
                batch.max_context_len,
                follows_linear=True,
            )
        norms = (layer.q_norm, layer.k_norm, self._eps, layer.rope_table, batch.position_ids)
        caches = (key_cache, value_cache, batch.slot_mapping)
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        if not (batch.whole_prompt_tokens and self.tells_whole_prompts):
            q = ops.qk_norm_rope_kv_write(qkv, *norms, *caches, *sizes)
            return self._mixed_attention(q, layer, batch, key_cache, value_cache)
        num_tokens, first_row = qkv.shape[0], qkv.shape[0] - batch.num_decode_rows
        padded = batch.whole_prompt_tokens
        # The rows at the end see nothing of the prompt and it nothing of them: their keys and values are zeros here.
        q, k, v = ops.qk_norm_rope_kv_split(qkv, *norms, *caches, *sizes, first_row, padded)
        attended = ops.causal_attention(q, k, v, config.query_scale)[:num_tokens]
        if first_row < num_tokens:
            rows = slice(batch.num_decode_rows)
            cu_seqlens = batch.cu_seqlens_q[: batch.num_decode_rows + 1]
            queries = q[first_row:num_tokens]
            attended[first_row:] = self._paged(queries, rows, cu_seqlens, 1, layer, batch, key_cache, value_cache)
        return attended

    def _mixed_attention(
        self,
        q: torch.Tensor,
        layer: DecoderLayer,
        batch: ForwardBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Decode rows and chunks in a launch each: one query over a long context wants its context split."""
        rows, cu_seqlens = batch.num_decode_rows, batch.cu_seqlens_q
        caches = (key_cache, value_cache)
        mixed = self._paged(q, slice(rows, None), cu_seqlens[rows:], batch.max_query_len, layer, batch, *caches)
        if rows:
            mixed[:rows] = self._paged(q[:rows], slice(rows), cu_seqlens[: rows + 1], 1, layer, batch, *caches)
        return mixed

    def _paged(
        self,
        queries: torch.Tensor,
        sequences: slice,
        cu_seqlens_q: torch.Tensor,
        max_query_len: int,
        layer: DecoderLayer,
        batch: ForwardBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of some of the batch's sequences over their pages."""
        config = self._decoder.config
        return ops.paged_attention(
            queries,
            key_cache,
            value_cache,
            batch.block_tables[sequences],
            batch.context_lens[sequences],
            cu_seqlens_q,
            config.query_scale,
            layer.sliding_window,
            config.attention_soft_cap,
            max_query_len,
            batch.max_context_len,
        )


def _has_rows_only(batch: ForwardBatch) -> bool:
    return batch.num_decode_rows == batch.input_ids.shape[0]


def _project(
    projection: Projection,
    x: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    residual: torch.Tensor | None = None,
    activation: str = "",
    feeds_attention: bool = False,
) -> torch.Tensor:
    """activation(rms_norm(x) Wᵀ + bias) + residual (written over); parts in different forms (Q4_K beside Q6_K) are
    multiplied one by one."""
    bias = projection.bias
    if len(projection.weights) == 1:
        (weight,) = projection.weights
        return ops.fused_linear(
            x, weight, bias, norm, eps, residual, activation, None, feeds_attention, residual_is_spent=True
        )
    if norm is not None:
        x = ops.rms_norm(x, norm, eps)
    product = torch.cat([ops.fused_linear(x, weight) for weight in projection.weights], dim=-1)
    if bias is not None:
        product = product + bias
    if activation:
        product = ops.gated_activation(product, activation)
    return product if residual is None else product + residual

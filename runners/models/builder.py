"""`build_decoder`: a checkpoint's weights, fused and packed for a device, as a `Decoder`."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from kernels import ops
from kernels.weights import concatenate_rows
from runners.errors import StartupError
from runners.loading.quantized_at_load import QUANTIZE_AT_LOAD, QuantizedAtLoad
from runners.models.decoder import Decoder, DecoderLayer, Projection
from runners.models.registry import check_config
from runners.models.rope import build_rope_table
from runners.models.weight_source import StoredWeight, WeightSource

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT_FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def build_decoder(
    checkpoint: WeightSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    quantization: str = "auto",
    max_context: int | None = None,
) -> Decoder:
    """The checkpoint's decoder on `device`.

    `dtype` "auto" is float32 on a CPU, bfloat16 elsewhere. `quantization` "auto" keeps weights as they are stored
    where the device has kernels for that form; "none" turns every weight into `dtype`; "q8_0" and "q4_k" quantise float
    matrices on `device`. `max_context` bounds the rope tables (None: what the model was trained for). StartupError
    names a setting, weight or shape that does not fit.
    """
    check_config(checkpoint.config)
    device = torch.device(device)
    if quantization in QUANTIZE_AT_LOAD:
        checkpoint, quantization = QuantizedAtLoad(checkpoint, quantization, device), "auto"
    if quantization not in ("auto", "none"):
        known = ", ".join(("auto", "none", *QUANTIZE_AT_LOAD))
        raise StartupError(f"quantization {quantization!r} is not supported; supported: {known}")
    context = min(max_context or checkpoint.config.max_context, checkpoint.config.max_context)
    return _Builder(checkpoint, resolve_dtype(dtype, device), device, quantization, context).build()


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The activations' type for a profile's `dtype`. StartupError names an unknown one."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise StartupError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


class _Builder:
    def __init__(
        self, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device, quantization: str, max_context: int
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.max_context = max_context
        self.native_formats = ops.native_formats(device.type) if quantization == "auto" else frozenset[str]()
        self.unused = set(checkpoint.names())
        self.dequantized: Counter[str] = Counter()
        self.dequantized_bytes: Counter[str] = Counter()
        self.rope_tables: dict[object, torch.Tensor] = {}

    def build(self) -> Decoder:
        config = self.config
        embed_tokens = self._weight("embed_tokens", (config.vocab_size, config.hidden_size))
        if config.tie_word_embeddings:
            self.unused.discard("lm_head")  # some files repeat the tied weight
            embed_tokens = lm_head = self._pack(embed_tokens)
        else:
            lm_head = self._pack(self._weight("lm_head", (config.vocab_size, config.hidden_size)))
        norm = self._vector("norm", config.hidden_size)
        layers = [self._layer(index) for index in range(config.num_layers)]
        if self.unused:
            some = ", ".join(sorted(self.unused)[:5])
            raise StartupError(f"{len(self.unused)} weights have no place in a {config.architecture} decoder: {some}")
        self._log_dequantized()
        return Decoder(config, embed_tokens, layers, norm, lm_head, self.dtype, self.max_context)

    def _layer(self, index: int) -> DecoderLayer:
        config = self.config
        prefix = f"layers.{index}."
        hidden, head_dim, ffn = config.hidden_size, config.head_dim, config.intermediate_size
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        is_sandwich = config.norm_placement == "sandwich"

        def norm(name: str, size: int, present: bool = True) -> torch.Tensor | None:
            return self._vector(prefix + name, size) if present else None

        input_norm, pre_ffn_norm = norm("input_norm", hidden), norm("pre_ffn_norm", hidden)
        assert input_norm is not None
        assert pre_ffn_norm is not None
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        return DecoderLayer(
            input_norm=input_norm,
            qkv_proj=self._projection(prefix, sizes, hidden, config.attention_bias),
            o_proj=self._projection(prefix, {"o_proj": hidden}, q_size, config.attention_output_bias),
            pre_ffn_norm=pre_ffn_norm,
            gate_up_proj=self._projection(prefix, {"gate_proj": ffn, "up_proj": ffn}, hidden, config.mlp_bias),
            down_proj=self._projection(prefix, {"down_proj": hidden}, ffn, config.mlp_bias),
            rope_table=self._rope_table(index),
            sliding_window=config.layer_windows[index] if config.layer_windows else None,
            q_norm=norm("q_norm", head_dim, config.qk_norm),
            k_norm=norm("k_norm", head_dim, config.qk_norm),
            post_attention_norm=norm("post_attention_norm", hidden, is_sandwich),
            post_ffn_norm=norm("post_ffn_norm", hidden, is_sandwich),
        )

    def _projection(self, prefix: str, out_sizes: dict[str, int], in_size: int, has_bias: bool) -> Projection:
        """The named weights, stacked where they are stored alike."""
        weights = [self._weight(prefix + name, (size, in_size)) for name, size in out_sizes.items()]
        packed = tuple(self._pack(weight) for weight in concatenate_rows(weights))
        if not has_bias:
            return Projection(packed)
        biases = [self._vector(f"{prefix}{name}.bias", size) for name, size in out_sizes.items()]
        return Projection(packed, torch.cat(biases).to(self.dtype))

    def _rope_table(self, index: int) -> torch.Tensor:
        config = self.config
        scaling = config.layer_rope_scaling[index] if config.layer_rope_scaling else None
        key = (config.layer_rope_theta[index], scaling)
        if key not in self.rope_tables:
            self.rope_tables[key] = build_rope_table(config.head_dim, key[0], scaling, self.max_context, self.device)
        return self.rope_tables[key]

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._stored(name, (size,)).dequantize(torch.float32, self.device)

    def _weight(self, name: str, shape: tuple[int, int]) -> ops.LinearWeight:
        stored = self._stored(name, shape)
        format_name = stored.ggml_type.name.lower()
        float_dtype = _FLOAT_FORMATS.get(format_name)
        if format_name in self.native_formats:
            if float_dtype is not None:
                return stored.dequantize(float_dtype, self.device)
            return ops.QuantizedWeight(format_name, shape, {"blocks": stored.block_bytes().to(self.device)})
        weight = stored.dequantize(self.dtype, self.device)
        if float_dtype is None:
            self.dequantized[format_name] += 1
            self.dequantized_bytes[format_name] += weight.nbytes - stored.nbytes
        return weight

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        if name not in self.unused:
            raise StartupError(f"weight {name!r} is missing from the checkpoint")
        self.unused.remove(name)
        stored = self.checkpoint.get(name)
        if tuple(stored.shape) != shape:
            raise StartupError(f"weight {name!r} has shape {list(stored.shape)}, the config calls for {list(shape)}")
        return stored

    def _pack(self, weight: ops.LinearWeight) -> ops.LinearWeight:
        return weight if self.quantization == "none" else ops.pack_weight(weight)

    def _log_dequantized(self) -> None:
        if not self.dequantized or self.quantization == "none":
            return
        parts = [
            f"{count} of {name} (+{self.dequantized_bytes[name] / 2**20:.0f} MiB)"
            for name, count in sorted(self.dequantized.items())
        ]
        logger.info("weights without a native %s kernel, dequantised: %s", self.device.type, ", ".join(parts))

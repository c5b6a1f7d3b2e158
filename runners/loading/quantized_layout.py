"""What a config.json's `quantization_config` says about the stored weights. Torch-free.

Sources: transformers' configuration classes (GPTQConfig, AwqConfig, FineGrainedFP8Config, CompressedTensorsConfig) and
the formats that their tools publish.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runners.loading.settings import Settings, quote, read_json_object

Method = Literal["gptq", "awq", "int4", "fp8"]

# Settings that steer how the weights were made, or kernels elsewhere, not what is stored.
_HARMLESS = frozenset(
    {
        "quant_method", "activation_scheme", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
        "checkpoint_format", "damp_percent", "dataset", "do_fuse", "exllama_config", "fuse_max_seq_len", "fmt",
        "format", "ignore", "ignored_layers", "kv_cache_scheme", "max_input_length", "meta", "model_name_or_path",
        "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse",
        "modules_to_not_convert",
        "pad_token_id", "quantization_status", "static_groups", "tokenizer", "transform_config", "true_sequential",
        "use_cuda_fp16", "use_exllama", "version", "sparsity_config", "global_compression_ratio", "act_group_aware",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """How the quantised projections of a safetensors checkpoint are stored.

    `gptq`: qweight [in/8, out], qzeros, scales, g_idx. `awq`: qweight [in, out/8], qzeros, scales. `int4`
    (compressed-tensors): weight_packed [out, in/8], weight_scale. `fp8`: weight (e4m3) and weight_scale or
    weight_scale_inv. `group_size` in input features (fp8: 0). `zero_offset` is added to a stored gptq zero.
    """

    method: Method
    group_size: int = 0
    zero_offset: int = 0


def layout_from_folder(folder: Path) -> QuantizedLayout | None:
    """None for a checkpoint that is not quantised. StartupError names a setting that is not supported."""
    path = folder / "config.json"
    outer = Settings(path, read_json_object(path))
    settings = outer.section("quantization_config")
    if settings is None and (inner := outer.section("text_config")) is not None:
        settings = inner.section("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method")
    readers = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}
    if not isinstance(method, str) or method not in readers:
        settings.fail("quant_method", f"{quote(method)} is not supported; supported: {', '.join(readers)}")
    layout = readers[method](settings)
    settings.reject_unread(_HARMLESS)
    return layout


def _gptq(settings: Settings) -> QuantizedLayout:
    settings.require("bits", 4, reason="4 bits are read")
    # `desc_act` reorders columns by g_idx; the reader looks at g_idx itself.
    settings.flag("desc_act")
    settings.flag("sym", True)
    settings.flag("lm_head")
    # The first format stores every zero less one.
    return QuantizedLayout("gptq", _group_size(settings), 0 if settings.get("checkpoint_format") == "gptq_v2" else 1)


def _awq(settings: Settings) -> QuantizedLayout:
    settings.require("bits", 4, reason="4 bits are read")
    settings.require("version", "gemm", "GEMM", reason="the gemm layout is read")
    settings.flag("zero_point", True)
    return QuantizedLayout("awq", _group_size(settings, "group_size" if settings.has("group_size") else "q_group_size"))


def _fp8(settings: Settings) -> QuantizedLayout:
    settings.require("fmt", "e4m3", reason="e4m3 is read")
    settings.get("weight_block_size")  # scales say it by their shape
    return QuantizedLayout("fp8")


def _compressed(settings: Settings) -> QuantizedLayout:
    form = settings.get("format")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        settings.fail("config_groups", "one group of layers is read")
    (group,) = groups.values()
    weights: Any = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        settings.fail("config_groups", "has no weights")
    scheme = Settings(settings.path, weights, f"{settings.prefix}config_groups.weights.")
    bits, kind = scheme.integer("num_bits"), scheme.get("type")
    if (form, bits, kind) in (("float-quantized", 8, "float"), ("naive-quantized", 8, "float")):
        return QuantizedLayout("fp8")
    if (form, bits, kind) == ("pack-quantized", 4, "int"):
        scheme.require("symmetric", True, reason="symmetric groups are read")
        # "group" permutes columns by weight_g_idx; "weight" and "static" leave them in order.
        scheme.require("actorder", False, "weight", "static", reason="columns in order are read")
        return QuantizedLayout("int4", _group_size(scheme))
    return settings.fail("format", f"{quote(form)} of {bits} bits ({quote(kind)}) is not supported")


def _group_size(settings: Settings, key: str = "group_size") -> int:
    size = settings.integer(key, minimum=32)
    if size % 32:
        settings.fail(key, f"is {size}, not a multiple of 32")
    return size

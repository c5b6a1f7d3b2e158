"""Which architectures the decoder runs, and the check of a config against what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runners.errors import StartupError
from runners.models.config import Activation, ModelConfig
from runners.models.rope import SCALING_KINDS


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets a family apart; a config that says otherwise was read wrongly or is a variant we do not know."""

    norm_placement: str = "pre"
    qk_norm: bool = False
    activation: Activation = Activation.SILU


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "smollm": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "gemma3": Architecture(norm_placement="sandwich", qk_norm=True, activation=Activation.GELU_TANH),
}


def check_config(config: ModelConfig) -> None:
    """Raise StartupError naming every setting of `config` that the decoder cannot run."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise StartupError(f"architecture {config.architecture!r} is not supported; supported: {known}")
    faults = list(_faults(config, ARCHITECTURES[config.architecture]))
    if faults:
        raise StartupError(f"{config.architecture}: {'; '.join(faults)}")


def _faults(config: ModelConfig, architecture: Architecture) -> Iterator[str]:
    if config.num_heads % config.num_kv_heads:
        yield f"num_heads {config.num_heads} is no multiple of num_kv_heads {config.num_kv_heads}"
    if config.head_dim % 2:
        yield f"head_dim {config.head_dim} is odd"
    if config.norm_placement != architecture.norm_placement:
        yield f"norm_placement {config.norm_placement!r} is not supported (expected {architecture.norm_placement!r})"
    if config.activation != architecture.activation:
        yield f"activation {str(config.activation)!r} is not supported (expected {str(architecture.activation)!r})"
    if config.qk_norm != architecture.qk_norm:
        yield f"qk_norm {config.qk_norm} is not supported (expected {architecture.qk_norm})"
    per_layer = {
        "layer_windows": config.layer_windows,
        "layer_rope_theta": config.layer_rope_theta,
        "layer_rope_scaling": config.layer_rope_scaling,
    }
    for name, values in per_layer.items():
        if len(values) not in (0, config.num_layers) or (name == "layer_rope_theta" and not values):
            yield f"{name} has {len(values)} entries for {config.num_layers} layers"
    windows = {window for window in config.layer_windows if window is not None}
    if any(window < 1 for window in windows):
        yield f"sliding window {min(windows)} is less than one token"
    for kind in sorted({scaling.kind for scaling in config.layer_rope_scaling if scaling} - set(SCALING_KINDS)):
        yield f"rope scaling {kind!r} is not supported (supported: {', '.join(SCALING_KINDS)})"
    for name, value in sorted(config.extra.items()):
        yield f"setting {name}={value} is not supported"

"""Rotary settings of a Hugging Face config.json, of transformers 4 and 5. Torch-free.

Source: `modeling_rope_utils` and the gemma3 configuration of transformers 5.
"""

from __future__ import annotations

from runners.loading.settings import Settings, quote
from runners.models.config import RopeScaling

LayerRope = tuple[float, RopeScaling | None]
DEFAULT_THETA = 10_000.0
# gemma3: full-attention layers, then sliding ones.
GEMMA3_GLOBAL_THETA, GEMMA3_LOCAL_THETA = 1_000_000.0, 10_000.0


def layer_rope(
    settings: Settings, architecture: str, layer_types: tuple[str, ...], max_context: int
) -> tuple[LayerRope, ...]:
    """(theta, scaling) for every layer; only gemma3's differ between layer types.

    Reads `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling`, `rope_local_base_freq` (before it).
    """
    if architecture == "gemma3":
        by_type = _gemma3_rope(settings, max_context)
        return tuple(by_type[kind] for kind in layer_types)
    theta = settings.number("rope_theta", DEFAULT_THETA)
    new, old = settings.section("rope_parameters"), settings.section("rope_scaling")
    if new is not None and old is not None and settings.get("rope_parameters") != settings.get("rope_scaling"):
        settings.fail("rope_scaling", "contradicts rope_parameters")
    return (_rope_of(new or old, theta, max_context),) * len(layer_types)


def _gemma3_rope(settings: Settings, max_context: int) -> dict[str, LayerRope]:
    """rope_scaling of the older layout holds for full-attention layers only."""
    global_theta = settings.number("rope_theta", GEMMA3_GLOBAL_THETA)
    local_theta = settings.number("rope_local_base_freq", GEMMA3_LOCAL_THETA)
    full, local = settings.section("rope_scaling"), None
    nested = settings.section("rope_parameters")
    if nested is not None:
        if full is not None:
            settings.fail("rope_scaling", "contradicts rope_parameters")
        full, local = nested.section("full_attention"), nested.section("sliding_attention")
        nested.reject_unread()
    return {
        "full_attention": _rope_of(full, global_theta, max_context),
        "sliding_attention": _rope_of(local, local_theta, max_context),
    }


def _rope_of(rope: Settings | None, default_theta: float, max_context: int) -> LayerRope:
    if rope is None:
        return default_theta, None
    theta = rope.number("rope_theta", default_theta)
    legacy_kind = rope.get("type")
    kind = rope.get("rope_type") or legacy_kind or "default"
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = RopeScaling("linear", factor=rope.number("factor"))
    elif kind == "llama3":
        scaling = _llama3(rope, max_context)
    elif kind != "default":
        rope.fail("rope_type", f"{quote(kind)} is not supported (default, linear and llama3 are)")
    rope.require("partial_rotary_factor", 1.0, 1, reason="only whole heads are rotated")
    rope.reject_unread()
    return theta, scaling


def _llama3(rope: Settings, max_context: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        rope.fail("high_freq_factor", f"{high:g} is not over low_freq_factor {low:g}")
    return RopeScaling(
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_context=rope.integer("original_max_position_embeddings", max_context),
    )

"""From a `models` entry to weights on the device: what of loading takes long, and may run on a thread of its own."""

from __future__ import annotations

import importlib.util
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import ModelSection, Profile
from runners.errors import StartupError
from runners.grammar.compiler import GrammarCompiler
from runners.loading.sources import resolve_source
from runners.messages import ModelInfo
from runners.model_names import names_of
from runners.startup_checks import choose_device, model_context

if TYPE_CHECKING:
    import torch

    from runners.loading.checkpoint import Checkpoint
    from runners.models.decoder import Decoder

Report = Callable[[str, str, float | None], None]
"""Called with a phase, a detail, and the fraction done where it is known."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose weights are there; what it still needs is a pool and an executor. `decoder` is None where the
    executor is simulated; `info` lacks what only the pool decides."""

    section: ModelSection
    info: ModelInfo
    decoder: Decoder | None = None
    grammars: GrammarCompiler | None = None


# --- simulated -----------------------------------------------------------------------------------------------------


def prepare_simulated(profile: Profile, model: ModelSection, report: Report) -> PreparedModel:
    """No weights are read; the source is resolved because the HTTP process takes the tokenizer from it."""
    settings = profile.simulated
    path = resolve_source(model.source, report).resolve()
    max_context = settings.max_context if model.max_context == "auto" else min(model.max_context, settings.max_context)
    info = ModelInfo(
        served_names=names_of(model),
        source=model.source,
        path=str(path),
        architecture="simulated",
        vocab_size=settings.vocab_size,
        max_context=max_context,
        eos_token_ids=[],  # tokens are made up: none of them means that a text ends
        dtype="none",
        quantization="none",
        parameters=0,
        weight_bytes=0,
        device="none",
        executor="simulated",
        slots=profile.engine.slots,
        block_tokens=profile.kv.block_tokens,
        total_blocks=0,
        kv_bytes=0,
        peak_concurrency=0.0,
        pooling=model.pooling,
    )
    return PreparedModel(model, info)


# --- torch ---------------------------------------------------------------------------------------------------------


def prepare_torch(profile: Profile, model: ModelSection, report: Report) -> PreparedModel:
    path = resolve_source(model.source, report).resolve()
    report("loading", path.name, None)
    import torch

    from runners.loading.checkpoint import open_checkpoint
    from runners.models.builder import build_decoder
    from runners.text.assets import load_text, read_end_tokens

    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    device = choose_device(profile.engine.device)
    max_context = model_context(model.max_context, config.max_context)
    override = Path(model.tokenizer) if model.tokenizer is not None else None
    eos_token_ids = sorted(set(config.eos_token_ids) | read_end_tokens(path, override))
    decoder = build_decoder(
        checkpoint, dtype=model.dtype, device=device, quantization=model.quantization, max_context=max_context
    )
    grammars = GrammarCompiler(lambda: load_text(path, override).tokenizer, config.vocab_size, eos_token_ids)
    info = ModelInfo(
        served_names=names_of(model),
        source=model.source,
        path=str(path),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_context=max_context,
        eos_token_ids=eos_token_ids,
        dtype=str(decoder.dtype).removeprefix("torch."),
        quantization=_held_form(model.quantization, checkpoint),
        parameters=sum(math.prod(checkpoint.get(name).shape) for name in checkpoint.names()),
        weight_bytes=decoder.weight_bytes,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        executor="cuda" if _takes_cuda_executor(profile.engine.executor, device) else "torch",
        slots=profile.engine.slots,
        block_tokens=profile.kv.block_tokens,
        total_blocks=0,
        kv_bytes=0,
        peak_concurrency=0.0,
        pooling=model.pooling,
    )
    return PreparedModel(model, info, decoder, grammars)


def _takes_cuda_executor(name: str, device: torch.device) -> bool:
    """StartupError where the `cuda` executor is asked for by name on another device, or without Triton."""
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "cuda" and (device.type != "cuda" or not has_triton):
        reason = "Triton is not installed" if device.type == "cuda" else f"the device is {device}"
        raise StartupError(f"engine.executor: cuda needs a CUDA device and Triton, but {reason}")
    return name in ("cuda", "auto") and device.type == "cuda" and has_triton


def use_cores(profile: Profile) -> None:
    """As many threads as the profile grants; fewer than there are cores: also keep to that many of them."""
    import torch

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    wanted = len(cores) if profile.engine.cpu_cores == "auto" else min(profile.engine.cpu_cores, len(cores))
    if wanted < len(cores) and hasattr(os, "sched_setaffinity"):
        # The last ones: the first is where interrupts and whoever asks for one core end up.
        os.sched_setaffinity(0, cores[-wanted:])
    torch.set_num_threads(wanted)
    torch.set_num_interop_threads(1)


def _held_form(quantization: str, checkpoint: Checkpoint) -> str:
    """What `quantization` makes of the weights: those that are stored quantised are not quantised again."""
    stored = _stored_form(checkpoint)
    is_float = stored in ("f32", "f16", "bf16")
    return stored if quantization == "auto" or (quantization != "none" and not is_float) else quantization


def _stored_form(checkpoint: Checkpoint) -> str:
    """The type that most weight bytes have in the file: `q4_1`, `bf16` …"""
    num_bytes: Counter[str] = Counter()
    for name in checkpoint.names():
        tensor = checkpoint.get(name)
        if len(tensor.shape) == 2:
            num_bytes[tensor.ggml_type.name.lower()] += tensor.nbytes
    return num_bytes.most_common(1)[0][0]

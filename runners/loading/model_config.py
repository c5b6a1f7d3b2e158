"""`ModelConfig` from a model folder (config.json) or from GGUF metadata, torch-free."""

from __future__ import annotations

from pathlib import Path

from runners.models.config import ModelConfig


def read_model_config(path: Path) -> ModelConfig:
    """Config of the model at `path`: a GGUF file (any shard) or a folder, without touching its weights.

    Raises StartupError naming the file and the setting that is missing, wrong or not supported.
    """
    raise NotImplementedError

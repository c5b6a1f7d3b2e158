"""`ModelConfig` from a model folder (config.json) or from GGUF metadata. Torch-free."""

from __future__ import annotations

from pathlib import Path

from runners.loading.gguf_config import config_from_gguf
from runners.loading.gguf_reader import open_gguf
from runners.loading.hf_config import config_from_folder
from runners.loading.model_files import locate_model
from runners.models.config import ModelConfig

__all__ = ["config_from_folder", "config_from_gguf", "read_model_config"]


def read_model_config(path: Path) -> ModelConfig:
    """Config of the model at `path`: a GGUF file (any shard) or a folder. Of a GGUF only the header is read.

    Raises StartupError naming the file and the setting that is missing, wrong or not supported.
    """
    located = locate_model(path)
    return config_from_folder(located) if located.is_dir() else config_from_gguf(open_gguf(located))

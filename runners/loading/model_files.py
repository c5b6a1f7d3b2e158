"""Which files make up the model at a path: one GGUF (maybe split) or a folder with safetensors. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from runners.errors import StartupError
from runners.loading.gguf_reader import is_gguf

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_REASON = "pickled weights can run code when loaded and are refused; convert them to safetensors or GGUF"


def locate_model(path: Path) -> Path:
    """The GGUF file (of a split one: a shard) or the safetensors folder behind `path`.

    `path` is a `.gguf` or `.safetensors` file, or a folder that holds one model. Raises StartupError otherwise.
    """
    if path.is_dir():
        return _locate_in_folder(path)
    if not path.is_file():
        raise StartupError(f"{path}: no such file or folder")
    if is_gguf(path):
        return path
    if path.suffix == ".safetensors":
        return path.parent
    if path.suffix in PICKLE_SUFFIXES:
        raise StartupError(f"{path}: {_PICKLE_REASON}")
    raise StartupError(f"{path}: neither a GGUF file nor a folder with safetensors")


def _locate_in_folder(folder: Path) -> Path:
    files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    if any(file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json") for file in files):
        return folder
    # Shards of one model count once; a vision projector is not a model of its own.
    models: dict[str, Path] = {}
    for file in files:
        if file.suffix == ".gguf" and not file.name.startswith("mmproj"):
            models.setdefault(re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-of-\1", file.name), file)
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        names = ", ".join(file.name for file in models.values())
        raise StartupError(f"{folder}: holds several GGUF models, name one of them: {names}")
    pickles = [file for file in files if file.suffix in PICKLE_SUFFIXES]
    if pickles:
        raise StartupError(f"{pickles[0]}: {_PICKLE_REASON}")
    raise StartupError(f"{folder}: no *.safetensors and no *.gguf in it")

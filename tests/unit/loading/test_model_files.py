"""Which files a path leads to, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from runners.errors import StartupError
from runners.loading.model_files import locate_model


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"GGUF\3\0\0\0" if name.endswith(".gguf") else b"")
    return folder


def test_folders_and_files(tmp_path: Path) -> None:
    assert locate_model(touch(tmp_path, "model.safetensors", "pytorch_model.bin")) == tmp_path
    assert locate_model(tmp_path / "model.safetensors") == tmp_path


def test_one_gguf_model_in_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "mmproj-m.gguf", "README.md")
    assert locate_model(tmp_path) == tmp_path / "m-00001-of-00002.gguf"
    assert locate_model(tmp_path / "m-00002-of-00002.gguf") == tmp_path / "m-00002-of-00002.gguf"
    touch(tmp_path, "other.gguf")
    with pytest.raises(StartupError, match=r"several GGUF models, name one of them: m-00001-of-00002\.gguf, other"):
        locate_model(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.ckpt", "weights.pkl"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(StartupError, match=rf"{name}: pickled weights can run code when loaded and are refused"):
            locate_model(path)


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no \*\.safetensors and no \*\.gguf in it"):
        locate_model(tmp_path)
    with pytest.raises(StartupError, match="no such file or folder"):
        locate_model(tmp_path / "missing")
    touch(tmp_path, "notes.txt")
    with pytest.raises(StartupError, match=r"notes\.txt: neither a GGUF file nor"):
        locate_model(tmp_path / "notes.txt")

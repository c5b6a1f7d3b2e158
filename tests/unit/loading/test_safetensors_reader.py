"""The safetensors reader against files of the `safetensors` package, and against files that are wrong in one place."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runners.errors import StartupError
from runners.loading.safetensors_reader import open_safetensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.arange(24, dtype=torch.float16).reshape(2, 3, 4),
    "scalar": torch.tensor(3.0),
}


def test_one_file_equals_the_safetensors_package(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = open_safetensors(tmp_path)
    assert set(model.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert model.tensors[name].shape == tuple(tensor.shape)
        stored = model.tensor_bytes(name)
        assert not stored.flags.writeable
        np.testing.assert_array_equal(stored.reshape(-1), tensor.reshape(-1).view(torch.uint8).numpy())
    assert model.tensors["b"].dtype == "BF16"
    assert model.tensor_bytes("c").shape == (6, 8)


def write_shards(folder: Path) -> dict[str, str]:
    weight_map = {}
    for index, (name, tensor) in enumerate(TENSORS.items()):
        file_name = f"model-0000{index % 2 + 1}-of-00002.safetensors"
        weight_map[name] = file_name
        own = {key: value for key, value in TENSORS.items() if weight_map.get(key) == file_name}
        save_file(own | {name: tensor}, folder / file_name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    model = open_safetensors(tmp_path)
    for name, tensor in TENSORS.items():
        assert model.tensor_path(name) == tmp_path / weight_map[name]
        np.testing.assert_array_equal(
            model.tensor_bytes(name).reshape(-1), tensor.reshape(-1).view(torch.uint8).numpy()
        )


def test_a_missing_shard_or_tensor_is_named(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, weight_map | {"ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(StartupError, match=r"model-00001-of-00002\.safetensors: tensor 'ghost' of .* is missing"):
        open_safetensors(tmp_path)
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != "b"})
    with pytest.raises(StartupError, match=r"tensor 'b' is not listed for this file"):
        open_safetensors(tmp_path)
    write_index(tmp_path, weight_map)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00002-of-00002\.safetensors: file is missing"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors", "model.bin", 7, ""])
def test_an_index_reaches_no_other_file(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(StartupError, match=r"index\.json: weight_map of 'a': .* is not a file name"):
        open_safetensors(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    with pytest.raises(StartupError, match=r"several \*\.safetensors, but neither"):
        open_safetensors(tmp_path)


def file_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = {
    "empty": (b"", "too short for a safetensors header"),
    "header length": (struct.pack("<Q", 1 << 60) + b"{}", "the header claims 1152921504606846976 bytes, 2 are left"),
    "no JSON": (file_bytes(b"{nope", b""), "the header is not valid JSON"),
    "deep JSON": (file_bytes(b"[" * 100_000, b""), "the header is not valid JSON"),
    "long number": (file_bytes(b'{"a": ' + b"9" * 5000 + b"}", b""), "the header is not valid JSON"),
    "a list": (file_bytes([], b""), "the header is not a JSON object"),
    "twice": (file_bytes(b'{"a": 1, "a": 2}', b""), "a name appears twice"),
    "entry": (file_bytes({"a": 3}, b""), "'a': its header entry is not an object"),
    "dtype": (file_bytes({"a": entry(dtype="F31")}, b"\0" * 8), "'a': unknown dtype 'F31'"),
    "shape": (file_bytes({"a": entry(shape=[-2])}, b"\0" * 8), "'a': shape [-2] is not a list of sizes"),
    "shape of bools": (file_bytes({"a": entry(shape=[True])}, b"\0" * 8), "is not a list of sizes"),
    "range": (file_bytes({"a": entry(offsets=[8, 0])}, b"\0" * 8), "'a': data_offsets [8, 0] are not a range"),
    "size": (file_bytes({"a": entry(shape=[3])}, b"\0" * 8), "'a': F32 [3] does not take 8 bytes"),
    "truncated": (file_bytes({"a": entry()}, b"\0" * 7), "tensor 'a' ends at byte"),
    "trailing": (file_bytes({"a": entry()}, b"\0" * 9), "the tensors end at byte"),
    "overlap": (
        file_bytes({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12),
        "tensor 'b' overlaps 'a'",
    ),
    "hole": (file_bytes({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20), "'b' leaves a hole after 'a'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_wrong_place_is_named(tmp_path: Path, case: str) -> None:
    data, reason = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(StartupError) as raised:
        open_safetensors(tmp_path)
    assert reason in str(raised.value)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)

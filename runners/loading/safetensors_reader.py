"""Safetensors folders over a memory map, one file or shards with an index. Torch-free.

Source: the safetensors format: u64 header length, JSON header, data; `data_offsets` count from the data's start. Header
and ranges are checked against the file's size before a tensor can be viewed.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from runners.errors import StartupError
from runners.loading.gguf_reader import map_file
from runners.loading.settings import quote, read_json_object

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsInfo:
    """Where a tensor lies: `offset` counts bytes from the file's start, `dtype` is the format's name (BF16)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsModel:
    """All tensors of a folder. The files stay mapped for as long as this object or a view from it lives."""

    folder: Path
    tensors: Mapping[str, SafetensorsInfo]
    _paths: Mapping[str, Path] = field(repr=False)
    _data: Mapping[Path, NDArray[np.uint8]] = field(repr=False)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Stored bytes of tensor `name`, uint8 [rows, row_bytes] ([1, bytes] for a vector): a read-only view."""
        info = self.tensors[name]
        flat = self._data[self._paths[name]][info.offset : info.offset + info.nbytes]
        return flat.reshape(math.prod(info.shape[:-1]), -1)

    def tensor_path(self, name: str) -> Path:
        """The file that holds tensor `name`, for error messages."""
        return self._paths[name]


def open_safetensors(folder: Path) -> SafetensorsModel:
    """Open model.safetensors, or every shard that model.safetensors.index.json names, or the only file there is.

    Raises StartupError: file, where, why. A folder that opens can be read in full without leaving its files.
    """
    index = folder / INDEX_FILE
    weight_map = _read_index(index) if index.is_file() else None
    tensors: dict[str, SafetensorsInfo] = {}
    paths: dict[str, Path] = {}
    data: dict[Path, NDArray[np.uint8]] = {}
    for path in [_single_file(folder)] if weight_map is None else sorted({folder / n for n in weight_map.values()}):
        infos, data[path] = _open_file(path)
        for info in infos:
            if info.name in tensors:
                raise StartupError(f"{path}: tensor {quote(info.name)} is already in {paths[info.name].name}")
            if weight_map is not None and weight_map.get(info.name) != path.name:
                raise StartupError(f"{path}: tensor {quote(info.name)} is not listed for this file in {INDEX_FILE}")
            tensors[info.name], paths[info.name] = info, path
    for name, file_name in (weight_map or {}).items():
        if name not in tensors:
            raise StartupError(f"{folder / file_name}: tensor {quote(name)} of {INDEX_FILE} is missing")
    return SafetensorsModel(folder, tensors, paths, data)


def _single_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    single = folder / SINGLE_FILE
    if single in files or not files:
        return single
    if len(files) > 1:
        raise StartupError(f"{folder}: several *.safetensors, but neither {SINGLE_FILE} nor {INDEX_FILE}")
    return files[0]


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{path}: weight_map is missing or empty")
    for name, file_name in weight_map.items():
        # A shard is a plain file of this folder: an index must not reach elsewhere.
        if (
            not isinstance(file_name, str)
            or not file_name.endswith(".safetensors")
            or Path(file_name).name != file_name
        ):
            raise StartupError(f"{path}: weight_map of {quote(name)}: {quote(file_name)} is not a file name")
    return weight_map


def _open_file(path: Path) -> tuple[list[SafetensorsInfo], NDArray[np.uint8]]:
    if not path.is_file():
        raise StartupError(f"{path}: file is missing")
    data = map_file(path)
    if data is None or len(data) < 8:
        raise StartupError(f"{path}: at byte 0: too short for a safetensors header (file truncated?)")
    (header_bytes,) = struct.unpack_from("<Q", data)
    if header_bytes > min(len(data) - 8, MAX_HEADER_BYTES):
        raise StartupError(
            f"{path}: at byte 0: the header claims {header_bytes} bytes, {len(data) - 8} are left "
            "(file truncated or not safetensors)"
        )
    header = _parse_header(path, data, header_bytes)
    data_start = 8 + header_bytes
    infos = [_tensor_info(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
    _check_layout(path, infos, data_start, len(data))
    return infos, np.frombuffer(data, dtype=np.uint8)


def _parse_header(path: Path, data: mmap.mmap, header_bytes: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name appears twice")
        return entries

    try:
        header = json.loads(data[8 : 8 + header_bytes], object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: at byte 8: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise StartupError(f"{path}: at byte 8: the header is not a JSON object")
    return header


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> SafetensorsInfo:
    def fail(reason: str) -> NoReturn:
        raise StartupError(f"{path}: tensor {quote(name)}: {reason}")

    if not isinstance(entry, dict):
        fail("its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fail(f"unknown dtype {quote(dtype)}")
    if not _is_sizes(shape):
        fail(f"shape {quote(shape)} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"data_offsets {quote(offsets)} are not a range")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_BITS[dtype] != nbytes * 8:
        fail(f"{dtype} {quote(shape)} does not take {nbytes} bytes")
    return SafetensorsInfo(name, tuple(shape), dtype, data_start + offsets[0], nbytes)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def _check_layout(path: Path, infos: list[SafetensorsInfo], data_start: int, file_bytes: int) -> None:
    """Tensors follow each other without overlap or hole, from the end of the header to the end of the file."""
    position, previous = data_start, "the header"
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            relation = "overlaps" if info.offset < position else "leaves a hole after"
            raise StartupError(f"{path}: at byte {info.offset}: tensor {quote(info.name)} {relation} {previous}")
        position, previous = info.offset + info.nbytes, quote(info.name)
        if position > file_bytes:
            raise StartupError(
                f"{path}: tensor {quote(info.name)} ends at byte {position}, the file has {file_bytes} (truncated)"
            )
    if position != file_bytes:
        raise StartupError(f"{path}: the tensors end at byte {position}, the file has {file_bytes}")

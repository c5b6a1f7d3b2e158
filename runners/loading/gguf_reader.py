"""GGUF v2 and v3 files, also split ones, over a memory map. Torch-free.

Source: ggml's GGUF specification (docs/gguf.md). Tensor data is never read here: `GGUFFile.tensor_bytes` gives views on
the mapping, and every range was checked against the file's size when the file was opened.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runners.errors import StartupError
from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_metadata import HeaderCursor, MetadataValue

GGUF_MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_SHARDS = 65535
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Smallest encodings: key length, type, value · name length, dimension count, one dimension, type, offset.
_MIN_METADATA_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts bytes from the file's start.

    `shape` is row-major ([out, in]); GGUF stores it reversed.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.ggml_type.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """One model: metadata of the first shard, tensors of all shards.

    `path` is the first shard. The files stay mapped for as long as this object or a view from it lives.
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]
    _shard_of: Mapping[str, _Shard] = field(repr=False)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Stored bytes of tensor `name`, uint8 [rows, row_bytes] ([1, bytes] for a vector): a read-only view."""
        info = self.tensors[name]
        flat = self._shard_of[name].data[info.offset : info.offset + info.nbytes]
        return flat.reshape(-1, info.row_bytes)

    def tensor_path(self, name: str) -> Path:
        """The shard that holds tensor `name`, for error messages."""
        return self._shard_of[name].path


def is_gguf(path: Path) -> bool:
    """Whether the file at `path` starts like a GGUF file of either byte order."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (GGUF_MAGIC, GGUF_MAGIC[::-1])
    except OSError:
        return False


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file; of a split model any shard may be given, all shards are opened.

    Raises StartupError: file, where, why. A file that opens can be read in full without leaving it.
    """
    given = _open_shard(path)
    count = _shard_count(given)
    shards = [given] if count == 1 else _open_all_shards(given, count)
    tensors: dict[str, TensorInfo] = {}
    shard_of: dict[str, _Shard] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            if name in tensors:
                raise StartupError(f"{shard.path}: tensor {name!r} is already in {shard_of[name].path.name}")
            tensors[name], shard_of[name] = info, shard
    expected = shards[0].metadata.get("split.tensors.count")
    if count > 1 and isinstance(expected, int) and expected != len(tensors):
        raise StartupError(
            f"{shards[0].path}: split.tensors.count is {expected}, the shards hold {len(tensors)} tensors"
        )
    return GGUFFile(shards[0].path, shards[0].metadata, tensors, shard_of)


def _shard_count(shard: _Shard) -> int:
    count = shard.metadata.get("split.count", 1)
    # Converters write 0 for a model that was not split.
    if not isinstance(count, int) or not 0 <= count <= MAX_SHARDS:
        raise StartupError(f"{shard.path}: split.count is {count!r}, not a number of files up to {MAX_SHARDS}")
    return max(count, 1)


def _open_all_shards(given: _Shard, count: int) -> list[_Shard]:
    match = _SHARD_NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count:
        raise StartupError(
            f"{given.path}: split.count is {count}, but the name does not end in -0000N-of-{count:05d}.gguf"
        )
    shards = []
    for index in range(count):
        path = given.path.with_name(f"{match['stem']}-{index + 1:05d}-of-{count:05d}.gguf")
        if not path.is_file():
            raise StartupError(f"{path}: shard {index + 1} of {count} is missing")
        shard = given if path == given.path else _open_shard(path)
        if shard.metadata.get("split.no") != index or _shard_count(shard) != count:
            raise StartupError(
                f"{path}: split.no {shard.metadata.get('split.no')!r} of {shard.metadata.get('split.count')!r} "
                f"does not fit its name (expected {index} of {count})"
            )
        shards.append(shard)
    return shards


def _open_shard(path: Path) -> _Shard:
    data = map_file(path)
    if data is None or len(data) < len(GGUF_MAGIC) + 4:
        raise StartupError(f"{path}: at byte 0: too short for a GGUF header (file truncated?)")
    cursor = HeaderCursor(data, path)
    _check_magic(data[:4], cursor)
    tensor_count = cursor.count("tensor count", _MIN_TENSOR_INFO_BYTES)
    metadata_count = cursor.count("metadata count", _MIN_METADATA_ENTRY_BYTES)
    metadata = _read_metadata(cursor, metadata_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(infos, data_start, alignment, len(data), cursor)
    return _Shard(path, metadata, tensors, np.frombuffer(data, dtype=np.uint8))


def map_file(path: Path) -> mmap.mmap | None:
    """Read-only map of the whole file, None if it is empty. Raises StartupError if it cannot be opened."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return None
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StartupError(f"{path}: cannot be opened: {reason}") from error


def _check_magic(magic: bytes, cursor: HeaderCursor) -> None:
    if magic == GGUF_MAGIC[::-1]:
        cursor.fail("big-endian GGUF is not supported")
    if magic != GGUF_MAGIC:
        cursor.fail(f"not a GGUF file (starts with {magic!r})")
    cursor.position = len(GGUF_MAGIC)
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        cursor.fail("big-endian GGUF is not supported")
    if version not in SUPPORTED_VERSIONS:
        cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")


def _read_metadata(cursor: HeaderCursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = cursor.string("metadata key")
        if key in metadata:
            cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    return metadata


def _read_tensor_info(cursor: HeaderCursor) -> TensorInfo:
    """One entry of the tensor table; `offset` still counts from the start of the data section."""
    name = cursor.string("tensor name")
    dimensions = cursor.u32(f"dimension count of {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"tensor {name!r} has {dimensions} dimensions (1 to {MAX_DIMENSIONS} are possible)")
    shape = tuple(cursor.u64(f"shape of {name!r}") for _ in range(dimensions))[::-1]
    if not all(shape):
        cursor.fail(f"tensor {name!r} has an empty shape {list(shape)}")
    type_id = cursor.u32(f"type of {name!r}")
    try:
        ggml_type = GGMLType(type_id)
    except ValueError:
        cursor.fail(f"tensor {name!r} has unknown type {type_id}")
    if shape[-1] % ggml_type.block_elements:
        cursor.fail(f"tensor {name!r}: rows of {shape[-1]} are not whole {ggml_type.name} blocks")
    nbytes = math.prod(shape[:-1]) * ggml_type.row_bytes(shape[-1])
    return TensorInfo(name, shape, ggml_type, cursor.u64(f"offset of {name!r}"), nbytes)


def _place_tensors(
    infos: list[TensorInfo], data_start: int, alignment: int, file_bytes: int, cursor: HeaderCursor
) -> dict[str, TensorInfo]:
    """Absolute offsets by name, in file order; ranges are aligned, inside the file, and do not overlap."""
    tensors: dict[str, TensorInfo] = {}
    previous: TensorInfo | None = None
    for info in sorted(infos, key=lambda info: info.offset):
        start = data_start + info.offset
        if info.offset % alignment:
            cursor.fail(f"tensor {info.name!r} starts at offset {info.offset}, not a multiple of {alignment}")
        if start + info.nbytes > file_bytes:
            cursor.fail(
                f"tensor {info.name!r} needs bytes {start} to {start + info.nbytes}, "
                f"the file has {file_bytes} (truncated or corrupt)"
            )
        if previous is not None and start < previous.offset + previous.nbytes:
            cursor.fail(f"tensors {previous.name!r} and {info.name!r} overlap")
        if info.name in tensors:
            cursor.fail(f"tensor {info.name!r} appears twice")
        previous = TensorInfo(info.name, info.shape, info.ggml_type, start, info.nbytes)
        tensors[info.name] = previous
    return tensors

"""Bounds-checked reading of a GGUF header: scalars, strings, metadata values. Torch-free.

Source: ggml's GGUF specification (docs/gguf.md). Every count and length is compared with the bytes that are left
before anything is read or allocated, so a corrupt file costs an error, never memory.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np

from runners.errors import StartupError

# Plain Python values: tokenizer and config code index and compare them, and the largest array is a vocabulary.
MetadataValue: TypeAlias = "bool | int | float | str | list[MetadataValue]"

MAX_STRING_BYTES = 1 << 26
MAX_ARRAY_ELEMENTS = 1 << 24
MAX_ARRAY_DEPTH = 4
# A reason may quote a name from a corrupt file.
MAX_REASON_CHARS = 300

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
# Fewest bytes one element can take: bounds a count before its elements are walked.
_MIN_STRING_BYTES, _MIN_ARRAY_BYTES = 8, 12


class HeaderCursor:
    """A read position in a mapped GGUF file; every read checks what is left first.

    Raises StartupError naming the file, the byte offset and the reason.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._end = len(data)
        self._path = path
        self._array_elements_left = MAX_ARRAY_ELEMENTS
        self.position = 0

    def fail(self, reason: str) -> NoReturn:
        """Raise StartupError at the current position."""
        raise StartupError(f"{self._path}: at byte {self.position}: {reason[:MAX_REASON_CHARS]}")

    def u32(self, what: str) -> int:
        return int(self._scalar(_U32, what))

    def u64(self, what: str) -> int:
        return int(self._scalar(_U64, what))

    def count(self, what: str, min_element_bytes: int) -> int:
        """A u64 count whose elements, at `min_element_bytes` each, still fit in the file."""
        value = self.u64(what)
        left = self._end - self.position
        if value > left // min_element_bytes:
            self.fail(f"{what} {value} cannot fit in the {left} bytes that are left (file truncated or corrupt)")
        return value

    def string(self, what: str) -> str:
        length = self.u64(f"length of {what}")
        left = self._end - self.position
        if length > min(left, MAX_STRING_BYTES):
            self.fail(f"{what} claims {length} bytes, {left} are left (file truncated or corrupt)")
        start, self.position = self.position, self.position + length
        return self._decode(self._data[start : self.position], what)

    def value(self, key: str) -> MetadataValue:
        """The typed value that follows a metadata key."""
        return self._typed_value(self.u32(f"type of {key!r}"), key, depth=0)

    def _typed_value(self, value_type: int, key: str, depth: int) -> MetadataValue:
        if value_type == _STRING:
            return self.string(f"value of {key!r}")
        if value_type == _ARRAY:
            return self._array(key, depth)
        scalar = _SCALARS.get(value_type)
        if scalar is None:
            self.fail(f"{key!r} has unknown value type {value_type}")
        number = self._scalar(scalar, f"value of {key!r}")
        return self._bool(int(number), key) if value_type == _BOOL else number

    def _array(self, key: str, depth: int) -> list[MetadataValue]:
        if depth == MAX_ARRAY_DEPTH:
            self.fail(f"{key!r} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        element_type = self.u32(f"element type of {key!r}")
        scalar = _SCALARS.get(element_type)
        if scalar is not None:
            element_bytes = scalar.size
        elif element_type in (_STRING, _ARRAY):
            element_bytes = _MIN_STRING_BYTES if element_type == _STRING else _MIN_ARRAY_BYTES
        else:
            self.fail(f"{key!r} has unknown element type {element_type}")
        count = self.count(f"element count of {key!r}", element_bytes)
        self._array_elements_left -= count
        if self._array_elements_left < 0:
            self.fail(f"{key!r} brings the metadata arrays over {MAX_ARRAY_ELEMENTS} elements")
        if scalar is not None:
            return self._numbers(scalar, count, is_bool=element_type == _BOOL, key=key)
        if element_type == _STRING:
            return self._strings(count, key)
        return [self._array(key, depth + 1) for _ in range(count)]

    def _numbers(self, scalar: struct.Struct, count: int, *, is_bool: bool, key: str) -> list[MetadataValue]:
        if count == 0:
            return []
        values = np.frombuffer(self._data, dtype=scalar.format, count=count, offset=self.position)
        self.position += count * scalar.size
        numbers: list[MetadataValue] = values.tolist()
        return [self._bool(int(number), key) for number in values] if is_bool else numbers

    def _strings(self, count: int, key: str) -> list[MetadataValue]:
        # One flat loop with local names: a vocabulary has up to half a million entries and delays every start.
        data, end, position, unpack = self._data, self._end, self.position, _U64.unpack_from
        strings: list[MetadataValue] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                length = unpack(data, position)[0] if start <= end else end
                position = start + length
                if position > end or length > MAX_STRING_BYTES:
                    self.position = start - 8
                    self.fail(f"string {len(strings)} of {key!r} runs past the end (file truncated or corrupt)")
                append(data[start:position].decode())
        except UnicodeDecodeError as error:
            self.position = start
            self.fail(f"string {len(strings)} of {key!r} is not UTF-8: {error.reason}")
        self.position = position
        return strings

    def _scalar(self, scalar: struct.Struct, what: str) -> int | float:
        if scalar.size > self._end - self.position:
            self.fail(f"the file ends inside the {what}")
        number: int | float = scalar.unpack_from(self._data, self.position)[0]
        self.position += scalar.size
        return number

    def _bool(self, number: int, key: str) -> bool:
        if number > 1:
            self.fail(f"{key!r} holds {number} where a bool (0 or 1) belongs")
        return bool(number)

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}")

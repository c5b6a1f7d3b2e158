"""Quantised safetensors checkpoints seen as plain ones: each packed projection under its `.weight` name. Torch-free.

4-bit groups become Q4_1 blocks and stay quantised; fp8 weights become bfloat16 as they are read. Nothing is converted
before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runners.errors import StartupError
from runners.loading.packed_int4 import awq_groups, gptq_groups, int4_groups, q4_1_rows
from runners.loading.quantized_layout import QuantizedLayout
from runners.loading.safetensors_reader import SafetensorsInfo, SafetensorsModel

_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
}
_DTYPES: dict[str, type[np.generic]] = {"I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32}
# Scales of activations: products here keep activations in the model's own type.
_UNUSED_FP8 = ("input_scale", "k_scale", "v_scale", "activation_scale")


class PackedSafetensors:
    """What `SafetensorsModel` offers, with packed projections in the place of their parts."""

    def __init__(self, model: SafetensorsModel, layout: QuantizedLayout) -> None:
        """StartupError names a projection whose parts are missing or do not fit together."""
        self._model = model
        self._layout = layout
        self._readers: dict[str, Callable[[], NDArray[np.uint8]]] = {}
        self._first_part: dict[str, str] = {}
        self.tensors: Mapping[str, SafetensorsInfo] = (
            self._fp8_tensors() if layout.method == "fp8" else self._int4_tensors()
        )

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Stored or converted bytes of tensor `name`, uint8 [rows, row_bytes]."""
        reader = self._readers.get(name)
        return self._model.tensor_bytes(name) if reader is None else reader()

    def tensor_path(self, name: str) -> Path:
        """The file that holds tensor `name` or its first part."""
        return self._model.tensor_path(self._first_part.get(name, name))

    def _int4_tensors(self) -> dict[str, SafetensorsInfo]:
        parts = _PARTS[self._layout.method]
        tensors = dict(self._model.tensors)
        for first in [name for name in tensors if name.endswith("." + parts[0])]:
            base = first.removesuffix(parts[0])
            shape = self._int4_shape(base)
            for part in parts:
                tensors.pop(base + part, None)
            weight = f"{base}weight"
            row_bytes = shape[1] // 32 * 20
            tensors[weight] = SafetensorsInfo(weight, shape, "Q4_1", 0, shape[0] * row_bytes)
            self._first_part[weight] = first
            self._readers[weight] = lambda base=base, shape=shape: self._int4_rows(base, shape)  # type: ignore[misc]
        return tensors

    def _int4_shape(self, base: str) -> tuple[int, int]:
        """[out, in] of a projection, its parts checked against one another."""
        method, group = self._layout.method, self._layout.group_size
        first, scales = (self._info(base + part) for part in (_PARTS[method][0], self._scales_name()))
        if len(first.shape) != 2 or len(scales.shape) != 2:
            raise self._fault(base, "has parts that are no matrices")
        if method == "gptq":
            shape = (first.shape[1], first.shape[0] * 8)
        elif method == "awq":
            shape = (first.shape[1] * 8, first.shape[0])
        else:
            shape = (first.shape[0], first.shape[1] * 8)
        groups = shape[1] // group
        expected = {"int4": (shape[0], groups)}.get(method, (groups, shape[0]))
        if shape[1] % group or tuple(scales.shape) != expected:
            raise self._fault(base, f"has scales {list(scales.shape)}, {list(expected)} fit groups of {group}")
        if method != "int4":
            zeros = self._info(base + "qzeros")
            if tuple(zeros.shape) != (groups, shape[0] // 8) or shape[0] % 8:
                raise self._fault(base, f"has qzeros {list(zeros.shape)} for {list(shape)}")
        return shape

    def _int4_rows(self, base: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
        method, group = self._layout.method, self._layout.group_size
        if method == "int4":
            values = int4_groups(self._array(base + "weight_packed", np.int32))
            scales = self._float16(base + "weight_scale")
            return q4_1_rows(values, scales, np.full(scales.shape, 8, dtype=np.int16))
        qweight, qzeros = self._array(base + "qweight", np.int32), self._array(base + "qzeros", np.int32)
        if method == "awq":
            values, zeros = awq_groups(qweight, qzeros)
        else:
            values, zeros = gptq_groups(qweight, qzeros, self._layout.zero_offset)
            self._check_order(base, shape[1], group)
        return q4_1_rows(values, np.ascontiguousarray(self._float16(base + "scales").T), zeros)

    def _check_order(self, base: str, num_inputs: int, group: int) -> None:
        """Groups must be runs of columns: with act-order a row's blocks would need a scale for every column."""
        if base + "g_idx" not in self._model.tensors:
            return
        order = self._array(base + "g_idx", np.int32).reshape(-1)
        if not np.array_equal(order, np.arange(num_inputs, dtype=np.int32) // group):
            raise self._fault(base, "was quantised with act-order (desc_act), which is not supported")

    def _fp8_tensors(self) -> dict[str, SafetensorsInfo]:
        tensors = {
            name: info for name, info in self._model.tensors.items() if name.rpartition(".")[2] not in _UNUSED_FP8
        }
        for name in [name for name, info in tensors.items() if info.dtype == "F8_E4M3"]:
            scale = next((s for s in (f"{name}_scale", f"{name}_scale_inv") if s in tensors), None)
            info = tensors[name]
            if scale is None or len(info.shape) != 2:
                raise self._fault(name, "is fp8 without a weight_scale")
            self._check_fp8_scale(name, info, tensors.pop(scale))
            tensors[name] = SafetensorsInfo(name, info.shape, "BF16", 0, 2 * info.nbytes)
            self._readers[name] = lambda name=name, scale=scale: self._fp8_rows(name, scale)  # type: ignore[misc]
        return tensors

    def _check_fp8_scale(self, name: str, info: SafetensorsInfo, scale: SafetensorsInfo) -> None:
        """One scale a tensor, an output channel, or a square block of a size that divides evenly upwards."""
        rows, columns = info.shape
        fits = scale.shape in ((), (1,), (rows,), (rows, 1))
        if len(scale.shape) == 2 and not fits:
            fits = _block_edge(rows, scale.shape[0]) == _block_edge(columns, scale.shape[1]) == 128
        if not fits:
            raise self._fault(
                name, f"has {scale.name.rpartition('.')[2]} {list(scale.shape)}, which fits no known form"
            )

    def _fp8_rows(self, name: str, scale_name: str) -> NDArray[np.uint8]:
        """bfloat16 bits of value × scale, rounded to nearest even."""
        stored = self._model.tensor_bytes(name)
        scale = self._float32(scale_name)
        rows, columns = stored.shape
        if scale.size == 1:
            scale = scale.reshape(1, 1)
        elif scale.size == rows:
            scale = scale.reshape(rows, 1)
        else:
            scale = np.repeat(np.repeat(scale, 128, axis=0)[:rows], 128, axis=1)[:, :columns]
        return _bfloat16_bits(_E4M3[stored] * scale).view(np.uint8)

    def _scales_name(self) -> str:
        return "weight_scale" if self._layout.method == "int4" else "scales"

    def _info(self, name: str) -> SafetensorsInfo:
        info = self._model.tensors.get(name)
        if info is None:
            raise StartupError(f"{self._model.folder}: tensor {name!r} is missing")
        return info

    def _array(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        info = self._info(name)
        if _DTYPES.get(info.dtype) is not dtype:
            raise self._fault(name, f"has dtype {info.dtype}, not {np.dtype(dtype).name}")
        # A copy: tensors of a file need not be aligned to their type.
        return np.frombuffer(self._model.tensor_bytes(name).tobytes(), dtype=dtype).reshape(info.shape)

    def _float32(self, name: str) -> NDArray[np.float32]:
        info = self._info(name)
        if info.dtype == "BF16":
            bits = np.frombuffer(self._model.tensor_bytes(name).tobytes(), dtype=np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(info.shape)
        if info.dtype not in ("F16", "F32"):
            raise self._fault(name, f"has dtype {info.dtype}, not a float's")
        return self._array(name, _DTYPES[info.dtype]).astype(np.float32)

    def _float16(self, name: str) -> NDArray[np.float16]:
        """Scales as float16; those that leave its range are refused."""
        scales = self._float32(name)
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        if not np.isfinite(halves).all():
            raise self._fault(name, "has a scale outside float16's range")
        return halves

    def _fault(self, name: str, reason: str) -> StartupError:
        return StartupError(f"{self._model.folder}: {name.rstrip('.')} {reason}")


def _block_edge(size: int, blocks: int) -> int:
    """128 when `size` is covered by `blocks` blocks of 128, else 0."""
    return 128 if blocks == -(-size // 128) else 0


def _e4m3_values() -> NDArray[np.float32]:
    """float8_e4m3fn by its byte: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f is NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_values()


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)

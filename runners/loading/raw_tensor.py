"""`RawTensor`: one named weight as it is stored, and its way to a torch tensor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_dequant import dequantize_rows


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A weight in its stored form, HF orientation.

    `shape` is [out, in] (or [n]) in elements; `ggml_type` names the stored type, also for safetensors (F32, F16, BF16).
    `rows` is uint8 [out, row_bytes] ([1, bytes] for a vector), normally a read-only view on the mapped file.
    `row_order` (int64 [out] or None) is the gather that turns stored rows into the order of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    rows: NDArray[np.uint8]
    row_order: NDArray[np.int64] | None = None

    @property
    def is_quantized(self) -> bool:
        return self.ggml_type.is_quantized

    @property
    def nbytes(self) -> int:
        """Bytes in stored form."""
        return self.rows.nbytes

    def block_bytes(self) -> torch.Tensor:
        """Stored bytes, uint8 [out, row_bytes], rows in the order of `shape`, blocks whole.

        A view on the read-only mapping (never write to it), or a copy where rows had to be reordered.
        """
        rows = self.rows if self.row_order is None else self.rows[self.row_order]
        with warnings.catch_warnings():
            # The mapping is read-only on purpose; nobody writes through this view.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(rows)

    def dequantize(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Values as `dtype`, shape `shape`, on `device`; fresh memory that never aliases the file.

        Blocks are decoded in float32 on `device` and rounded once. Raises StartupError for a type without a decoder.
        """
        return dequantize_rows(self.block_bytes(), self.ggml_type, self.name, dtype, device).reshape(self.shape)

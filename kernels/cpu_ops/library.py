"""The compiled kernels as Python functions: one table of C signatures, loaded once a process.

Tensors travel as `data_ptr()`: a call costs about 1 us more than the C function, a torch custom op several.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from kernels.cpu_ops.build import BuildError, build_library

logger = logging.getLogger(__name__)

# Parameters of the C functions, in order: p pointer, i int, l int64, f float. Each is documented where it is defined.
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "wl_argmax": "p lll p",
    "wl_gated_activation": "p ll i p i",
    "wl_gather_tiled": "i p lll p f p i",
    "wl_linear_dense": "pil ll pil p pi",
    "wl_linear_tiled": "i pil ll pl p pi",
    "wl_paged_attention": "ppp llll pl pp llll flf p ii",
    "wl_qk_norm_rope_kv_write": "p llll ppf pp pp lll pl p ii",
    "wl_repack": "i pl ll p",
    "wl_rms_norm": "ppp ll f pp i",
    "wl_sample": "p lll p pppp pp p",
    "wl_tiled_bytes": "i ll",
}
_RESULTS = {"wl_gather_tiled": ctypes.c_int64, "wl_tiled_bytes": ctypes.c_int64}

# Ids of element types, as `DType` in kernels/cpu_src/vec.h.
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# What kernels read as activations and write as results.
ACTIVATION_DTYPES = frozenset({torch.float32, torch.bfloat16})


def open_library(path: Path) -> ctypes.CDLL:
    """The library at `path` with its signatures declared. Uses the OpenMP runtime that torch has loaded already."""
    library = ctypes.CDLL(str(path))
    for name, parameters in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = _RESULTS.get(name)
        function.argtypes = [_TYPES[letter] for letter in parameters.replace(" ", "")]
    return library


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The kernels, or None, after one log line, on a machine that cannot compile or load them."""
    try:
        return open_library(build_library())
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels are not available, plain torch runs instead (slower): %s", error)
        return None


def require_library() -> ctypes.CDLL:
    """The kernels, for implementations that are registered only where they loaded."""
    library = load_library()
    if library is None:
        raise RuntimeError("CPU kernels are not available")
    return library

"""Compile `kernels/cpu_src` with the system's g++ at first use, for this very processor, and keep the result.

The library lies under the cache folder, its name a hash of everything that shapes it: sources, compiler, flags,
processor. Processes that start together compile once (a lock file) and never see half a file (atomic rename).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runners.loading.sources import cache_folder

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent.parent / "cpu_src"
COMPILE_TIMEOUT_S = 300
# No -ffast-math: NaN must reach the logits, where a request is failed for it. The two "uninitialized" warnings come
# from gcc 12's own avx512fintrin.h.
BASE_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-pthread", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)


class BuildError(Exception):
    """The kernels cannot be compiled here; the text says why in one line."""


def build_library(extra_flags: Sequence[str] = ()) -> Path:
    """Path of the compiled library, compiled now if need be. `extra_flags` come last. Raises BuildError."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler ({compiler} not found)")
    flags = (*BASE_FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native")
    flags = (*flags, *extra_flags)
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    folder = cache_folder() / "cpu_kernels"
    library = folder / f"{_fingerprint(compiler, flags)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            if not library.exists():
                _compile(compiler, flags, sources, library)
    except OSError as error:
        raise BuildError(f"cannot write {folder}: {error.strerror}") from error
    return library


def _fingerprint(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in sorted(SOURCE_FOLDER.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: the instruction sets of the first core."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: Sequence[str], sources: Sequence[Path], library: Path) -> None:
    start = time.monotonic()
    logger.info("compiling the CPU kernels (once for this machine)")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(o)] for source, o in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / library.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        os.replace(linked, library)
    logger.info("CPU kernels compiled in %.0f s", time.monotonic() - start)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        first_line = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} failed: {first_line}")
    return done.stdout

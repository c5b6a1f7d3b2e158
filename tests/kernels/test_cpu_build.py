from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.cpu_ops import build, library
from kernels.cpu_ops.library import load_library, open_library
from tests.support.gguf_blocks import SCALE_OFFSETS, expected_values, random_weight

needs_compiler = pytest.mark.skipif(load_library() is None, reason="no compiler for the CPU kernels")
PROJECT = Path(build.__file__).parents[2]


@needs_compiler
def test_the_second_build_is_the_first() -> None:
    path = build.build_library()
    before = path.stat().st_mtime_ns
    assert build.build_library() == path
    assert path.stat().st_mtime_ns == before


@needs_compiler
def test_flags_and_sources_name_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = [*build.BASE_FLAGS]
    names = {build._fingerprint("g++", flags), build._fingerprint("g++", [*flags, "-O1"])}
    for path in build.SOURCE_FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "vec.h").write_text((tmp_path / "vec.h").read_text() + "\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path)
    names.add(build._fingerprint("g++", flags))
    assert len(names) == 3


@needs_compiler
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from kernels.cpu_ops import build\n"
        "build.BASE_FLAGS = (*build.BASE_FLAGS, '-O0')\n"  # fast to compile
        "print('library', build.build_library())\n"
    )
    environment = {**os.environ, "WAVELANE_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    libraries = {line for output in outputs for line in output.splitlines() if line.startswith("library")}
    assert len(libraries) == 1
    assert sum("compiling the CPU kernels" in output for output in outputs) == 1
    assert sorted(path.suffix for path in (tmp_path / "cpu_kernels").iterdir()) == ["", ".so"]  # the lock, the library


def test_no_compiler_means_plain_torch_and_one_log_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("WAVELANE_CACHE", str(tmp_path))
    uncached = library.load_library.__wrapped__
    with caplog.at_level(logging.WARNING):
        assert uncached() is None
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    lines = ("#!/bin/sh", '[ "$1" = --version ] && exit 0', "echo 'x.cpp:1: error: nothing works' >&2", "exit 1", "")
    compiler.write_text("\n".join(lines))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("WAVELANE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="nothing works"):
        build.build_library()
    assert not list((tmp_path / "cache").rglob("*.so"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("target", ["-march=x86-64", "-march=haswell", "-march=skylake-avx512"])
def test_other_instruction_sets_agree(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    if (target.endswith("haswell") and " avx2" not in flags) or ("avx512" in target and " avx512bw" not in flags):
        pytest.skip(f"this processor does not run {target}")
    other = open_library(build.build_library([target, "-O2"]))

    rows, in_features, out_features = 3, 512, 40
    x = torch.randn(rows, in_features)
    for format_id, format_name in enumerate(SCALE_OFFSETS):
        weight = random_weight(format_name, out_features, in_features)
        tiles = ops.pack_weight(weight).tensors["tiles"]
        y = torch.empty(rows, out_features)
        other.wl_linear_tiled(
            *(format_id, x.data_ptr(), 0, in_features, rows, in_features),
            *(tiles.data_ptr(), out_features, None, y.data_ptr(), 0),
        )
        expected = x.double() @ expected_values(weight).double().T
        assert float((y - expected).abs().max() / expected.abs().max()) < 1e-4, format_name

    gate_up = torch.randn(2, 200) * 5
    y = torch.empty(2, 100)
    other.wl_gated_activation(gate_up.data_ptr(), 2, 100, 0, y.data_ptr(), 0)
    torch.testing.assert_close(y, ops.gated_activation(gate_up, "silu"), rtol=1e-5, atol=1e-6)

    context, heads, dim = 70, 4, 64
    pool = torch.randn(5, 2, 2, 16, dim)
    q, out = torch.randn(1, heads, dim), torch.empty(1, heads, dim)
    table, lens = torch.arange(5, dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    keys, values = pool[:, 0], pool[:, 1]
    other.wl_paged_attention(
        *(q.data_ptr(), keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], 16, table.data_ptr(), 5),
        *(lens.data_ptr(), starts.data_ptr(), 1, heads, 2, dim, 0.125, 0, 0.0, out.data_ptr(), 0, 0),
    )
    expected = ops.paged_attention(q, keys, values, table[None], lens, starts, 0.125, None, None, 1, context)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

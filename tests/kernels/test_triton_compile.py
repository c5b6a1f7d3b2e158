"""Every Triton kernel compiles, without a GPU, for sm_80 (A100), sm_89 (L4, 4090), sm_90 (H100, H200)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90"])
def test_compiles(capability, tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    completed = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", capability],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    assert "prefill_attention_kernel" in completed.stdout

"""The HTTP process stays light."""

from __future__ import annotations

import subprocess
import sys


def test_the_app_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, runners.api.app; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

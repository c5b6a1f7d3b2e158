"""The top-level package `kernels` must stay harmless to libraries that look for a distribution of that name."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_package_imports_nothing_and_has_the_version_outside_every_range() -> None:
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    docstring, version = tree.body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(version, ast.Assign)
    assert ast.unparse(version) == "__version__ = '0.0.0'"


def test_no_folder_named_triton() -> None:
    assert not [path for path in (ROOT / "kernels").rglob("triton") if path.is_dir()]


def test_no_project_table() -> None:
    assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pypi_kernels_is_not_installed() -> None:
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    assert "kernels" not in names


def test_transformers_imports_models_beside_it() -> None:
    assert importlib.util.find_spec("kernels") is not None
    code = (
        "import transformers.models.llama.modeling_llama, transformers.utils.import_utils as u; "
        "print(u.is_kernels_available())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("False")

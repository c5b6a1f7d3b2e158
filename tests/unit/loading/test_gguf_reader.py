"""The GGUF reader against files of the `gguf` package, and against files that are wrong in one place."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from runners.errors import StartupError
from runners.loading.ggml_types import GGMLType
from runners.loading.gguf_reader import GGUFFile, is_gguf, open_gguf

HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


def write_file(path: Path, **writer_options: object) -> Path:
    """A file with every metadata type and tensors of several block types."""
    writer = gguf.GGUFWriter(path, "llama", **writer_options)
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"test.{kind}", 7 if kind[0] == "u" else -7)
    writer.add_float32("test.float32", 0.25)
    writer.add_float64("test.float64", -1e300)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "grüße\n\U0001f30a")
    writer.add_array("test.strings", ["a", "", "ü" * 300])
    writer.add_array("test.ints", [-1, 2, 3])
    writer.add_array("test.floats", [0.5, -2.0])
    writer.add_array("test.bools", [True, False])
    rng = np.random.default_rng(0)
    for index, (name, shape) in enumerate({"a": (4, 64), "b": (3,), "c": (2, 3, 32), "d": (8, 32)}.items()):
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if index % 2 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equals_oracle(opened: GGUFFile, paths: list[Path]) -> None:
    readers = [gguf.GGUFReader(path) for path in paths]
    own = {key: field for key, field in readers[0].fields.items() if not key.startswith("GGUF.")}
    assert list(opened.metadata) == list(own)
    for key, field in own.items():
        assert opened.metadata[key] == field.contents(), key
        assert type(opened.metadata[key]) is type(field.contents()), key
    expected = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    assert set(opened.tensors) == set(expected)
    for name, tensor in expected.items():
        info = opened.tensors[name]
        assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert info.ggml_type == int(tensor.tensor_type)
        stored = opened.tensor_bytes(name)
        assert stored.shape == (int(np.prod(info.shape[:-1])), info.row_bytes)
        np.testing.assert_array_equal(stored.reshape(-1), tensor.data.view(np.uint8).reshape(-1))


def test_metadata_and_tensors_equal_the_gguf_package(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf")
    assert is_gguf(path)
    assert_equals_oracle(open_gguf(path), [path])


def test_version_2_and_custom_alignment(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(5, dtype=np.float32))
    writer.add_tensor("b", np.arange(6, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    opened = open_gguf(path)
    assert opened.tensors["b"].offset - opened.tensors["a"].offset == 256
    np.testing.assert_array_equal(opened.tensor_bytes("b")[0].view(np.float32), np.arange(6, dtype=np.float32))


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 5, 6)
    value = struct.pack("<IIQ", 9, 9, 2) + inner + inner
    path = tmp_path / "m.gguf"
    path.write_bytes(HEADER + struct.pack("<Q", 1) + b"k" + value)
    assert open_gguf(path).metadata["k"] == [[5, 6], [5, 6]]


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_whole_model(tmp_path: Path, given: int) -> None:
    write_file(tmp_path / "m.gguf", split_max_tensors=2, small_first_shard=True)
    paths = sorted(tmp_path.glob("m-0000*-of-00003.gguf"))
    assert len(paths) == 3
    opened = open_gguf(paths[given])
    assert opened.path == paths[0]
    assert_equals_oracle(opened, paths)
    assert opened.tensor_path("d") == paths[2]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf", split_max_tensors=2)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(StartupError, match=r"m-00002-of-00002\.gguf: shard 2 of 2 is missing"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf", split_max_tensors=2)
    first, second = sorted(tmp_path.glob("m-0000*.gguf"))
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(StartupError, match=r"renamed\.gguf: split\.count is 2, but the name"):
        open_gguf(renamed)
    second.write_bytes(first.read_bytes())
    with pytest.raises(StartupError, match=r"m-00002-of-00002\.gguf: split\.no 0 of 2 does not fit"):
        open_gguf(first)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf", split_max_tensors=2)
    first, second = sorted(tmp_path.glob("m-0000*.gguf"))
    # Both names have one byte: `c` of the second shard becomes a second `a`.
    second.write_bytes(second.read_bytes().replace(struct.pack("<Q", 1) + b"c", struct.pack("<Q", 1) + b"a"))
    with pytest.raises(StartupError, match=r"00002-of-00002\.gguf: tensor 'a' is already in m-00001"):
        open_gguf(first)


@pytest.mark.parametrize("swapped_magic", [False, True])
def test_big_endian_is_refused_by_name(tmp_path: Path, swapped_magic: bool) -> None:
    path = write_file(tmp_path / "m.gguf", endianess=gguf.GGUFEndian.BIG)
    if swapped_magic:
        path.write_bytes(b"FUGG" + path.read_bytes()[4:])
    assert is_gguf(path)
    with pytest.raises(StartupError, match=r"m\.gguf: at byte \d: big-endian GGUF is not supported"):
        open_gguf(path)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = write_file(tmp_path / "whole.gguf").read_bytes()
    last = max(open_gguf(tmp_path / "whole.gguf").tensors.values(), key=lambda info: info.offset)
    path = tmp_path / "cut.gguf"
    for length in range(0, last.offset + last.nbytes, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(StartupError) as raised:
            open_gguf(path)
        assert str(raised.value).startswith(f"{path}: at byte")
        assert "\n" not in str(raised.value)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def with_tensors(*tensors: bytes, data_bytes: int = 4096) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32 + data_bytes)


U64_MAX = (1 << 64) - 1
BROKEN = {
    "no GGUF": (b"PK\3\4" + b"\0" * 60, "not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
    "version 0": (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "GGUF version 0 is not supported"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, U64_MAX, 0), f"tensor count {U64_MAX} cannot fit"),
    "metadata count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "metadata count 1099511627776 cannot fit"),
    "key length": (HEADER + struct.pack("<Q", U64_MAX) + b"k" * 20, "metadata key claims"),
    "key not UTF-8": (HEADER + string(b"\xff\xfe") + b"\0" * 16, "metadata key is not UTF-8"),
    "value type": (HEADER + string(b"k") + struct.pack("<II", 77, 0), "'k' has unknown value type 77"),
    "bool of 2": (HEADER + string(b"k") + struct.pack("<IB", 7, 2), "'k' holds 2 where a bool"),
    "string length": (HEADER + string(b"k") + struct.pack("<IQ", 8, 1 << 50), "value of 'k' claims"),
    "array count": (HEADER + string(b"k") + struct.pack("<IIQ", 9, 4, U64_MAX), "element count of 'k'"),
    "array of what": (HEADER + string(b"k") + struct.pack("<IIQ", 9, 99, 1), "unknown element type 99"),
    "string array": (
        HEADER + string(b"k") + struct.pack("<IIQ", 9, 8, 2) + string(b"fine") + struct.pack("<Q", 9) + b"short",
        "string 1 of 'k' runs past the end",
    ),
    "string array text": (
        HEADER + string(b"k") + struct.pack("<IIQ", 9, 8, 1) + string(b"\xc3("),
        "string 0 of 'k' is not UTF-8",
    ),
    "deep arrays": (
        HEADER + string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + b"\0" * 64,
        "'k' nests arrays deeper than 4",
    ),
    "alignment": (
        HEADER + string(b"general.alignment") + struct.pack("<II", 4, 24),
        "general.alignment is 24, not a power of two",
    ),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string(b"k") + struct.pack("<II", 4, 1)) * 2,
        "metadata key 'k' appears twice",
    ),
    "no dimensions": (with_tensors(tensor(b"w", ())), "'w' has 0 dimensions"),
    "five dimensions": (with_tensors(tensor(b"w", (1, 1, 1, 1, 1))), "'w' has 5 dimensions"),
    "empty": (with_tensors(tensor(b"w", (0, 4))), "'w' has an empty shape"),
    "huge shape": (with_tensors(tensor(b"w", (1 << 62, 1 << 62))), "'w' needs bytes"),
    "unknown type": (with_tensors(tensor(b"w", (32,), kind=5)), "'w' has unknown type 5"),
    "part of a block": (with_tensors(tensor(b"w", (48,), kind=8)), "rows of 48 are not whole Q8_0 blocks"),
    "unaligned": (with_tensors(tensor(b"w", (8,), offset=8)), "'w' starts at offset 8, not a multiple of 32"),
    "past the end": (with_tensors(tensor(b"w", (32,), offset=4000 * 32)), "'w' needs bytes"),
    "overlap": (with_tensors(tensor(b"v", (32,)), tensor(b"w", (32,), offset=96)), "'v' and 'w' overlap"),
    "name twice": (with_tensors(tensor(b"w", (8,)), tensor(b"w", (8,), offset=32)), "'w' appears twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_wrong_place_is_named(tmp_path: Path, case: str) -> None:
    data, reason = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(StartupError) as raised:
        open_gguf(path)
    assert reason in str(raised.value)
    assert str(raised.value).startswith(f"{path}: at byte")


def test_a_name_from_a_corrupt_file_does_not_flood_the_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(HEADER + string(b"k" * 50_000) + struct.pack("<II", 77, 0))
    with pytest.raises(StartupError) as raised:
        open_gguf(path)
    assert len(str(raised.value)) < 500 + len(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none\.gguf: cannot be opened: No such file"):
        open_gguf(tmp_path / "none.gguf")
    assert not is_gguf(tmp_path / "none.gguf")


def test_views_are_read_only_and_outlive_the_object(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf")
    view = open_gguf(path).tensor_bytes("a")
    assert not view.flags.writeable
    assert view.shape == (4, GGMLType.Q8_0.row_bytes(64))
    assert view.sum() == gguf.GGUFReader(path).get_tensor(0).data.view(np.uint8).sum()


def test_the_reader_is_torch_free() -> None:
    code = "import sys, runners.loading.gguf_reader, runners.loading.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

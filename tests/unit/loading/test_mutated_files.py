"""Seeded mutation fuzz: a damaged model file is read in full or refused with one line, never anything else.

WAVELANE_TEST_FUZZ_FILES sets how many damaged files are tried (500 by default); every one is a function of its number.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType

from runners.errors import StartupError
from runners.loading.checkpoint import open_checkpoint
from runners.loading.gguf_reader import open_gguf
from runners.loading.safetensors_reader import open_safetensors
from tests.support.gguf_writer import write_gguf
from tests.support.tiny_models import tiny_model

NUM_FILES = int(os.environ.get("WAVELANE_TEST_FUZZ_FILES", "500"))
# Many times the whole file, and far below what a corrupt count could ask for.
MAX_TRACED_BYTES = 32 << 20
INTERESTING = (0, 1, 7, 8, 9, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def mutate(data: bytes, header_bytes: int, number: int) -> bytes:
    """Damage number `number` of `data`; three of four edits hit the first `header_bytes`."""
    rng = random.Random(number)
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        limit = min(header_bytes, len(damaged)) if rng.random() < 0.75 else len(damaged)
        place = rng.randrange(max(1, limit))
        kind = rng.randrange(8)
        if kind == 0:
            damaged[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            damaged[place : place + 1] = bytes([damaged[place] ^ (1 << rng.randrange(8))] if damaged else b"x")
        elif kind == 2:
            damaged[place : place + 8] = struct.pack("<Q", rng.choice((*INTERESTING, len(data))))
        elif kind == 3:
            damaged[place : place + 4] = struct.pack("<I", rng.choice((*INTERESTING, len(data))) & 0xFFFFFFFF)
        elif kind == 4:
            del damaged[place:]
        elif kind == 5:
            del damaged[place : place + rng.randrange(1, 40)]
        elif kind == 6:
            damaged[place:place] = rng.randbytes(rng.randrange(1, 40))
        else:
            source = rng.randrange(max(1, limit))
            damaged[place : place + 16] = damaged[source : source + 16]
        damaged = damaged or bytearray(b"\0")
    return bytes(damaged)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {index}" for index in range(160)])
    writer.add_token_types([1] * 160)
    writer.add_float32("test.float", 1.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    types = {"blk.0.ffn_up.weight": GGMLQuantizationType.Q4_1, "blk.0.attn_q.weight": GGMLQuantizationType.F16}
    write_gguf(
        tiny_model("llama", num_hidden_layers=1),
        path,
        matrix_type=GGMLQuantizationType.Q8_0,
        tensor_types=types,
        add_metadata=add_vocabulary,
    )
    return path.read_bytes()


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    tiny_model("qwen3", num_hidden_layers=1, hidden_size=48, vocab_size=40).save_pretrained(folder)
    return folder


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def read_all_of(path: Path) -> None:
    """Every byte of every tensor, and every weight the way the model builder reads it."""
    opened = open_gguf(path) if path.suffix == ".gguf" else open_safetensors(path)
    for name, info in opened.tensors.items():
        stored = opened.tensor_bytes(name)
        assert stored.nbytes == info.nbytes, name
        stored.sum()
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        raw = checkpoint.get(name)
        assert raw.block_bytes().numel() == raw.nbytes


def outcome(read: Callable[[], None], number: int) -> bool:
    """Whether the damaged file could be read; an error must be one readable line, memory must stay bounded."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    refusal = None
    try:
        read()
    except StartupError as error:
        refusal = str(error)
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < MAX_TRACED_BYTES, f"file {number} took {peak - before} bytes"
    if refusal is not None:
        assert "\n" not in refusal, f"file {number}: {refusal}"
        assert len(refusal) < 1000, f"file {number}: {refusal}"
    return refusal is None


@pytest.mark.usefixtures("traced")
def test_damaged_gguf_files(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    header_bytes = min(info.offset for info in open_gguf(path).tensors.values())
    read_all_of(path)
    accepted = 0
    for number in range(NUM_FILES * 7 // 10):
        path.unlink()
        path.write_bytes(mutate(gguf_bytes, header_bytes, number))
        accepted += outcome(lambda: read_all_of(path), number)
    # Damage to tensor data or to a token's text is no error; a reader that refused all would test nothing.
    assert 0 < accepted < NUM_FILES * 7 // 10


@pytest.mark.usefixtures("traced")
def test_damaged_safetensors_files(hf_folder: Path) -> None:
    path = hf_folder / "model.safetensors"
    good = path.read_bytes()
    header_bytes = 8 + struct.unpack_from("<Q", good)[0]
    read_all_of(hf_folder)
    accepted = 0
    for number in range(NUM_FILES * 2 // 10):
        path.unlink()
        path.write_bytes(mutate(good, header_bytes, number))
        accepted += outcome(lambda: read_all_of(hf_folder), number)
    path.write_bytes(good)
    assert 0 < accepted < NUM_FILES * 2 // 10


@pytest.mark.usefixtures("traced")
def test_damaged_configs(hf_folder: Path) -> None:
    path = hf_folder / "config.json"
    good = path.read_bytes()
    accepted = 0
    for number in range(NUM_FILES // 10):
        path.write_bytes(mutate(good, len(good), number))
        accepted += outcome(lambda: read_all_of(hf_folder), number)
    path.write_bytes(good)
    assert accepted < NUM_FILES // 10

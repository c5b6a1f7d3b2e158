"""A random model as a folder is one that the server can load."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.model_shapes import SHAPES
from benchmarks.write_model import write_config, write_tokenizer, write_weights
from runners.loading.checkpoint import open_checkpoint
from runners.models.builder import build_decoder
from runners.text.assets import load_text
from tests.support.forward import logits_in_pieces


def test_the_folder_loads_and_its_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    config = SHAPES["tiny"]
    write_config(config, tmp_path)
    write_tokenizer(config.vocab_size, tmp_path)
    num_bytes = write_weights(config, tmp_path, torch.device("cpu"))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.num_layers == config.num_layers
    decoder = build_decoder(checkpoint, dtype="float32", quantization="none", max_context=64)
    assert decoder.weight_bytes >= num_bytes
    assert torch.isfinite(logits_in_pieces(decoder, [1, 2, 3], [3])).all()
    tokenizer = load_text(tmp_path, None).tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.decode(tokenizer.encode("some text")) == "some text"

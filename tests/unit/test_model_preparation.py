"""What the engine says about the weights that it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from runners.loading.checkpoint import open_checkpoint
from runners.model_preparation import _held_form
from tests.support.packed_checkpoints import write_packed
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("asked", "of_floats", "of_packed"),
    [("auto", "f32", "q4_1"), ("none", "none", "none"), ("q8_0", "q8_0", "q4_1"), ("q4_k", "q4_k", "q4_1")],
)
def test_weights_stored_quantised_are_named_as_they_are(
    tmp_path: Path, asked: str, of_floats: str, of_packed: str
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "floats")
    write_packed("gptq", tmp_path / "packed")
    assert _held_form(asked, open_checkpoint(tmp_path / "floats")) == of_floats
    assert _held_form(asked, open_checkpoint(tmp_path / "packed")) == of_packed

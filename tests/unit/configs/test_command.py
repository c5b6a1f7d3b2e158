"""`python -m configs`: what an operator sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

from configs.__main__ import main
from configs.schema import Profile


def test_show_says_where_values_come_from(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WAVELANE_WAVE__SUB_WAVE", "7")
    assert main(["show", "latency"]) == 0
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "7" in lines["wave.sub_wave"]
    assert lines["wave.sub_wave"].endswith("# WAVELANE_WAVE__SUB_WAVE")
    assert lines["admission.min_batch"].endswith("# preset latency")
    assert lines["wave.max_rows"].endswith("# default")


def test_check_prints_one_line_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WAVELANE_MIX__MOD", "off")
    assert main(["check", "balanced"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "mix.mod: unknown key; did you mean 'mode'? (from WAVELANE_MIX__MOD)\n"


def test_schema_describes_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert "sub_wave" in schema["$defs"]["WaveSection"]["properties"]


def test_reference_is_a_table_of_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| section | field | type | default | meaning |"
    rows = [line.split(" | ") for line in lines[2:]]
    assert {len(row) for row in rows} == {5}
    named = {(row[0].strip("| `"), row[1].strip("`")): row[2:4] for row in rows}
    assert named["wave", "sub_wave"] == ["int > 0", "`32`"]
    assert named["kv.pool", "gpu_fraction"] == ["float > 0, <= 1 or null", "`0.9`"]
    assert named["models[]", "max_context"] == ["`auto` or int > 0", '`"auto"`']
    assert named["fairness", "key_weights"] == ["map to float > 0", "`{}`"]
    assert named["auth.keys[]", "name"] == ["str", "required"]
    fields = {name for section in sections() for name in section.model_fields}
    assert {name for _, name in named} == fields - set(Profile.model_fields) - {"pool"}


def test_every_field_has_a_docstring() -> None:
    """A section's own docstring speaks for it where it stands in the profile."""
    missing = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description and not is_section(field.annotation)
    ]
    assert missing == []
    assert all(section.__doc__ for section in sections())


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def sections() -> list[type[BaseModel]]:
    """The profile and every section below it."""
    found: list[type[BaseModel]] = []
    waiting: list[Any] = [Profile]
    while waiting:
        kind = waiting.pop()
        if not is_section(kind):
            waiting += getattr(kind, "__args__", ())
        elif kind not in found:
            found.append(kind)
            waiting += [field.annotation for field in kind.model_fields.values()]
    return found


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-m", "configs", "reference"]
        ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, b"")

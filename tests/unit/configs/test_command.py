"""`python -m configs`: what an operator sees."""

from __future__ import annotations

import json

import pytest

from configs.__main__ import main


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

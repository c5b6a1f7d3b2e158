"""API keys from profile, file and environment; what a fault says, and what it never says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from configs.__main__ import main
from configs.api_keys import ApiKeysError, hash_key, load_api_keys, make_key
from configs.loader import load_profile
from configs.operation import ApiKeySection, AuthSection


def entry(name: str, key: str, **fields: object) -> dict[str, object]:
    return {"name": name, "sha256": hash_key(key), **fields}


def write(folder: Path, content: object) -> str:
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_three_sources_are_one_list(tmp_path: Path) -> None:
    auth = AuthSection(
        keys=(ApiKeySection(name="a", sha256=hash_key("1")),),
        keys_file=write(tmp_path, [entry("b", "2", admin=True, requests_per_minute=5)]),
        requests_per_minute=60,
        max_concurrency=3,
    )
    keys = load_api_keys(auth, {"WAVELANE_API_KEYS": " three, ,four "})
    assert [key.name for key in keys] == ["a", "b", "env-1", "env-2"]
    assert [key.sha256 for key in keys] == [hash_key(key) for key in ("1", "2", "three", "four")]
    assert [key.requests_per_minute for key in keys] == [60, 5, 60, 60]
    assert {key.max_concurrency for key in keys} == {3}
    assert [key.admin for key in keys] == [False, True, False, False]


def test_no_keys_at_all() -> None:
    assert load_api_keys(AuthSection(), {}) == ()


def test_a_key_stands_there_once(tmp_path: Path) -> None:
    for second in (entry("a", "2"), entry("b", "1")):
        auth = AuthSection(keys_file=write(tmp_path, [entry("a", "1"), second]))
        with pytest.raises(ApiKeysError, match="twice"):
            load_api_keys(auth, {})


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("a: [", "not YAML"),
        ("sk-secret", "valid list"),
        ("- {name: a, key: sk-secret}", "0.sha256"),
        ("- {name: a, sha256: sk-secret}", "0.sha256"),
        ("- {name: a b, sha256: " + "0" * 64 + "}", "0.name"),
    ],
)
def test_a_fault_names_the_place_and_never_the_secret(tmp_path: Path, content: str, fault: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ApiKeysError) as raised:
        load_api_keys(AuthSection(keys_file=str(path)), {})
    assert fault in str(raised.value)
    assert str(path) in str(raised.value)
    assert "sk-secret" not in str(raised.value)


def test_a_missing_file() -> None:
    with pytest.raises(ApiKeysError, match="No such file"):
        load_api_keys(AuthSection(keys_file="/nowhere/keys.yaml"), {})


def test_plain_keys_never_become_part_of_the_profile() -> None:
    resolved = load_profile(env={"WAVELANE_API_KEYS": "sk-secret", "WAVELANE_AUTH__MAX_CONCURRENCY": "2"})
    assert "sk-secret" not in resolved.profile.model_dump_json()
    assert resolved.profile.auth.max_concurrency == 2


def test_entries_by_variable() -> None:
    resolved = load_profile(env={"WAVELANE_AUTH__KEYS": json.dumps([entry("a", "1", admin=True)])})
    assert load_api_keys(resolved.profile.auth, {})[0].admin


def test_the_command_prints_a_key_and_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice", "--admin"]) == 0
    printed = capsys.readouterr().out
    key = printed.splitlines()[0].rpartition(" ")[2]
    assert yaml.safe_load(printed) == [entry("alice", key, admin=True)]
    assert main(["key", "not a name"]) == 1


def test_keys_are_long_and_never_the_same() -> None:
    keys = {make_key("a")[0] for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 43

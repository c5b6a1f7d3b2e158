"""The profile: layers, strictness, and error lines an operator can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.loader import ProfileError, load_profile, preset_names
from configs.schema import Profile, parse_size


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_good(name: str) -> None:
    assert load_profile(name, {}).name == name


def test_balanced_is_the_defaults() -> None:
    assert load_profile("balanced", {}).profile == Profile()


@pytest.mark.parametrize(("has_gpu", "name"), [(True, "balanced"), (False, "cpu")])
def test_preset_without_a_choice_follows_the_device(has_gpu: bool, name: str) -> None:
    assert load_profile(None, {}, has_gpu=has_gpu).name == name


def test_layers_win_in_order(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: latency\nwave:\n  sub_wave: 4\nadmission:\n  min_batch: 3\n")
    resolved = load_profile(str(file), {"WAVELANE_ADMISSION__MIN_BATCH": "5"})
    assert resolved.profile.admission.min_batch == 5
    assert resolved.origin("admission.min_batch") == "WAVELANE_ADMISSION__MIN_BATCH"
    assert resolved.profile.wave.sub_wave == 4
    assert resolved.origin("wave.sub_wave") == f"file {file}"
    assert resolved.profile.admission.cold_window_us == 1000
    assert resolved.origin("admission.cold_window_us") == "preset latency"
    assert resolved.profile.wave.max_rows == 16384
    assert resolved.origin("wave.max_rows") == "default"


def test_profile_variable_chooses() -> None:
    assert load_profile(None, {"WAVELANE_PROFILE": "throughput"}).profile.engine.slots == 256


def test_models_change_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("models:\n- source: /models/a.gguf\n  served_names: [a, b]\n")
    profile = load_profile(str(file), {"WAVELANE_MODELS__0__MAX_CONTEXT": "4096"}).profile
    assert profile.models[0].source == "/models/a.gguf"
    assert profile.models[0].served_names == ("a", "b")
    assert profile.models[0].max_context == 4096


def test_a_later_pool_replaces_an_earlier_one() -> None:
    pool = load_profile("cpu", {"WAVELANE_KV__POOL__BYTES": "2GiB"}).profile.kv.pool
    assert (pool.bytes, pool.sequences) == (2 * 2**30, None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("wave: {sub_wav: 3}", ["wave.sub_wav", "did you mean 'sub_wave'"]),
        ("wawe: {sub_wave: 3}", ["wawe", "did you mean 'wave'"]),
        ("wave: {sub_wave: 0}", ["wave.sub_wave", "greater than 0"]),
        ("wave: {sub_wave: '3'}", ["wave.sub_wave", "valid integer"]),
        ("wave: {enabled: 1}", ["wave.enabled", "valid boolean"]),
        ("fairness: {ageing_s: .inf}", ["fairness.ageing_s", "finite number"]),
        ("kv: {pool: {blocks: 3, sequences: 2}}", ["kv.pool", "exactly one"]),
        ("kv: {pool: {bytes: 8Gb1}}", ["kv.pool.bytes", "not a size"]),
        ("models: [{source: a, sorce: b}]", ["models.0.sorce", "did you mean 'source'"]),
        ("preset: balansed", ["did you mean 'balanced'"]),
        ("- a", ["expected sections"]),
        ("a: [", ["not YAML"]),
    ],
)
def test_a_bad_file_is_named_with_place_and_reason(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ProfileError) as error:
        load_profile(str(file), {})
    for part in parts:
        assert part in str(error.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ProfileError, match="from WAVELANE_WAVE__SUB_WAV"):
        load_profile("balanced", {"WAVELANE_WAVE__SUB_WAV": "3"})


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ProfileError, match="did you mean 'latency'"):
        load_profile("latancy", {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ProfileError, match=r"missing\.yaml"):
        load_profile("missing.yaml", {})


def test_a_profile_survives_json() -> None:
    profile = load_profile("cpu", {"WAVELANE_MODELS__0__SERVED_NAMES": "[a]"}).profile
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * 2**30), ("512MB", 512 * 10**6), ("1.5 KiB", 1536), ("7", 7), (9, 9)]
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


def test_batch_invariance_refuses_what_computes_prompts_together():
    alone = {"wave": {"enabled": False}, "mix": {"mode": "off"}, "kv": {"prefix_cache": False}}
    assert Profile.model_validate({"decode": {"batch_invariant": True}, **alone}).decode.batch_invariant
    for missing in alone:
        sections = {name: section for name, section in alone.items() if name != missing}
        with pytest.raises(ValueError, match=r"decode\.batch_invariant needs wave\.enabled false"):
            Profile.model_validate({"decode": {"batch_invariant": True}, **sections})

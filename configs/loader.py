"""From built-in defaults, a preset, a file and `WAVELANE_*` variables to one checked `Profile`.

Later layers win. Every value keeps where it came from, so that `python -m configs show` can say so.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.api_keys import KEYS_VARIABLE
from configs.schema import ModelSection, Profile

PROFILES_FOLDER = Path(__file__).parent / "profiles"
PROFILE_VARIABLE = "WAVELANE_PROFILE"
PREFIX = "WAVELANE_"
# Variables of this prefix that are no profile fields.
OTHER_VARIABLES = frozenset({PROFILE_VARIABLE, KEYS_VARIABLE, "WAVELANE_CACHE"})
OTHER_PREFIX = "WAVELANE_TEST_"
DEFAULT_ORIGIN = "default"


class ProfileError(ValueError):
    """A profile that cannot be used; one line a fault, each naming where it stands."""


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A checked profile; `origins` maps a dotted field to the layer that set it (absent: the default)."""

    profile: Profile
    name: str
    origins: dict[str, str]

    def origin(self, field: str) -> str:
        return self.origins.get(field, DEFAULT_ORIGIN)


def preset_names() -> list[str]:
    """Names of the presets that ship with Wavelane."""
    return sorted(path.stem for path in PROFILES_FOLDER.glob("*.yaml"))


def load_profile(
    name_or_path: str | None = None, env: Mapping[str, str] | None = None, *, has_gpu: bool | None = None
) -> ResolvedProfile:
    """Resolve a profile.

    `name_or_path` (else `WAVELANE_PROFILE`) is a preset's name or a YAML file; a file may name the preset it builds
    on under the key `preset`. Without either the preset is `balanced`, or `cpu` where there is no GPU
    (`has_gpu` None: look for the driver's device file). Raises ProfileError.
    """
    env = os.environ if env is None else env
    chosen = name_or_path or env.get(PROFILE_VARIABLE) or None
    gpu = _has_gpu() if has_gpu is None else has_gpu
    default_preset = "balanced" if gpu else "cpu"
    layers: list[tuple[str, dict[str, Any]]] = []
    if chosen is None or chosen in preset_names():
        name = chosen or default_preset
        layers.append((f"preset {name}", _read(PROFILES_FOLDER / f"{name}.yaml")))
    else:
        name = chosen
        content = _read(_profile_file(chosen))
        preset = content.pop("preset", default_preset)
        if preset not in preset_names():
            raise ProfileError(f"{chosen}: preset: no preset {preset!r}{_nearest(str(preset), preset_names())}")
        layers.append((f"preset {preset}", _read(PROFILES_FOLDER / f"{preset}.yaml")))
        layers.append((f"file {chosen}", content))
    layers.extend(_environment_layers(env))
    return _merge(name, layers)


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _profile_file(chosen: str) -> Path:
    path = Path(chosen)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        raise ProfileError(f"profile {chosen!r}: no preset of this name{_nearest(chosen, preset_names())}")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ProfileError(f"{path}: expected sections such as `wave:`, found {type(content).__name__}")
    return content


def _environment_layers(env: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One layer a variable: `WAVELANE_WAVE__SUB_WAVE=16`, `WAVELANE_MODELS__0__SOURCE=…`; values are YAML."""
    for variable in sorted(env):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or variable.startswith(OTHER_PREFIX):
            continue
        try:
            value = yaml.safe_load(env[variable])
        except yaml.YAMLError:
            value = env[variable]
        for part in reversed(variable.removeprefix(PREFIX).lower().split("__")):
            value = {int(part) if part.isdigit() else part: value}
        yield variable, value


def _merge(name: str, layers: list[tuple[str, dict[str, Any]]]) -> ResolvedProfile:
    values: dict[Any, Any] = {}
    origins: dict[str, str] = {}
    for origin, content in layers:
        _overlay(values, content, origin, origins, ())
    _check_keys(Profile, values, origins, ())
    try:
        profile = Profile.model_validate(values)
    except ValidationError as error:
        raise ProfileError("\n".join(_describe(fault, origins) for fault in error.errors())) from None
    return ResolvedProfile(profile, name, origins)


def _overlay(
    values: dict[Any, Any], content: dict[Any, Any], origin: str, origins: dict[str, str], path: tuple[str, ...]
) -> None:
    for key, value in content.items():
        here = (*path, str(key))
        if here == ("models",):
            _overlay_models(values, value, origin, origins)
        elif isinstance(value, dict) and here != ("kv", "pool"):
            section = values.setdefault(key, {})
            if not isinstance(section, dict):
                section = values[key] = {}
            _overlay(section, value, origin, origins, here)
        else:
            # kv.pool is one choice of four: a later layer replaces it whole.
            values[key] = value
            origins[".".join(here)] = origin


def _overlay_models(values: dict[Any, Any], content: Any, origin: str, origins: dict[str, str]) -> None:
    """`models` is a list in a file, and `{index: {field: value}}` from a variable; both change field by field."""
    items = dict(enumerate(content)) if isinstance(content, list) else content
    if not isinstance(items, dict) or not all(isinstance(item, dict) for item in items.values()):
        values["models"] = content
        origins["models"] = origin
        return
    models = values.setdefault("models", [])
    for index, item in items.items():
        if not isinstance(index, int) or index > len(models):
            raise ProfileError(f"models.{index}: expected an index from 0 to {len(models)} (from {origin})")
        if index == len(models):
            models.append({})
        _overlay(models[index], item, origin, origins, ("models", str(index)))


def _check_keys(model: type[BaseModel], values: Any, origins: dict[str, str], path: tuple[str, ...]) -> None:
    """Unknown keys are named with the nearest known one, before pydantic reports them less helpfully."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        here = (*path, str(key))
        field = model.model_fields.get(str(key))
        if field is None:
            where = _origin_of(".".join(here), origins)
            raise ProfileError(f"{'.'.join(here)}: unknown key{_nearest(str(key), model.model_fields)}{where}")
        if here == ("models",) and isinstance(value, list):
            for index, item in enumerate(value):
                _check_keys(ModelSection, item, origins, (*here, str(index)))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            _check_keys(field.annotation, value, origins, here)


def _describe(fault: Any, origins: dict[str, str]) -> str:
    # Union members show up as extra location parts such as `literal['auto']`: only field names help a reader.
    parts = [str(part) for part in fault["loc"] if str(part).replace("_", "").isalnum() and "[" not in str(part)]
    parts = [part for part in parts if part not in ("int", "str", "float", "bool", "constrained")]
    field = ".".join(parts)
    message = fault["msg"].removeprefix("Value error, ")
    return f"{field}: {message}, got {fault['input']!r}{_origin_of(field, origins)}"


def _origin_of(field: str, origins: dict[str, str]) -> str:
    for known, origin in origins.items():
        if known == field or known.startswith(field + ".") or field.startswith(known + "."):
            return f" (from {origin})"
    return ""


def _nearest(word: str, known: Any) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known: {', '.join(sorted(known))}"

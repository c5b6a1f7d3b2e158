"""`python -m configs show|check|schema`: look at a profile before it is served."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from configs.loader import ProfileError, ResolvedProfile, load_profile, preset_names
from configs.schema import Profile


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m configs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("show", "print the resolved profile, and where each value came from"),
        ("check", "say whether a profile can be used"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "profile",
            nargs="?",
            help=f"a YAML file or a preset ({', '.join(preset_names())}); default: WAVELANE_PROFILE, else by device",
        )
    commands.add_parser("schema", help="print the JSON Schema of a profile")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        print(json.dumps(Profile.model_json_schema(), indent=2))
        return 0
    try:
        resolved = load_profile(options.profile)
    except ProfileError as error:
        print(error, file=sys.stderr)
        return 1
    if options.command == "check":
        print(f"{resolved.name}: good")
    else:
        print(f"# profile {resolved.name}")
        print("\n".join(_lines(resolved)))
    return 0


def _lines(resolved: ResolvedProfile) -> Iterator[str]:
    fields = list(_fields(resolved.profile, ()))
    width = max(len(f"{path}: {value}") for path, value in fields) + 2
    for path, value in fields:
        yield f"{path}: {value}".ljust(width) + f"# {resolved.origin(path)}"


def _fields(section: BaseModel, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in type(section).model_fields:
        value: Any = getattr(section, name)
        here = (*path, name)
        if here == ("kv", "pool"):
            yield ".".join(here), json.dumps(value.model_dump(exclude_none=True))
        elif isinstance(value, BaseModel):
            yield from _fields(value, here)
        elif here == ("models",):
            for index, model in enumerate(value):
                yield from _fields(model, (*here, str(index)))
        else:
            yield ".".join(here), json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())

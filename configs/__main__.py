"""`python -m configs show|check|schema|reference|key`: look at a profile before it is served, make an API key."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

import yaml
from pydantic import ValidationError

from configs.api_keys import make_key
from configs.listing import settings_of
from configs.loader import ProfileError, ResolvedProfile, load_profile, preset_names
from configs.reference import reference
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
    commands.add_parser("reference", help="print every field of a profile as a Markdown table")
    command = commands.add_parser("key", help="make an API key, and its entry for `auth.keys` or `auth.keys_file`")
    command.add_argument("name", help="who will use it")
    command.add_argument("--admin", action="store_true")
    options = parser.parse_args(arguments)
    if options.command == "key":
        return _print_key(options.name, admin=options.admin)
    if options.command == "schema":
        print(json.dumps(Profile.model_json_schema(), indent=2))
        return 0
    if options.command == "reference":
        print(reference())
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


def _print_key(name: str, *, admin: bool) -> int:
    try:
        key, entry = make_key(name, admin=admin)
    except ValidationError as error:
        print(f"{name!r}: {error.errors()[0]['msg']}", file=sys.stderr)
        return 1
    print(f"# the key, shown only now: {key}")
    print(yaml.safe_dump([entry.model_dump(exclude_defaults=True)], sort_keys=False), end="")
    return 0


def _lines(resolved: ResolvedProfile) -> Iterator[str]:
    settings = list(settings_of(resolved))
    width = max(len(f"{setting.path}: {setting.value}") for setting in settings) + 2
    for setting in settings:
        yield f"{setting.path}: {setting.value}".ljust(width) + f"# {setting.origin}"


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; what is left must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)

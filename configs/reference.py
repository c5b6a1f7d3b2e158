"""Every field of the profile as a Markdown table, in the words that stand beside it in the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from configs.schema import Profile

_PLAIN_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "null": "null"}
_LOWER_BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}"}
_UPPER_BOUNDS = {"maximum": "<= {}", "exclusiveMaximum": "< {}"}


def reference() -> str:
    """The table: section, field, type, default, and what it means."""
    schema = Profile.model_json_schema()
    definitions = schema["$defs"]
    rows = ["| section | field | type | default | meaning |", "|---|---|---|---|---|"]
    for section, name, field in _fields(schema, definitions, "", {}):
        cells = [f"`{section}`", f"`{name}`", _type(field, definitions), _default(field), field.get("description", "")]
        rows.append("| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def _fields(
    schema: dict[str, Any], definitions: dict[str, Any], section: str, defaults: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Section, name and schema of each field; a section's own fields take its place, a list of sections has both."""
    for name, plain in schema["properties"].items():
        field = plain | {"default": defaults[name]} if name in defaults else plain
        path = f"{section}.{name}" if section else name
        entry = field.get("items", field)
        if "$ref" not in entry:
            yield section, name, field
            continue
        if "items" in field and section:
            yield section, name, field
        is_list = "items" in field
        inner = {} if is_list else field.get("default", {})  # what the section above puts in, as for kv.pool
        yield from _fields(_resolved(entry, definitions), definitions, path + ("[]" if is_list else ""), inner)


def _resolved(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = definitions[field["$ref"].rpartition("/")[2]]
    return section


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "$ref" in field:
        return "section"
    if "anyOf" in field:
        return " or ".join(_type(kind, definitions) for kind in field["anyOf"])
    for key in ("enum", "const"):
        if key in field:
            values = field[key] if key == "enum" else [field[key]]
            return ", ".join(f"`{value}`" for value in values)
    if field["type"] == "array":
        return f"list of {_type(field['items'], definitions)}"
    if field["type"] == "object":
        return f"map to {_type(field['additionalProperties'], definitions)}"
    bounds = [
        text.format(field[key]) for key, text in (_LOWER_BOUNDS | _UPPER_BOUNDS).items() if field.get(key) is not None
    ]
    return " ".join([_PLAIN_TYPES[field["type"]], ", ".join(bounds)]).strip()


def _default(field: dict[str, Any]) -> str:
    # A default made by a factory is an empty collection; the JSON Schema leaves it out.
    if "default" not in field:
        return "`{}`" if field.get("type") == "object" else "required"
    return f"`{json.dumps(field['default'], ensure_ascii=False)}`"

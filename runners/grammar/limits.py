"""What is kept from the grammar library: its native code overruns its stack, and with it the process, on some inputs.

Found by trying, version 1.9.1: an integer range at the lower end of 64 bits, and chains of 20,000 rules or references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_GRAMMAR_CHARS = 500_000
MAX_LINES = 1000
MAX_DEPTH = 64
MAX_REFERENCES = 500
_MAX_NUMBER = 2**62
_NUMERIC_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why."""


def check_size(grammar: str) -> None:
    """GrammarError for a grammar text that is too long or has too many rules."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
    if grammar.count("\n") > MAX_LINES:
        raise GrammarError(f"at most {MAX_LINES} lines are allowed")


def check_notation(text: str) -> None:
    """GrammarError for a client's grammar that is too long, or that embeds schemas past the checks on schemas."""
    check_size(text)
    if "%json" in text:
        raise GrammarError("%json is not allowed inside a grammar: send the schema as guided_json")


def check_schema(schema: Mapping[str, Any]) -> None:
    """GrammarError for a schema that is nested too deep, refers too often or to itself only, or has bounds outside 62
    bits."""
    num_references = 0
    pending: list[tuple[Any, int]] = [(schema, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"nested more than {MAX_DEPTH} deep")
        if isinstance(value, list):
            pending += [(item, depth + 1) for item in value if isinstance(item, list | Mapping)]
        elif isinstance(value, Mapping):
            if "$ref" in value:
                num_references += 1
                _check_reference(value, schema)
            for keyword in _NUMERIC_KEYWORDS:
                number = value.get(keyword)
                if isinstance(number, int | float) and not abs(number) < _MAX_NUMBER:
                    raise GrammarError(f"{keyword} must be between -2^62 and 2^62")
            pending += [(item, depth + 1) for item in value.values() if isinstance(item, list | Mapping)]
    if num_references > MAX_REFERENCES:
        raise GrammarError(f"{num_references} references, at most {MAX_REFERENCES} are allowed")


def _check_reference(value: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """GrammarError where references lead back to `value` with nothing between them: no text could ever match."""
    target: Any = value
    for _ in range(MAX_REFERENCES):
        if not isinstance(target, Mapping) or not isinstance(target.get("$ref"), str):
            return
        target = _referred(target["$ref"], schema)
        if target is value:
            raise GrammarError(f"the reference {value['$ref']!r} leads back to itself")


def _referred(reference: str, schema: Mapping[str, Any]) -> Any:
    """What a JSON pointer (`#/$defs/node`) names inside `schema`; None for whatever else (the library judges it)."""
    if not reference.startswith("#"):
        return None
    target: Any = schema
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target

"""Grammars in llguidance's own form: made from what a client sends, and checked before anything reaches the engine.

A grammar travels to the engine as one string (`SamplingParams.grammar`): a Lark grammar, or llguidance's JSON around a
schema. Neither torch nor a tokenizer is needed to make or check one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance

from runners.grammar.limits import GrammarError, check_notation, check_schema, check_size

# Separators as Python's json.dumps writes them and no free whitespace: a model that has lost its way would otherwise
# fill its token budget with blanks. oneOf is read as anyOf: exclusion has no context-free form.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}

_MAX_INTEGER = 2**53 - 1
# Numbers of a range up to this size get nine decimals; without an end to them a model may write digits for ever.
_SMALL = 1e6
_FINEST = 1e-9
_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS_OF_SCHEMAS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def from_json_schema(schema: Mapping[str, Any] | str) -> str:
    """The grammar of all JSON texts that a schema (a dict or its text) allows. GrammarError otherwise."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise GrammarError("the schema must be an object")
    followed = json.dumps(with_options(schema))
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(followed)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as it is followed: integers bounded, and our choice of separators for llguidance to find in it.

    GrammarError for one that llguidance must not see.
    """
    check_schema(schema)
    return {**_bounded(schema), "x-guidance": _JSON_OPTIONS}


def _bounded(schema: Any) -> Any:
    """The schema with an end to the digits of numbers: a model that has lost its way would write them for ever.

    Integers without bounds are kept to what all JSON readers agree on (RFC 8259, section 6).
    """
    if not isinstance(schema, Mapping):
        return schema
    bounded = dict(schema)
    for keyword in _MAPS_OF_SCHEMAS & schema.keys():
        if isinstance(schema[keyword], Mapping):
            bounded[keyword] = {name: _bounded(part) for name, part in schema[keyword].items()}
    for keyword in _LISTS_OF_SCHEMAS & schema.keys():
        if isinstance(schema[keyword], list):
            bounded[keyword] = [_bounded(part) for part in schema[keyword]]
    for keyword in _SCHEMAS & schema.keys():
        bounded[keyword] = _bounded(schema[keyword])
    kinds = schema.get("type")
    lower, upper = _range(schema)
    if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds):
        if lower == -math.inf:
            bounded["minimum"] = min(-_MAX_INTEGER, upper)
        if upper == math.inf:
            bounded["maximum"] = max(_MAX_INTEGER, lower)
    if kinds == "number" and "multipleOf" not in schema and abs(lower) <= _SMALL and abs(upper) <= _SMALL:
        bounded["multipleOf"] = _FINEST
    return bounded


def _range(schema: Mapping[str, Any]) -> tuple[float, float]:
    """Lower and upper bound of a number, infinite where there is none; NaN for what is none, llguidance will say so."""
    lower = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    upper = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    if isinstance(lower, int | float) and isinstance(upper, int | float):
        return lower, upper
    return math.nan, math.nan


def from_regex(pattern: str) -> str:
    """All texts that match the whole pattern (the syntax of Rust's regex crate; digits and words are ASCII's)."""
    return f"start: /{llguidance.regex_to_lark(pattern, 'dw')}/" if pattern else 'start: ""'


def from_choices(choices: Sequence[str]) -> str:
    """Exactly one of the texts. GrammarError without any, or with an empty one."""
    if not choices or not all(choices):
        raise GrammarError("a choice needs at least one text, and none may be empty")
    return "start: " + " | ".join(quoted(choice) for choice in choices)


def from_notation(text: str) -> str:
    """A grammar that the client wrote, in Lark's notation (`start: …`) or GBNF (`root ::= …`). GrammarError."""
    check_notation(text)
    try:
        grammar: str = llguidance.grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None
    return grammar


def quoted(text: str) -> str:
    """`text` as a string of Lark's notation."""
    return json.dumps(text)


def check(grammar: str) -> None:
    """GrammarError, with the library's reason, for a grammar that does not compile. Results are remembered."""
    check_size(grammar)
    fault = _fault(grammar)
    if fault:
        raise GrammarError(fault)


@lru_cache(maxsize=256)
def _fault(grammar: str) -> str:
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else ""

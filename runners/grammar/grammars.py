"""Grammars in llguidance's own form: made from what a client sends, and checked before anything reaches the engine.

A grammar travels to the engine as one string (`SamplingParams.grammar`): a Lark grammar, or llguidance's JSON around a
schema. Neither torch nor a tokenizer is needed to make or check one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance

MAX_GRAMMAR_CHARS = 1_000_000

# Separators as Python's json.dumps writes them and no free whitespace: a model that has lost its way would otherwise
# fill its token budget with blanks. oneOf is read as anyOf: exclusion has no context-free form.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class GrammarError(ValueError):
    """The grammar cannot be used; the message is the library's reason."""


def from_json_schema(schema: Mapping[str, Any] | str) -> str:
    """The grammar of all JSON texts that a schema (a dict or its text) allows. GrammarError otherwise."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise GrammarError("the schema must be an object")
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema)))
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with our choice of separators, as llguidance reads it off the schema itself."""
    return {**schema, "x-guidance": _JSON_OPTIONS}


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
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
    fault = _fault(grammar)
    if fault:
        raise GrammarError(fault)


@lru_cache(maxsize=256)
def _fault(grammar: str) -> str:
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_error else ""

"""The OpenAPI document, made from the protocol's own types: what it says is what the parser takes."""

from __future__ import annotations

from typing import Any

import msgspec

from runners.api import openapi_answers as answers
from runners.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from runners.api.validation import MAX_CHOICES_PER_PROMPT, MAX_LOGPROBS, MAX_SESSION_ID_CHARS, MAX_STOPS

_REFERENCE = "#/components/schemas/{name}"
_REQUESTS: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)

# What `validation` checks beside the types.
_RANGES: dict[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 0},
    "max_output_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES_PER_PROMPT},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES_PER_PROMPT},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "session_id": {"minLength": 1, "maxLength": MAX_SESSION_ID_CHARS},
    "stop": {"maxItems": MAX_STOPS},
    "encoding_format": {"enum": ["float", "base64", None]},
}
_REQUIRED = {
    "CompletionRequest": ["prompt"],
    "ChatCompletionRequest": ["messages"],
    "ResponsesRequest": ["input"],
    "EmbeddingRequest": ["input"],
    "DetokenizeRequest": ["tokens"],
}
_CLIENT_FAULTS = ("400", "401", "403", "404", "405", "408", "409", "413", "429", "431")
_SERVER_FAULTS = ("500", "503", "504")


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of every route of ours."""
    _, schemas = msgspec.json.schema_components(_REQUESTS, ref_template=_REFERENCE)
    for name, schema in schemas.items():
        _refine(name, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Wavelane", "version": version, "description": "OpenAI-compatible LLM server."},
        "paths": _paths(),
        "components": {
            "schemas": {**schemas, **answers.SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _refine(name: str, schema: dict[str, Any]) -> None:
    for field, property_schema in schema.get("properties", {}).items():
        property_schema.pop("default", None)
        _restrict(property_schema, _RANGES.get(field, {}))
    if name == "CompletionRequest":
        _restrict(schema["properties"]["logprobs"], {"minimum": 0, "maximum": MAX_LOGPROBS})
    if name in _REQUIRED:
        schema["required"] = _REQUIRED[name]


def _restrict(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """Put limits on the alternative that they apply to: numbers, strings, arrays, never null."""
    for alternative in schema.get("anyOf", [schema]):
        kind = alternative.get("type")
        is_number = kind in ("integer", "number")
        for limit, value in limits.items():
            fits = {"enum": kind == "string", "minLength": kind == "string", "maxLength": kind == "string"}
            if fits.get(limit, kind == "array" if limit == "maxItems" else is_number):
                alternative[limit] = [entry for entry in value if entry is not None] if limit == "enum" else value


def _paths() -> dict[str, Any]:
    model_id = _path_parameter("model_id")
    session_id = _path_parameter("session_id")
    return {
        "/v1/completions": {"post": _post("CompletionRequest", "Completion", stream="CompletionChunk")},
        "/v1/chat/completions": {"post": _post("ChatCompletionRequest", "ChatCompletion", stream="ChatChunk")},
        "/v1/responses": {"post": _post("ResponsesRequest", "Response", stream="ResponseEvent")},
        "/v1/embeddings": {"post": _post("EmbeddingRequest", "EmbeddingList")},
        "/v1/models": {"get": _get("ModelList")},
        "/v1/models/{model_id}": {"get": _get("Model", model_id)},
        "/v1/sessions": {"get": _get("SessionList")},
        "/v1/sessions/{session_id}": {
            "get": _get("Session", session_id),
            "delete": _operation("Deleted", parameters=[session_id]),
        },
        "/tokenize": {"post": _post("TokenizeRequest", "Tokens")},
        "/detokenize": {"post": _post("DetokenizeRequest", "Text")},
        "/health": {"get": _get("Health", extra={"503": _json("The engine takes no requests.", "Health")})},
        "/version": {"get": _get("Version")},
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _json(description: str, schema: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name=schema)}}},
    }


def _operation(
    answer: str, *, parameters: list[dict[str, Any]] | None = None, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    faults = {status: _json("Error", "Error") for status in (*_CLIENT_FAULTS, *_SERVER_FAULTS)}
    operation: dict[str, Any] = {"responses": {"200": _json("OK", answer), **faults, **(extra or {})}}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _get(answer: str, *parameters: dict[str, Any], extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return _operation(answer, parameters=list(parameters), extra=extra)


def _post(request: str, answer: str, *, stream: str | None = None) -> dict[str, Any]:
    operation = _operation(answer)
    reference = {"$ref": _REFERENCE.format(name=request)}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if stream is not None:
        # The schema is that of one event; the data of a stream's last one is [DONE].
        operation["responses"]["200"]["content"]["text/event-stream"] = {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {
                    "event": {"type": "string"},
                    "data": {"type": "string", "description": f"A {stream}, as JSON."},
                },
            }
        }
    return operation

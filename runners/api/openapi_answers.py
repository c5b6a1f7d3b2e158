"""JSON schemas of what the server answers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(optional: dict[str, Schema] | None = None, **required: Schema) -> Schema:
    """An object; `required` properties are always there."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _is(text: str) -> Schema:
    return {"const": text}


FINISH_REASON = _or_null({"enum": ["stop", "length", "tool_calls"]})
TOKEN_IDS = _list(INTEGER)
USAGE = _object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
)
CALL = _object(id=STRING, type=_is("function"), function=_object(name=STRING, arguments=STRING))
CHAT_LOGPROB = _object(
    token=STRING,
    logprob=NUMBER,
    bytes=_or_null(TOKEN_IDS),
    top_logprobs=_list(_object(token=STRING, logprob=NUMBER, bytes=_or_null(TOKEN_IDS))),
)
MODEL = _object(id=STRING, object=_is("model"), created=INTEGER, owned_by=STRING, max_model_len=INTEGER)
SESSION = _object(
    id=STRING,
    object=_is("session"),
    tokens=INTEGER,
    blocks=INTEGER,
    turns=INTEGER,
    busy=BOOLEAN,
    idle_s=NUMBER,
    expires_in_s=_or_null(NUMBER),
)
_PROMPT_LOGPROBS = _or_null(_list(_or_null({"type": "object"})))


def _envelope(kind: str, choice: Schema, *, usage: Schema = USAGE, **more: Schema) -> Schema:
    optional = {"prompt_token_ids": TOKEN_IDS, "prompt_logprobs": _PROMPT_LOGPROBS, **more}
    return _object(
        optional, id=STRING, object=_is(kind), created=INTEGER, model=STRING, choices=_list(choice), usage=usage
    )


SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=STRING, type=STRING, param=_or_null(STRING), code=_or_null(STRING))),
    "Completion": _envelope(
        "text_completion",
        _object(
            {"token_ids": TOKEN_IDS, "prompt_token_ids": TOKEN_IDS, "prompt_logprobs": _PROMPT_LOGPROBS},
            index=INTEGER,
            text=STRING,
            logprobs=_or_null(
                _object(
                    tokens=_list(STRING),
                    token_logprobs=_list(_or_null(NUMBER)),
                    top_logprobs=_list(_or_null({"type": "object"})),
                    text_offset=_list(INTEGER),
                )
            ),
            finish_reason=FINISH_REASON,
        ),
    ),
    "ChatCompletion": _envelope(
        "chat.completion",
        _object(
            {"token_ids": TOKEN_IDS},
            index=INTEGER,
            message=_object(
                {"reasoning_content": STRING, "tool_calls": _list(CALL), "refusal": _or_null(STRING)},
                role=_is("assistant"),
                content=_or_null(STRING),
            ),
            logprobs=_or_null(_object(content=_list(CHAT_LOGPROB), refusal={"type": "null"})),
            finish_reason=FINISH_REASON,
        ),
    ),
    "Response": _object(
        id=STRING,
        object=_is("response"),
        created_at=INTEGER,
        status={"enum": ["completed", "incomplete"]},
        model=STRING,
        output=_list(_object(type={"enum": ["message", "function_call", "reasoning"]}, id=STRING, status=STRING)),
        usage=_object(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
    ),
    "EmbeddingList": _object(
        object=_is("list"),
        model=STRING,
        data=_list(
            _object(object=_is("embedding"), index=INTEGER, embedding={"anyOf": [_list(NUMBER), STRING]}),
        ),
        usage=_object(prompt_tokens=INTEGER, total_tokens=INTEGER),
    ),
    "Model": MODEL,
    "ModelList": _object(object=_is("list"), data=_list(MODEL)),
    "Session": SESSION,
    "SessionList": _object(object=_is("list"), data=_list(SESSION)),
    "Deleted": _object(id=STRING, object=_is("session.deleted"), deleted=BOOLEAN),
    "Tokens": _object({"token_strs": _list(STRING)}, count=INTEGER, max_model_len=INTEGER, tokens=TOKEN_IDS),
    "Text": _object(prompt=STRING),
    "Health": _object(status=STRING, ready=BOOLEAN),
    "Version": _object(version=STRING),
}

"""From the request's prompt or messages to token ids; long texts are tokenised off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from runners.api.protocol import ChatFields
from runners.api.tools import checked_tools
from runners.api.validation import check_token_ids, unsupported
from runners.errors import ContextLengthError, InvalidRequestError
from runners.text.assets import TextAssets
from runners.text.tokenizer import Tokenizer
from runners.text.told_tools import tell_tools

# A text of this length takes 0.3 ms (SmolLM2's vocabulary, two cores); the way to a thread and back costs 0.06 ms.
INLINE_CHARS = 1000

_RESERVED_TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids that are at least one, and the text they came from where the client sent text."""

    ids: list[int]
    text: str | None = None


class TextThreads:
    """Threads for tokenising and rendering; few, so that they never crowd out the event loop or the engine."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")

    async def run(self, chars: int, function: Callable[[], ResultT]) -> ResultT:
        """`function()`, here when `chars` characters are few, else in a thread."""
        if chars <= INLINE_CHARS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def require_text(assets: TextAssets | None, param: str) -> tuple[TextAssets, Tokenizer]:
    """The assets and their tokenizer; InvalidRequestError for a model that runs on token ids alone."""
    if assets is None or assets.tokenizer is None:
        raise InvalidRequestError(
            "This model has no tokenizer: send the prompt as token ids to /v1/completions.",
            param=param,
            code="no_tokenizer",
        )
    return assets, assets.tokenizer


def split_prompts(
    prompt: str | list[int | str | list[int]] | None, max_prompts: int, param: str = "prompt"
) -> list[str | list[int]]:
    """The four forms as a list of texts or id lists, none of them empty. InvalidRequestError otherwise."""
    if prompt is None:
        raise InvalidRequestError(f"Missing required field: '{param}'.", param=param)
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        kinds = set(map(type, prompt))
        if len(kinds) > 1:
            raise InvalidRequestError(
                f"Invalid value for '{param}': a list must hold only texts, only ids, or only lists of ids.",
                param=param,
            )
        prompts = [prompt] if kinds == {int} else prompt
    if not prompts or not all(prompts):
        raise InvalidRequestError(f"Invalid value for '{param}': a prompt must not be empty.", param=param)
    if len(prompts) > max_prompts:
        raise InvalidRequestError(
            f"Invalid value for '{param}': {len(prompts)} prompts, this server takes at most {max_prompts} in one "
            "request. Please send several requests.",
            param=param,
        )
    return prompts


def _check_chars(text: str, tokenizer: Tokenizer, max_context: int, param: str) -> None:
    """ContextLengthError when already the characters are too many: megabytes would keep a thread for a minute."""
    if len(text) <= max_context:
        return
    fewest = tokenizer.fewest_tokens(len(text))
    if fewest > max_context:
        raise ContextLengthError(
            f"This model's maximum context length is {max_context} tokens. However, the prompt has {len(text)} "
            f"characters, which are at least {fewest} tokens. Please shorten the prompt.",
            param=param,
        )


def check_text_length(chars: int, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    """InvalidRequestError when so many characters are over `max_tokens` tokens whatever they are."""
    fewest = 0 if chars <= max_tokens else tokenizer.fewest_tokens(chars)
    if fewest > max_tokens:
        raise InvalidRequestError(
            f"Invalid value for '{param}': {chars} characters are at least {fewest} tokens, at most {max_tokens} are "
            "allowed here.",
            param=param,
        )


async def encode_prompts(
    prompts: list[str | list[int]],
    assets: TextAssets | None,
    threads: TextThreads,
    *,
    vocab_size: int,
    max_context: int,
    add_special_tokens: bool,
    param: str = "prompt",
) -> list[Prompt]:
    """Each prompt as ids, checked against the vocabulary. ContextLengthError for a text that is far too long."""
    if isinstance(prompts[0], str):
        _, tokenizer = require_text(assets, param)
        texts = [str(prompt) for prompt in prompts]

        def encode() -> list[list[int]]:
            for text in texts:
                _check_chars(text, tokenizer, max_context, param)
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        encoded = await threads.run(sum(map(len, texts)), encode)
        result = [Prompt(ids, text) for ids, text in zip(encoded, texts, strict=True)]
    else:
        result = [Prompt(ids) for ids in prompts if isinstance(ids, list)]
    for prompt in result:
        if not prompt.ids:
            raise InvalidRequestError(f"Invalid value for '{param}': the text has no tokens.", param=param)
        check_token_ids(prompt.ids, vocab_size, param)
    return result


async def render_chat(
    request: ChatFields,
    assets: TextAssets | None,
    threads: TextThreads,
    *,
    with_tools: bool,
    max_context: int | None = None,
) -> Prompt:
    """Messages through the model's template, as ids with exactly one BOS where the model wants one.

    InvalidRequestError for messages of the wrong shape, for contradicting switches, and with the template's own reason.
    ContextLengthError where the text is far over `max_context`.
    """
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequestError(
            "'add_generation_prompt' and 'continue_final_message' cannot both be true.", param="continue_final_message"
        )
    opens_turn = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    messages = [_message(index, message) for index, message in enumerate(request.messages or ())]
    if not messages:
        raise InvalidRequestError("Missing required field: 'messages' must not be empty.", param="messages")
    assets, tokenizer = require_text(assets, "messages")
    variables = request.chat_template_kwargs or {}
    if reserved := _RESERVED_TEMPLATE_NAMES.intersection(variables):
        raise InvalidRequestError(
            f"Invalid value for 'chat_template_kwargs': {min(reserved)} has a field of its own.",
            param="chat_template_kwargs",
        )
    tools = checked_tools(request.tools) if with_tools else None

    template = assets.chat_template
    shown = tell_tools(messages, tools or (), template.traits(tools=bool(tools)))

    def render() -> Prompt:
        text = template.render(
            shown, tools=tools, add_generation_prompt=opens_turn, continue_final_message=continues, **variables
        )
        if max_context is not None:
            _check_chars(text, tokenizer, max_context, "messages")
        if request.add_special_tokens is False:
            return Prompt(tokenizer.encode(text, add_special_tokens=False), text)
        return Prompt(tokenizer.encode_chat(text), text)

    return await threads.run(sum(len(str(message.get("content"))) for message in messages), render)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """One message with its shape checked; the template's side brings content and calls into the template's form."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise _message_error(index, "needs a 'role' that is a string")
    if isinstance(content, list):
        for part in content:
            _check_part(index, part)
    elif not isinstance(content, str) and not (content is None and calls):
        raise _message_error(index, "needs 'content' that is a string or a list of text parts")
    if calls is not None:
        _check_tool_calls(index, calls)
    # "developer" is OpenAI's newer name for "system"; templates know only the old one.
    return {**message, "role": "system"} if role == "developer" else message


def _message_error(index: int, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for 'messages': message {index} {fault}.", param="messages")


def _check_part(index: int, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise unsupported("messages", f"Content part of type {kind[:40]!r} (message {index})")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise _message_error(index, "has a content part that is not {'type': 'text', 'text': …}")


def _check_tool_calls(index: int, calls: Any) -> None:
    if not isinstance(calls, list):
        raise _message_error(index, "has 'tool_calls' that is no list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _message_error(index, "has a tool call without a function name")

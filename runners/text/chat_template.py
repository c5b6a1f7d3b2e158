"""Chat templates: OpenAI messages in, the model's own prompt text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from runners.errors import InvalidRequestError, StartupError
from runners.text.chat_messages import Message, prepare_messages
from runners.text.jinja_sandbox import ChatEnvironment, TemplateReasonError, render_within_limits
from runners.text.template_traits import TemplateTraits, read_traits

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models that bring no template of their own."""

# Appended to the message to continue; the text in front of it is kept. The space shows whether a template trims.
_CONTINUATION_MARK = "\u2063message continues here\u2063 "


class ChatTemplate:
    """The templates of one model: a text, or several by name (`default`, `tool_use`, `rag`).

    `special_tokens` are the variables such as `bos_token` that templates print. Raises StartupError for a template
    that does not parse.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "chat template",
    ) -> None:
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        if not named:
            raise StartupError(f"{where}: no template")
        environment = ChatEnvironment()
        self._special_tokens = dict(special_tokens or {})
        self._templates: dict[str, tuple[jinja2.Template, TemplateTraits]] = {}
        for name, source in named.items():
            try:
                compiled = environment.compile_chat_template(source)
                self._templates[name] = compiled, read_traits(environment.parse(source), source)
            except jinja2.TemplateSyntaxError as error:
                raise StartupError(f"{where}: template {name!r}, line {error.lineno}: {error.message}") from error
            except (jinja2.TemplateError, RecursionError) as error:
                raise StartupError(f"{where}: template {name!r}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text. `kwargs` are further template variables (`chat_template_kwargs`).

        `add_generation_prompt` is on unless the final message is continued; both together are an error. Raises
        InvalidRequestError with the template's own words where it refuses the conversation.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message cannot both be true",
                param="continue_final_message",
            )
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        template, traits = self._select(tools, documents)
        prepared = prepare_messages(messages, traits)
        if continue_final_message:
            _mark_continuation(prepared[-1])
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
        }
        text = _render(template, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def traits(self, *, tools: bool) -> TemplateTraits:
        """Traits of the template that `render` would use, with or without tools."""
        return self._select(tools, None)[1]

    def _select(self, tools: object, documents: object) -> tuple[jinja2.Template, TemplateTraits]:
        names = [name for name, wanted in (("tool_use", tools), ("rag", documents)) if wanted]
        for name in [*names, "default"]:
            if name in self._templates:
                return self._templates[name]
        return next(iter(self._templates.values()))


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        return render_within_limits(template, variables)
    except TemplateReasonError as error:
        raise InvalidRequestError(str(error), param="messages") from error
    except RecursionError as error:
        raise InvalidRequestError("the chat template recurses without end", param="messages") from error
    except Exception as error:
        # Any Python error can come out of a template that indexes or adds what a message does not have.
        raise InvalidRequestError(f"the chat template cannot render these messages: {error}", param="messages") from (
            error
        )


def _mark_continuation(message: Message) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUATION_MARK
        return
    for part in reversed(content if isinstance(content, list) else []):
        if part.get("type") == "text":
            part["text"] += _CONTINUATION_MARK
            return
    raise InvalidRequestError("the final message has no text to continue", param="messages")


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUATION_MARK.rstrip())
    if position < 0:
        raise InvalidRequestError(
            "the chat template does not show the final message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    kept = text[:position]
    return kept if text.startswith(_CONTINUATION_MARK, position) else kept.rstrip()

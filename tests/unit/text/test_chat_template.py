"""Chat templates: equal to transformers on published formats, OpenAI's message forms, refusals, limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from runners.errors import InvalidRequestError, StartupError
from runners.text import jinja_sandbox
from runners.text.chat_template import CHATML_TEMPLATE, ChatTemplate

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a town, <today> & 'tomorrow'",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"town": "Zürich", "days": 2}},
}
TOOL_TURNS = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"celsius": 7}'},
]
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([{"role": "user", "content": " Hi <there> "}], {}),
    "no_prompt": ([{"role": "user", "content": "Hi"}], {"add_generation_prompt": False}),
    "system": ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}], {}),
    "turns": (
        [
            {"role": "system", "content": "Be brief. /no_think"},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
            {"role": "user", "content": "日本 🙂"},
        ],
        {},
    ),
    "two_users": ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], {}),
    "unknown_role": ([{"role": "user", "content": "a"}, {"role": "narrator", "content": "b"}], {}),
    "tools": ([{"role": "user", "content": "Weather in Zürich?"}], {"tools": [WEATHER]}),
    "tool_turns": (TOOL_TURNS, {"tools": [WEATHER]}),
    "tool_answer": ([*TOOL_TURNS, {"role": "assistant", "content": "7 °C"}], {"tools": [WEATHER]}),
    "documents": ([{"role": "user", "content": "a"}], {"documents": [{"title": "t", "text": "one"}, {"text": "two"}]}),
    "variables": ([{"role": "user", "content": "a"}], {"enable_thinking": False, "date_string": "1 May 2026"}),
    "reasoning": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "because"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d", "reasoning_content": "thus"},
        ],
        {"add_generation_prompt": False},
    ),
    "continued": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is "}],
        {"continue_final_message": True},
    ),
}


@pytest.fixture(scope="module")
def oracle() -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>", eos_token="</s>"
    )


def test_enough_templates() -> None:
    assert len(TEMPLATES) >= 20


def outcome(render: Callable[[], str]) -> tuple[str, str]:
    """("text", rendered) or ("refusal", reason)."""
    try:
        return "text", render()
    except InvalidRequestError as refusal:
        return "refusal", refusal.message
    except Exception as refusal:
        return "refusal", str(refusal)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(oracle: Any, name: str, case: str) -> None:
    messages, options = CASES[case]
    opens_turn = options.get("add_generation_prompt", not options.get("continue_final_message", False))
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    kind, expected = outcome(
        lambda: oracle.apply_chat_template(
            messages,
            chat_template=TEMPLATES[name],
            tokenize=False,
            **{**options, "add_generation_prompt": opens_turn},
        )
    )
    our_kind, ours = outcome(lambda: template.render(messages, **options))
    assert our_kind == kind, (ours, expected)
    if kind == "text":
        assert ours == expected
    elif "continue_final_message" not in options:
        # The reason reaches the client in the template's own words.
        assert expected in ours


WRITES_TOOL_CALLS = [
    "deepseek_v3",
    "hermes_tools",
    "llama31_tools",
    "mistral_v3_tools",
    "qwen25_tools",
    "qwen3_thinking",
]
REFUSES_TOOL_TURNS = ["command_r", "gemma2", "gemma3", "llama2", "mistral_v1"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_null_content_with_tool_calls(name: str) -> None:
    """As OpenAI clients send it back: null content, arguments as a string."""
    call = {**CALL, "function": {"name": "get_weather", "arguments": '{"town": "Zürich"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
    ]
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    kind, text = outcome(lambda: template.render(messages, tools=[WEATHER]))
    assert kind == ("refusal" if name in REFUSES_TOOL_TURNS else "text"), text
    assert "None" not in text
    assert ('{"town": "Zürich"}' in text) == (name in WRITES_TOOL_CALLS)


def test_arguments_read_as_object_and_as_text() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"b":1, "a":"é"}'}}]},
    ]
    argument = "messages[0].tool_calls[0].function.arguments"
    for expression, expected in {
        f"{argument} | tojson": '{"b": 1, "a": "é"}',
        f"{argument}.b": "1",
        argument: '{"b":1, "a":"é"}',
        f"'x' + {argument} + 'y'": 'x{"b":1, "a":"é"}y',
        f"'x' ~ {argument}": 'x{"b":1, "a":"é"}',
        f"{argument} is mapping": "True",
    }.items():
        assert ChatTemplate("{{ " + expression + " }}").render(messages) == expected


def test_null_content_reaches_a_template_that_asks_for_it() -> None:
    messages = [{"role": "assistant", "content": None}]
    assert ChatTemplate("{{ 'none' if messages[0]['content'] is none else 'text' }}").render(messages) == "none"
    assert ChatTemplate("[{{ messages[0]['content'] }}]").render(messages) == "[]"


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    flat = ChatTemplate("{{ messages[0].content }}")
    assert flat.render([{"role": "user", "content": parts}]) == "one\ntwo"
    looping = ChatTemplate("{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}")
    assert looping.render([{"role": "user", "content": parts}]) == "<one><two>"
    assert looping.render([{"role": "user", "content": "one"}]) == "<one>"
    both = ChatTemplate(TEMPLATES["gemma3"], SPECIAL_TOKENS)
    assert "onetwo" in both.render([{"role": "user", "content": parts}])
    assert "plain" in both.render([{"role": "user", "content": "plain"}])
    with pytest.raises(InvalidRequestError, match="image_url") as caught:
        flat.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert caught.value.param == "messages[0].content[0]"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    ChatTemplate(TEMPLATES["gemma3"]).render(messages, continue_final_message=True)
    assert json.dumps(messages) == before


def test_refusal_in_the_templates_words() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(TEMPLATES["gemma2"], SPECIAL_TOKENS).render([{"role": "system", "content": "x"}])
    assert caught.value.message == "System role not supported"
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_generation_prompt_and_continuation() -> None:
    template = ChatTemplate(CHATML_TEMPLATE)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The  "}]
    with pytest.raises(InvalidRequestError) as caught:
        template.render(messages, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    continued = template.render(messages, continue_final_message=True)
    assert continued == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nThe  "
    trimming = ChatTemplate("{{ messages[-1].content | trim }}<end>")
    assert trimming.render(messages, continue_final_message=True) == "The"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template.render(parts, continue_final_message=True).endswith("a\nb")


@pytest.mark.parametrize("content", [None, []])
def test_nothing_to_continue(content: object) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{% if messages[0].content is none %}{% endif %}x").render(
            [{"role": "assistant", "content": content}], continue_final_message=True
        )


def test_final_message_not_shown() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ChatTemplate("x").render([{"role": "assistant", "content": "a"}], continue_final_message=True)


def test_named_templates() -> None:
    template = ChatTemplate({"default": "default", "tool_use": "tools", "rag": "documents"})
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages) == "default"
    assert template.render(messages, tools=[WEATHER]) == "tools"
    assert template.render(messages, documents=[{"text": "a"}]) == "documents"
    assert ChatTemplate({"other": "only"}).render(messages) == "only"


def test_messages_must_not_be_empty() -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate("x").render([])


def test_template_that_does_not_parse() -> None:
    with pytest.raises(StartupError, match=r"^model\.gguf: template 'default', line 2: ") as caught:
        ChatTemplate("a\n{% if %}", where="model.gguf")
    assert "\n" not in str(caught.value)


def test_client_variables_do_not_replace_messages() -> None:
    template = ChatTemplate("{{ messages | length }}{{ add_generation_prompt }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "a"}], bos_token="<b>") == "1True<b>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0].update(role='system') }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_sandbox(source: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    try:
        text = ChatTemplate(source).render(messages)
    except InvalidRequestError:
        text = ""
    assert text == ""
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__.os.popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.mro() }}{{ dict.__base__ }}",
        "{{ range.__self__ }}{{ range(1).__class__ }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now.__code__.co_consts }}",
        "{{ strftime_now.__closure__ }}{{ raise_exception.__code__ }}",
        "{{ ''['__class__'] }}{{ ''|attr('__class__') }}{{ ''|attr('__cl' ~ 'ass__') }}",
        "{{ ''|attr(['__class', '__']|join) }}{{ ''[['__class', '__']|join] }}",
        r"{{ ''['\x5f\x5fclass\x5f\x5f'] }}{{ ''|attr('\x5f\x5fclass\x5f\x5f') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ '{x.__class__}'.format_map({'x': messages}) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        "{% set f = '{0.__class__}'|attr('format') %}{{ f(messages) }}",
        "{{ ['{0.__class__}']|map('format', messages)|list }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ messages|map('attr', '__class__')|list }}",
        "{{ messages|selectattr('__class__')|map(attribute='__class__.__name__')|list }}",
        "{{ messages|groupby('__class__') }}{{ messages|sort(attribute='__class__.__name__') }}",
        "{{ messages|sum(attribute='__class__') }}{{ messages|unique(attribute='__class__')|map('string')|join }}",
        "{% macro f() %}{{ caller.__globals__ }}{% endmacro %}{{ f._func.__globals__ }}{{ f.__call__.__func__ }}",
        "{% for a in messages %}{{ loop.__init__.__globals__ }}{{ loop._iterator }}{% endfor %}",
        "{{ self._TemplateReference__context }}{{ self.__dict__ }}",
        "{{ (messages|map('upper')).gi_frame.f_builtins }}",
        "{{ (messages|map('upper')).gi_code }}{{ (1).__class__ }}{{ true.__class__.__base__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.environ }}",
        "{% extends '/etc/passwd' %}",
        "{% from 'os' import environ %}{{ environ }}",
        "{{ config }}{{ request }}{{ g }}{{ environment }}{{ context }}{{ __builtins__ }}{{ __import__('os') }}",
        "{{ get_flashed_messages.__globals__ }}{{ url_for.__globals__ }}",
        "{% set messages[0].role = 'system' %}{% do messages.append(1) %}",
        "{{ messages[0].pop('role') }}{{ messages.clear() }}{{ messages[0].setdefault('x', 1) }}",
    ],
)
def test_known_escapes(source: str) -> None:
    """Ways out of sandboxes that have been published: each ends in an error or in nothing, never in an object."""
    messages = [{"role": "user", "content": "a"}]
    try:
        text = ChatTemplate(source).render(messages)
    except (InvalidRequestError, StartupError):
        text = ""
    for trace in (
        "<class",
        "<function",
        "<module",
        "<built-in",
        "<bound",
        "<frame",
        "<code",
        " at 0x",
        "root:",
        "uid=",
    ):
        assert trace not in text
    assert "__builtins__" not in text
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_limits(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_STEPS", 20_000)
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}])


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="longer than"):
        ChatTemplate("{% for i in range(5000) %}{% endfor %}").render([{"role": "user", "content": "a"}])


def test_oversized_template() -> None:
    with pytest.raises(StartupError, match="longer than"):
        ChatTemplate("x" * (jinja_sandbox.MAX_TEMPLATE_CHARS + 1))


def test_long_conversation_is_within_limits() -> None:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 50} for turn in range(2001)]
    assert len(ChatTemplate(TEMPLATES["qwen3_thinking"]).render(messages)) > 2001 * 250

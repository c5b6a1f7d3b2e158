"""Chat over HTTP: the template, its switches, tools in the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.http_server import Server, in_process
from tests.support.scripted_engine import Reply
from tests.support.tiny_tokenizers import BOS, CHAT_TEMPLATE, EOS, write_byte_level

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def _reply(server: Server) -> None:
    server.script(Reply(list(b"fine")))


async def rendered(server: Server, **body: object) -> str:
    """The prompt as the engine got it, special tokens as text."""
    tokens = (await server.answer("/tokenize", **body))["tokens"]
    text: str = (await server.answer("/detokenize", tokens=tokens))["prompt"]
    return text


@pytest.mark.parametrize(("template", "add_bos"), [(CHAT_TEMPLATE, True), ("<s>" + CHAT_TEMPLATE, True)])
@pytest.mark.parametrize("add_special_tokens", [None, True])
async def test_exactly_one_bos(tmp_path: Path, template: str, add_bos: bool, add_special_tokens: bool | None) -> None:
    folder = write_byte_level(tmp_path, chat_template=template, add_bos=add_bos)
    async with in_process(folder, eos_token_ids=[EOS]) as server:
        server.script(Reply([65]))
        answer = await server.answer(
            CHAT, messages=MESSAGES, max_tokens=1, return_token_ids=True, add_special_tokens=add_special_tokens
        )
        assert answer["prompt_token_ids"].count(BOS) == 1
        assert answer["prompt_token_ids"][0] == BOS
        tokens = (await server.answer("/tokenize", messages=MESSAGES))["tokens"]
        assert tokens == answer["prompt_token_ids"]


async def test_null_content_with_tool_calls(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert (await server.answer(CHAT, messages=messages, max_tokens=4))["usage"]["completion_tokens"] == 4
    if server.engine is not None:
        text = await rendered(server, messages=messages)
        assert '<call>add {"a": 1}<|im_end|>\n<|im_start|>tool\n2<|im_end|>' in text


async def test_a_template_that_refuses_a_role(server: Server) -> None:
    server.needs_script("a template that refuses a role")
    error = await server.refusal(CHAT, messages=[{"role": "narrator", "content": "x"}])
    assert "Role narrator is not for this model." in error["message"]
    assert error["param"] == "messages"


async def test_continue_final_message(server: Server) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    error = await server.refusal(CHAT, messages=messages, add_generation_prompt=True, continue_final_message=True)
    assert error["param"] == "continue_final_message"
    text = await rendered(server, messages=messages, continue_final_message=True)
    assert text.endswith("The answer is")
    assert (await server.answer(CHAT, messages=messages, continue_final_message=True, max_tokens=2))["choices"]
    opened = await rendered(server, messages=MESSAGES)
    closed = await rendered(server, messages=MESSAGES, add_generation_prompt=False)
    assert opened.startswith(closed)
    assert len(opened) > len(closed)


async def test_text_parts_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    split = await rendered(server, messages=[{"role": "user", "content": parts}])
    assert split == await rendered(server, messages=[{"role": "user", "content": "one\ntwo"}])


async def test_tools_reach_the_template(server: Server) -> None:
    server.needs_script("a template that shows tools plainly")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert "<tool>add" in await rendered(server, messages=MESSAGES, tools=tools)
    with_tools = await server.answer(CHAT, messages=MESSAGES, tools=tools, tool_choice="auto", max_tokens=1)
    without = await server.answer(CHAT, messages=MESSAGES, tools=tools, tool_choice="none", max_tokens=1)
    assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]
    assert (await server.refusal(CHAT, messages=MESSAGES, tools=[{"type": "function"}]))["param"] == "tools"


async def test_template_variables(server: Server) -> None:
    for name in ("messages", "tools", "self", "add_generation_prompt"):
        error = await server.refusal(CHAT, messages=MESSAGES, chat_template_kwargs={name: []})
        assert error["param"] == "chat_template_kwargs"
    assert await server.answer(CHAT, messages=MESSAGES, chat_template_kwargs={"thinking": False}, max_tokens=1)


async def test_a_model_without_a_tokenizer() -> None:
    async with in_process(None, eos_token_ids=[2]) as server:
        server.script(Reply([7, 8, 2]))
        answer = await server.complete([5, 6], max_tokens=9, return_token_ids=True, logprobs=0)
        choice = answer["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [7, 8, 2], "stop")
        assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8", "token_id:2"]
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            (CHAT, {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": [5], "stop": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            assert (await server.refusal(path, **body))["code"] == "no_tokenizer"


async def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    async with in_process(write_byte_level(tmp_path, chat_template=None), eos_token_ids=[EOS]) as server:
        server.script(Reply([65]))
        text = await rendered(server, messages=MESSAGES)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

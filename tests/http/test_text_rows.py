"""Text over HTTP: characters, spaces, stop strings, end markers, streamed against whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.http_server import Server, finish_reasons, text_of
from tests.support.scripted_engine import Reply
from tests.support.tiny_tokenizers import EOS, IM_END, PARIS

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def ids_of(text: str) -> list[int]:
    """Ids of the byte-level test tokenizer, byte by byte."""
    return list(text.encode())


async def both_texts(server: Server, prompt: str | Sequence[int], **fields: object) -> tuple[str, str]:
    """The same greedy completion as one answer and as joined deltas."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, **fields}
    whole = (await server.answer(COMPLETIONS, **body))["choices"][0]["text"]
    return whole, text_of(await server.events(COMPLETIONS, **body))


async def test_a_prompt_that_ends_inside_a_character(server: Server) -> None:
    ids = await server.tokenize("The price is €")
    if len(ids) < 2 or len(await server.tokenize("€")) < 3:
        pytest.skip("this vocabulary has a token for the whole character")
    server.script(Reply([0xAC, *ids_of("5 only")]))
    whole, streamed = await both_texts(server, ids[:-1], max_tokens=7)
    assert streamed == whole
    assert "price" not in streamed
    if server.engine is not None:
        assert streamed.endswith("5 only")
        assert streamed.count("€") <= 1


@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
async def test_stray_bytes_become_replacement_characters(server: Server, tokens_per_chunk: int) -> None:
    server.needs_script("bytes that are no UTF-8")
    server.script(Reply([0x80, 0xE2, ord("a"), 0xFF, 0xF0, 0x9F], tokens_per_chunk))
    whole, streamed = await both_texts(server, "x", max_tokens=6)
    assert streamed == whole
    assert "a" in whole
    assert "\ufffd" in whole


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 5])
async def test_korean_and_chinese_stream_as_whole(server: Server, tokens_per_chunk: int) -> None:
    text = "안녕하세요, 你好 😀!"
    server.script(Reply(ids_of(text), tokens_per_chunk))
    whole, streamed = await both_texts(server, "한국어로 인사해 주세요:", max_tokens=len(ids_of(text)))
    assert streamed == whole
    if server.engine is not None:
        assert whole == text


async def test_every_delta_is_whole_characters(server: Server) -> None:
    text = "a€b한c😀"
    server.script(Reply(ids_of(text)))
    events = await server.events(COMPLETIONS, prompt="x", max_tokens=len(ids_of(text)), temperature=0)
    deltas = [event["choices"][0]["text"] for event in events]
    if server.engine is not None:
        assert deltas == ["a", "", "", "€", "b", "", "", "한", "c", "", "", "", "😀"]
    assert all("\ufffd" not in delta for delta in deltas[:-1])


async def test_sentencepiece_spaces_are_kept(sentencepiece_server: Server) -> None:
    server = sentencepiece_server
    server.script(Reply([260, 261, 262]))  # ▁one ▁two ▁three
    whole, streamed = await both_texts(server, [1, 260], max_tokens=3)
    assert whole == streamed == " one two three"
    answer = await server.answer("/detokenize", tokens=[260, 260, 261, 262])
    assert answer["prompt"].endswith(whole)


async def test_special_tokens_keep_the_space_that_follows(server: Server) -> None:
    text = "one<|im_end|> two <|im_start|>  three"
    ids = await server.tokenize(text)
    answer = await server.answer("/detokenize", tokens=ids)
    assert answer["prompt"] == text
    assert await server.tokenize(answer["prompt"]) == ids
    if server.engine is not None:
        assert IM_END in ids


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_inside_a_token(server: Server, include: bool) -> None:
    server.script(Reply([PARIS, *ids_of(" is a city")]))
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8, "logit_bias": {}}
    stop = "ari"
    if server.engine is None:
        reply = (await server.answer(COMPLETIONS, **body))["choices"][0]["text"]
        stop = reply[len(reply) // 2 : len(reply) // 2 + 3]
        expected = reply[: reply.index(stop)]
    else:
        expected = "P"
    if include:
        expected += stop
    body |= {"stop": stop, "include_stop_str_in_output": include}
    choice = (await server.answer(COMPLETIONS, **body))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    events = await server.events(COMPLETIONS, **body)
    assert (text_of(events), finish_reasons(events)) == (expected, ["stop"])


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 100])
@pytest.mark.parametrize("stop", [["END"], ["zzz", "ND of"], ["D"]])
async def test_nothing_after_the_stop_string(server: Server, tokens_per_chunk: int, stop: list[str]) -> None:
    server.needs_script("several tokens in one step")
    server.script(Reply(ids_of("before END of it, and more"), tokens_per_chunk))
    body = {"prompt": "x", "max_tokens": 26, "stop": stop, "return_token_ids": True, "logprobs": 1}
    expected = "before END of it"[: "before END of it".index(stop[-1])]
    kept = len(expected) + len(stop[-1])
    answer = await server.answer(COMPLETIONS, **body)
    events = await server.events(COMPLETIONS, **body, stream_options={"include_usage": True})
    choice = answer["choices"][0]
    assert choice["text"] == text_of(events) == expected
    assert choice["token_ids"] == ids_of("before END of it")[:kept]
    assert [i for event in events[:-1] for i in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert len(choice["logprobs"]["tokens"]) == len(expected)
    assert answer["usage"] == events[-1]["usage"]
    assert answer["usage"]["completion_tokens"] == kept
    assert server.engine is not None
    assert [submission.kept_tokens for submission in server.engine.submissions] == [kept, kept]


async def test_a_held_back_prefix_is_not_lost(server: Server) -> None:
    server.needs_script("a reply that ends inside a possible stop string")
    server.script(Reply(ids_of("so STO")))
    whole, streamed = await both_texts(server, "x", max_tokens=6, stop="STOP")
    assert whole == streamed == "so STO"


async def test_finish_reasons_are_openais(server: Server) -> None:
    server.script(Reply([*ids_of("hello"), EOS]))
    for fields in ({"max_tokens": 2}, {"max_tokens": 30}, {"max_tokens": 30, "stop": "l"}):
        body = {"prompt": "Say hello.", "temperature": 0, **fields}
        whole = (await server.answer(COMPLETIONS, **body))["choices"][0]["finish_reason"]
        assert whole in ("stop", "length")
        assert finish_reasons(await server.events(COMPLETIONS, **body)) == [whole]
        if server.engine is not None:
            assert whole == ("length" if fields == {"max_tokens": 2} else "stop")


async def test_an_end_marker_that_only_the_tokenizer_names(server: Server) -> None:
    server.needs_script("an engine that does not know its end marker")
    assert server.engine is not None
    server.engine.models[0].eos_token_ids.clear()
    server.script(Reply([*ids_of("yes"), EOS, *ids_of("never")]))
    choice = (await server.complete("x", max_tokens=20, skip_special_tokens=False))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")
    choice = (await server.complete("x", max_tokens=5, ignore_eos=True))["choices"][0]
    assert choice["text"] == "yesn"


@pytest.mark.parametrize("end_marker", [EOS, IM_END])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
async def test_end_markers_stop_and_stay_out_of_the_text(
    server: Server, end_marker: int, skip_special_tokens: bool
) -> None:
    server.needs_script("a chosen end marker")
    assert server.engine is not None
    server.engine.models[0].eos_token_ids[:] = [EOS, IM_END]
    server.script(Reply([*ids_of("yes"), end_marker, *ids_of("never")]))
    body = {"max_tokens": 20, "return_token_ids": True, "skip_special_tokens": skip_special_tokens}
    answer = await server.complete("x", **body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")
    assert choice["token_ids"] == [*ids_of("yes"), end_marker]
    assert answer["usage"]["completion_tokens"] == 4
    assert text_of(await server.events(COMPLETIONS, prompt="x", **body)) == "yes"
    whole = await server.answer(CHAT, messages=[{"role": "user", "content": "x"}], **body)
    assert whole["choices"][0]["message"]["content"] == "yes"


async def test_ignore_eos_goes_past_the_end_marker(server: Server) -> None:
    server.script(Reply([ord("a"), EOS] * 50))
    body = {"prompt": [5] * 1000, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    answer = await server.answer(COMPLETIONS, **body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] == 64
    if server.engine is not None:
        assert answer["choices"][0]["text"] == "a" * 32
    assert len(await server.events(COMPLETIONS, **body)) == 64


async def test_stop_token_ids_end_the_reply(server: Server) -> None:
    server.needs_script("a chosen id")
    server.script(Reply([*ids_of("ab"), ord("!"), *ids_of("cd")]))
    body = {"prompt": "x", "max_tokens": 9, "stop_token_ids": [ord("!")], "return_token_ids": True}
    choice = (await server.answer(COMPLETIONS, **body))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("ab", "stop", ids_of("ab!"))
    choice = (await server.answer(COMPLETIONS, **body, include_stop_str_in_output=True))["choices"][0]
    assert choice["text"] == "ab!"


async def test_min_tokens_holds_stop_strings_back(server: Server) -> None:
    server.needs_script("a chosen reply")
    server.script(Reply(ids_of("..a.b.c")))
    body = {"max_tokens": 7, "min_tokens": 3, "stop": "."}
    choice = (await server.complete("x", **body))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("..a", "stop")

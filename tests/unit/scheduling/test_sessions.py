"""A conversation keeps its KV, and the next turn computes only what is new."""

from __future__ import annotations

import pytest

from runners.errors import ConflictError, NotFoundError
from runners.request import FinishReason
from tests.support.scenario import Scenario


def turn(session_id: str = "s", *, append: bool = False) -> dict[str, object]:
    return {"session_id": session_id, "append_to_session": append}


def computed(scenario: Scenario, request_id: str) -> list[tuple[int, int]]:
    """(start, end) of each piece of the request's prompt that was computed."""
    return [
        (chunk.start, chunk.end) for plan in scenario.plans() for chunk in plan.chunks if chunk.request_id == request_id
    ]


def session_tokens(scenario: Scenario, session_id: str = "s") -> int:
    return scenario.cache.sessions.get(session_id, scenario.clock.now()).num_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_completion_turn_appends_and_computes_the_last_token_and_its_own(depth, prefix_cache):
    scenario = Scenario(depth=depth, kv={"prefix_cache": prefix_cache})
    scenario.request("one", 20, 5, message=turn())
    scenario.request("two", 7, 5, at=100, message=turn(append=True))
    scenario.prompts["two"] = [0] * (25 + 7)  # its positions count from the session's start
    scenario.run()
    assert computed(scenario, "two") == [(24, 32)], "the last sampled token's KV, and the seven new ones"
    assert scenario.cached_tokens("two") == 24
    assert scenario.tokens("two") == scenario.expected("two", 5)
    assert session_tokens(scenario) == 37


def test_a_chat_turn_keeps_the_longest_common_prefix():
    scenario = Scenario()
    prompt = scenario.request("one", 20, 5, message=turn())
    history = prompt + scenario.expected("one", 5)
    scenario.request("two", [*history, 7, 8, 9], 5, at=100, message=turn())
    scenario.request("three", [*history[:22], 1, 2, 3], 5, at=200, message=turn())
    scenario.run()
    assert computed(scenario, "two") == [(24, 28)]
    assert computed(scenario, "three") == [(22, 25)]
    assert session_tokens(scenario) == 30


def test_an_unchanged_history_computes_its_last_token_again():
    scenario = Scenario()
    prompt = scenario.request("one", 20, 1, message=turn())
    scenario.request("two", prompt, 3, at=100, message=turn())
    scenario.run()
    assert computed(scenario, "two") == [(19, 20)]
    assert scenario.tokens("two") == scenario.expected("two", 3)


def test_a_diverging_history_never_overwrites_blocks_that_others_may_find():
    scenario = Scenario(kv={"prefix_cache": True})
    prompt = scenario.request("one", 40, 5, message=turn())
    scenario.request("two", [*prompt[:20], *range(900, 915)], 5, at=100, message=turn())
    scenario.request("other", [*prompt, 5], 5, at=200)
    scenario.run()
    assert computed(scenario, "two") == [(16, 35)], "from the start of the block that diverges"
    assert scenario.cached_tokens("other") == 32
    assert scenario.tokens("other") == scenario.expected("other", 5)


def test_a_session_in_use_refuses_a_second_request():
    scenario = Scenario()
    scenario.request("one", 20, 20, message=turn())
    scenario.request("two", 20, 5, at=20, message=turn())
    scenario.request("other", 20, 5, at=20, message=turn("t"))
    scenario.run()
    assert scenario.end("two").code == "session_busy"
    assert scenario.tokens("one") == scenario.expected("one", 20)
    assert scenario.end("other") is FinishReason.LENGTH


@pytest.mark.parametrize("at", [101, 107, 113, 130])
def test_after_an_abort_the_session_stands_at_its_last_whole_turn(at):
    scenario = Scenario()
    prompt = scenario.request("one", 20, 5, message=turn())
    history = prompt + scenario.expected("one", 5)
    scenario.request("two", [*history, 7, 8, 9], 30, at=100, message=turn())
    scenario.abort("two", at=at)
    scenario.run(until=190)
    assert session_tokens(scenario) == 25
    scenario.request("again", [*history, 7, 8, 9], 4, at=200, message=turn())
    scenario.run()
    assert computed(scenario, "again") == [(25, 28)], "the void turn had computed the KV of the last token"
    assert scenario.tokens("again") == scenario.expected("again", 4)
    assert session_tokens(scenario) == 32


def test_a_first_turn_that_is_aborted_leaves_no_session():
    scenario = Scenario(blocks=50)
    scenario.request("one", 20, 30, message=turn())
    scenario.abort("one", at=20)
    scenario.run()
    assert len(scenario.cache.sessions) == 0
    assert scenario.cache.num_available == 50


def test_a_refused_first_turn_leaves_no_session():
    scenario = Scenario(max_context=30)
    scenario.request("one", 20, 30, message=turn())
    scenario.run()
    assert scenario.end("one").code == "context_length_exceeded"
    assert len(scenario.cache.sessions) == 0


def test_the_context_counts_what_the_session_holds():
    scenario = Scenario(max_context=40)
    scenario.request("one", 20, 5, message=turn())
    scenario.request("two", 10, 10, at=100, message=turn(append=True))
    scenario.run()
    error = scenario.end("two")
    assert error.code == "context_length_exceeded"
    assert "35 in the prompt, the session included" in error.message
    assert session_tokens(scenario) == 25


def test_max_tokens_0_fills_the_session_and_returns_nothing():
    scenario = Scenario()
    scenario.request("fill", 50, 0, message=turn())
    scenario.request("ask", 5, 3, at=100, message=turn(append=True))
    scenario.prompts["ask"] = [0] * 55
    scenario.run()
    assert scenario.tokens("fill") == []
    assert scenario.end("fill") is FinishReason.LENGTH
    assert computed(scenario, "ask") == [(50, 55)]
    assert scenario.tokens("ask") == scenario.expected("ask", 3)


def test_a_stop_string_keeps_only_what_was_kept():
    scenario = Scenario()
    scenario.request("one", 20, 50, message=turn())
    scenario.finish("one", 3, at=40)
    scenario.request("two", 4, 5, at=100, message=turn(append=True))
    scenario.prompts["two"] = [0] * 27
    scenario.run()
    assert computed(scenario, "two") == [(23, 27)]
    assert scenario.tokens("two") == scenario.expected("two", 5)


def test_a_stop_string_found_after_the_end_still_trims():
    scenario = Scenario()
    scenario.request("one", 20, 6, message=turn())
    scenario.finish("one", 2, at=90)
    scenario.request("two", 4, 5, at=100, message=turn(append=True))
    scenario.prompts["two"] = [0] * 26
    scenario.run()
    assert computed(scenario, "two") == [(22, 26)]


def test_time_to_live_counts_from_the_last_use():
    scenario = Scenario(kv={"session_ttl_s": 1.0}, blocks=50)
    scenario.request("one", 20, 5, message=turn())
    scenario.request("two", 4, 5, at=900, message=turn(append=True))
    scenario.prompts["two"] = [0] * 29
    scenario.request("late", 4, 1, at=1850)
    scenario.request("later", 4, 1, at=2500)
    scenario.run(until=1851)
    assert [info.session_id for info in scenario.cache.sessions.list(1.9)] == ["s"], "last used at about 0.93 s"
    scenario.run()
    assert scenario.cache.sessions.list(scenario.clock.now()) == []
    assert scenario.cache.num_available == 50


def test_list_get_delete():
    scenario = Scenario(blocks=50)
    scenario.request("one", 20, 5, message=turn("a"))
    scenario.request("two", 20, 40, message=turn("b"))
    scenario.run(until=60)
    sessions = scenario.cache.sessions
    infos = {info.session_id: info for info in sessions.list(0.06)}
    assert (infos["a"].busy, infos["a"].num_tokens, infos["a"].num_blocks, infos["a"].num_turns) == (False, 25, 2, 1)
    assert infos["b"].busy
    assert infos["b"].expires_at is None
    with pytest.raises(ConflictError):
        sessions.delete("b", 0.06)
    sessions.delete("a", 0.06)
    with pytest.raises(NotFoundError):
        sessions.get("a", 0.06)
    with pytest.raises(NotFoundError):
        sessions.delete("a", 0.06)
    scenario.run()
    sessions.delete("b", 0.06)
    assert scenario.cache.num_available == 50


def test_an_expired_session_is_gone_also_when_nothing_else_happens():
    scenario = Scenario(kv={"session_ttl_s": 5.0}, blocks=50)
    scenario.request("one", 20, 5, message=turn("a"))
    scenario.run()
    assert [info.session_id for info in scenario.cache.sessions.list(4.0)] == ["a"]
    with pytest.raises(NotFoundError):
        scenario.cache.sessions.get("a", 6.0)
    assert scenario.cache.num_available == 50


def test_a_turn_that_wakes_a_sleeping_engine_does_not_revive_an_expired_session():
    scenario = Scenario(kv={"session_ttl_s": 5.0}, blocks=50)
    scenario.request("one", 20, 5, message=turn())
    scenario.request("late", 7, 5, at=6000, message=turn(append=True))
    scenario.run()
    assert computed(scenario, "late") == [(0, 7)], "a session of its own, not the old one's 25 tokens"
    assert session_tokens(scenario) == 12


def test_idle_sessions_give_way_when_nothing_else_is_left_and_keep_their_tokens():
    scenario = Scenario(blocks=8)
    for number in range(4):  # two blocks each: the pool is full of idle sessions
        scenario.request(f"fill{number}", 20, 5, at=100 * number, message=turn(f"s{number}"))
    scenario.request("big", 60, 3, at=500)
    scenario.request("back", 4, 3, at=600, message=turn("s0", append=True))
    scenario.prompts["back"] = [0] * 29
    scenario.run()
    assert scenario.tokens("big") == scenario.expected("big", 3)
    blocks = {info.session_id: info.num_blocks for info in scenario.cache.sessions.list(scenario.clock.now())}
    assert blocks["s3"] == 2, "the most recently used one keeps its blocks"
    assert computed(scenario, "back") == [(0, 29)], "the oldest gave its blocks, not its tokens"
    assert scenario.tokens("back") == scenario.expected("back", 3)


def test_blocks_shared_by_two_idle_sessions_do_not_block_a_turn_under_a_lowered_quota():
    scenario = Scenario(blocks=8, kv={"prefix_cache": True})
    beginning = scenario.request("one", 20, 1, message=turn("s"))
    scenario.request("two", [*beginning[:16], 1, 2, 3, 4], 1, at=100, message=turn("t"))
    scenario.engine.at(0.2, lambda now: scenario.scheduler.set_quota_blocks(1))
    scenario.request("back", beginning[:10], 3, at=300, message=turn("t"))
    scenario.run()
    assert not scenario.scheduler.has_work, "room was made, and nothing else would wake the engine"
    assert scenario.tokens("back") == scenario.expected("back", 3)


def test_an_aborted_turn_that_left_the_history_early_leaves_no_kv_of_its_own():
    scenario = Scenario()
    history = scenario.request("one", 40, 5, message=turn())
    scenario.request("astray", [*history[:10], *range(30)], 20, at=200, message=turn())
    scenario.abort("astray", 260)
    scenario.request("two", history, 3, at=400, message=turn())
    scenario.run()
    assert scenario.tokens("astray"), "it was under way"
    assert computed(scenario, "two") == [(10, 40)]
    assert scenario.tokens("two") == scenario.expected("two", 3)


def test_sessions_of_different_salts_share_nothing():
    scenario = Scenario(kv={"prefix_cache": True})
    prompt = scenario.request("one", 40, 5, message={**turn("a"), "cache_salt": "x"})
    scenario.request("two", prompt, 5, at=100, message={**turn("b"), "cache_salt": "y"})
    scenario.run()
    assert scenario.cached_tokens("two") == 0


@pytest.mark.parametrize("later", ["y", ""])
def test_a_turn_with_another_salt_is_refused_and_leaves_the_session_as_it_was(later):
    scenario = Scenario(kv={"prefix_cache": True})
    scenario.request("one", 20, 5, message={**turn(), "cache_salt": "x"})
    scenario.request("other", 20, 5, at=100, message={**turn(), "cache_salt": later})
    scenario.request("two", 7, 5, at=200, message={**turn(append=True), "cache_salt": "x"})
    scenario.prompts["two"] = [0] * (25 + 7)
    scenario.run()
    (error,) = [output.error for _, output in scenario.outputs if output.request_id == "other"]
    assert error is not None
    assert error.code == "session_salt_mismatch"
    assert "another 'cache_salt'" in error.message
    assert scenario.tokens("two") == scenario.expected("two", 5)
    assert session_tokens(scenario) == 37


@pytest.mark.parametrize(("scope", "cached_tokens"), [("key", 0), ("server", 32)])
def test_what_one_key_computed_serves_another_only_in_the_scope_of_the_server(scope, cached_tokens):
    scenario = Scenario(kv={"prefix_cache": True, "prefix_cache_scope": scope})
    prompt = scenario.request("one", 40, 5, message={"key_id": "alice"})
    scenario.request("two", prompt, 5, at=100, message={"key_id": "bob"})
    scenario.request("three", prompt, 5, at=200, message={"key_id": "alice"})
    scenario.run()
    assert scenario.cached_tokens("two") == cached_tokens
    assert scenario.cached_tokens("three") == 32

"""Stop strings against a search over the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from runners.text.stop_strings import StopMatcher, automaton_of

letters = st.text(alphabet="abc", max_size=40)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first, the longest of those: what a reader of the whole text would cut at."""
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    return None if not ends else (min(ends)[0], min(ends)[2])


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=10), st.booleans())
def test_equals_search_over_whole_text(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    expected = first_match(text, stops)
    shown, seen_chars, matched = "", 0, None
    for piece in pieces_of(text, cuts):
        emitted, matched = matcher.push(piece)
        shown += emitted
        seen_chars += len(piece)
        if matched is not None:
            break
    if expected is None:
        assert matched is None
        assert shown + matcher.finish() == text
    else:
        end, stop = expected
        assert matched == stop
        assert shown == text[: end if include else end - len(stop)]
        # Found in the piece that completes it, not later.
        assert seen_chars - len(piece) < end <= seen_chars


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=10))
def test_holds_back_only_what_may_become_a_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = seen = ""
    for piece in pieces_of(text, cuts):
        emitted, matched = matcher.push(piece)
        if matched is not None:
            return
        shown, seen = shown + emitted, seen + piece
        held = seen[len(shown) :]
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert seen.endswith(held)
        assert held == max((start for start in beginnings if seen.endswith(start)), key=len)


def test_stop_inside_one_piece() -> None:
    assert StopMatcher(["ari"]).push("Paris") == ("P", "ari")


def test_nothing_after_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("\ntwo") == ("", "\n\n")
    assert matcher.push("three") == ("", "\n\n")
    assert matcher.finish() == ""


def test_empty_stop_strings_match_nothing() -> None:
    matcher = StopMatcher(["", "x"])
    assert matcher.push("abc") == ("abc", None)


def test_choices_share_one_table_and_nothing_else() -> None:
    built = automaton_of.cache_info().misses
    one, other = StopMatcher(["shared", "table"]), StopMatcher(["shared", "table"])
    assert automaton_of.cache_info().misses == built + 1
    assert one.push("a sha") == ("a ", None)
    assert other.push("red") == ("red", None)
    assert one.push("red") == ("", "shared")

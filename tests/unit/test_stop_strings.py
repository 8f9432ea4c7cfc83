"""Stop strings: nothing that belongs to a stop is ever sent, and nothing else is held back for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import RequestError
from ostinato.text.stop import StopSet, StopStream

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=6)
PIECES = st.lists(st.text("ab\n", max_size=4), max_size=20)


def run(
    stops: list[str], pieces: list[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    stream = StopStream(StopSet(stops), include=include, min_tokens=min_tokens)
    parts = [stream.push(piece, num_tokens=n) for n, piece in enumerate(pieces, start=1)]
    return [*parts, stream.finish()], stream.matched


def expected(stops: list[str], pieces: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """Brute force: the stop that ends first, the longest of those, among ends past the first tokens."""
    text, first_end = "".join(pieces), len("".join(pieces[:min_tokens]))
    for end in range(first_end + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(stops=STOPS, pieces=PIECES, include=st.booleans(), min_tokens=st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_joined_stream_is_the_text_before_the_stop(
    stops: list[str], pieces: list[str], include: bool, min_tokens: int
) -> None:
    parts, matched = run(stops, pieces, include=include, min_tokens=min_tokens)
    assert ("".join(parts), matched) == expected(stops, pieces, include, min_tokens)


@given(stops=STOPS.filter(bool), pieces=PIECES)
@settings(max_examples=200, deadline=None)
def test_holds_back_exactly_the_longest_real_prefix(stops: list[str], pieces: list[str]) -> None:
    stream, sent, text = StopStream(StopSet(stops)), "", ""
    for piece in pieces:
        sent, text = sent + stream.push(piece, num_tokens=1), text + piece
        if stream.matched is not None:
            return
        prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((len(p) for p in prefixes if text.endswith(p)), default=0)
        assert sent == text[: len(text) - held]


def test_f46_a_stop_over_four_tokens_sends_none_of_it() -> None:
    parts, matched = run(["DEFGHIJ"], ["ABC", "DEF", "GH", "I", "JKL"])
    assert parts == ["ABC", "", "", "", "", ""]
    assert matched == "DEFGHIJ"


def test_f46_what_was_held_is_flushed_at_the_end() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "GH"]) == (["ABC", "", "", "DEFGH"], None)


def test_a_false_start_is_released_and_a_later_one_is_kept() -> None:
    parts, matched = run(["aab"], ["a", "a", "a", "b"])
    assert (parts, matched) == (["", "", "a", "", ""], "aab")


def test_stop_may_end_inside_a_piece() -> None:
    assert run(["\n\n"], ["one\n", "\ntwo"]) == (["one", "", ""], "\n\n")
    assert run(["\n\n"], ["one\n", "\ntwo"], include=True) == (["one", "\n\n", ""], "\n\n")


def test_stop_within_min_tokens_does_not_count_but_a_later_end_does() -> None:
    assert run(["."], ["a.", "b.", "c."], min_tokens=2) == (["a.", "b.", "c", ""], ".")
    assert run(["xy"], ["x", "y", "y"], min_tokens=2) == (["", "xy", "y", ""], None)
    assert run(["xy"], ["x", "y"], min_tokens=1) == (["", "", ""], "xy")


def test_nothing_is_sent_after_the_stop() -> None:
    stream = StopStream(StopSet(["."]))
    assert stream.push("a.b", num_tokens=1) == "a"
    assert stream.push("c", num_tokens=2) == ""
    assert stream.finish() == ""


def test_work_does_not_grow_with_the_number_of_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    original = StopSet.step
    monkeypatch.setattr(
        StopSet, "step", lambda self, state, char: (steps.append(char), original(self, state, char))[1]
    )
    stops = StopSet([f"<stop {n}>" for n in range(2000)])
    steps.clear()
    stream, text = StopStream(stops), "<stop 1 <stop 1999 <sto " * 10
    assert "".join([*(stream.push(char, num_tokens=1) for char in text), stream.finish()]) == text
    assert len(steps) == len(text)


@pytest.mark.parametrize("stop", ["", None, 3])
def test_bad_stop_is_named(stop: object) -> None:
    with pytest.raises(RequestError, match=f"stop string {stop!r}"):
        StopSet([stop])  # type: ignore[list-item]

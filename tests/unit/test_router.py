"""The router in front of data-parallel groups: least loaded, prefix-affine while that costs little."""

from __future__ import annotations

import pytest

from ostinato.engine.router import Router, RouterOptions

SHORT = RouterOptions(prefix_tokens=4, hot=2, slack=50)


def test_least_loaded_by_tokens_not_by_requests() -> None:
    router = Router(3)
    assert [router.route(f"r{i}", [i] * n) for i, n in enumerate((100, 10, 10, 10, 10))] == [0, 1, 2, 1, 2]
    assert router.tokens == (100, 20, 20)


def test_finished_and_grown_requests_count() -> None:
    router = Router(2)
    assert router.route("a", [1] * 10) == 0
    router.hold("a", 15)
    assert router.tokens == (15, 0)
    assert router.route("b", [2] * 20) == 1
    router.finish("b")
    assert router.tokens == (15, 0)
    assert router.route("c", [3]) == 1


def test_a_hot_prefix_draws_until_its_group_is_behind() -> None:
    router, hot = Router(2, SHORT), [7, 7, 7, 7]
    assert router.route("a", [*hot, 1]) == 0
    assert router.route("b", [*hot, 2]) == 1, "seen once: not hot yet"
    assert router.route("other", [9] * 20) == 0
    assert router.route("c", [*hot, 3]) == 1
    assert router.route("d", [*hot, 4]) == 1
    assert router.route("e", [*hot, 5]) == 1
    assert router.counts["prefix"] == 0, "the least loaded one was the one with the prefix"
    assert router.route("f", [*hot, 6]) == 1, "25 tokens against 25"
    assert router.route("g", [*hot, 6]) == 1, "a little behind, and drawn"
    assert router.counts["prefix"] >= 1
    router.hold("g", router.held("g") + 100)
    assert router.route("h", [*hot, 7]) == 0, "too far behind"


def test_prefixes_have_namespaces_and_need_more_than_themselves() -> None:
    router, hot = Router(2, SHORT), [7, 7, 7, 7]
    for i in range(4):
        router.route(f"a{i}", [*hot, i])
    before = dict(router.counts)
    router.route("b", hot)
    router.route("c", [*hot, 1], "tenant")
    assert router.counts["prefix"] == before["prefix"]


def test_memory_of_prefixes_is_bounded() -> None:
    router = Router(2, RouterOptions(prefix_tokens=1, most_prefixes=3))
    for i in range(10):
        router.route(f"r{i}", [i, i])
    assert len(router._prefixes) == 3


@pytest.mark.parametrize("tokens", [40, 4])
def test_a_group_with_room_goes_before_one_where_requests_wait(tokens: int) -> None:
    """Whatever draws to the other: a prefix that all of them have, or fewer tokens beside one long request."""
    router = Router(2, most=8)
    if tokens == 4:
        assert router.route("long", [9] * 5000) == 0
    places = [router.route(f"r{i}", [*[7] * (tokens - 1), i]) for i in range(16 if tokens == 40 else 15)]
    counts = [places.count(group) + (tokens == 4 and group == 0) for group in range(2)]
    assert counts == [8, 8]
    if tokens == 40:
        assert set(places[3:8]) == {places[2]}, "drawn while there is room"
    router.finish("r0")
    assert router.route("next", [1]) == places[0]

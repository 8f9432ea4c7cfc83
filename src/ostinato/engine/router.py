"""Which data-parallel group serves a request: the one with the fewest KV tokens, or the one that has its prefix.

Knows only what passes through it: prompts, and the lengths that groups report. Invariant: a choice depends on the order
of calls alone, so it can be repeated; a prefix draws its requests to one group only until that one has fallen behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """prefix_tokens: length of the prefix that is remembered; hot: how often it must have come before it draws.

    slack: how many KV tokens more than the least loaded group a group may hold and still be drawn to.
    """

    prefix_tokens: int = 32
    hot: int = 2
    slack: int = 4096
    most_prefixes: int = 4096


@dataclass(slots=True)
class _Prefix:
    dp_rank: int
    times: int = 1


class Router:
    """Chooses among `dp` groups. Call `finish` when a request has ended. most: requests that run in a group at once; in
    one that has them others wait, while another may have room.
    """

    def __init__(self, dp: int, options: RouterOptions | None = None, *, most: int | None = None) -> None:
        self.options = options or RouterOptions()
        self._most = most
        self._requests = [0] * dp
        self._tokens = [0] * dp
        self._open: dict[str, tuple[int, int]] = {}
        self._prefixes: OrderedDict[tuple[str, tuple[int, ...]], _Prefix] = OrderedDict()
        self.counts = {"least_loaded": 0, "prefix": 0}

    def route(self, request_id: str, prompt: Sequence[int], extra_key: str = "") -> int:
        """The group for a request; its prompt counts as that group's load from now on."""
        least = min(range(len(self._tokens)), key=lambda d: (self._excess(d), self._tokens[d], d))
        key = (extra_key, tuple(prompt[: self.options.prefix_tokens]))
        seen = self._prefixes.get(key)
        chosen = least
        if seen is not None and len(prompt) > self.options.prefix_tokens:
            seen.times += 1
            near = self._tokens[seen.dp_rank] - self._tokens[least] <= self.options.slack
            if seen.times > self.options.hot and near and self._excess(seen.dp_rank) <= self._excess(least):
                chosen = seen.dp_rank
        self.counts["prefix" if chosen != least else "least_loaded"] += 1
        if seen is None:
            self._prefixes[key] = _Prefix(chosen)
        else:
            seen.dp_rank = chosen
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self.options.most_prefixes:
            self._prefixes.popitem(last=False)
        self._open[request_id] = (chosen, len(prompt))
        self._tokens[chosen] += len(prompt)
        self._requests[chosen] += 1
        return chosen

    def _excess(self, dp_rank: int) -> int:
        """How many of a group's requests would have to wait with one more."""
        return 0 if self._most is None else max(self._requests[dp_rank] + 1 - self._most, 0)

    def held(self, request_id: str) -> int:
        """KV tokens of an open request, as far as this router was told."""
        return self._open[request_id][1]

    def hold(self, request_id: str, tokens: int) -> None:
        """An open request has so many KV tokens now."""
        dp_rank, before = self._open[request_id]
        self._open[request_id] = (dp_rank, tokens)
        self._tokens[dp_rank] += tokens - before

    def finish(self, request_id: str) -> None:
        """Its tokens are nobody's load any more."""
        dp_rank, held = self._open.pop(request_id)
        self._tokens[dp_rank] -= held
        self._requests[dp_rank] -= 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """KV tokens of the open requests of each group."""
        return tuple(self._tokens)

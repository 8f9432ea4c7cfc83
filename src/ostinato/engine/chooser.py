"""Where the tokens of a step are chosen: rules, seeds and positions of its rows, and the tokens, at fixed addresses.

The greedy choice is a part of the captured step; rows that sample are chosen by one launch behind it. Knows nothing of
queues, text or pages. Invariant: a token is a function of its row's logits, rule, seed and position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ostinato.engine.sampler import signed64
from ostinato.engine.sequence import Sequence as Row
from ostinato.graphs.stream import EagerStream, Stream
from ostinato.ops.opset import OpSet


class Chooser:
    """Chooses for up to `max_bs` rows. `tokens` int64 [max_bs] is what was chosen, `positions` int64 where from.

    Both lie on the device. The host's side of them is the same memory on a CPU, else copied there and back.
    """

    def __init__(self, max_bs: int, ops: OpSet, device: torch.device | str = "cpu") -> None:
        rules = torch.zeros(max_bs, 4, dtype=torch.float64)
        here = (*(torch.zeros(max_bs, dtype=torch.int64) for _ in range(3)), rules)
        self._staging = None if torch.device(device).type == "cpu" else here
        there = here if self._staging is None else tuple(x.to(device) for x in here)
        self.tokens, self.positions, self._seeds, self._rules = there
        # The same memory: a torch operation on a few integers costs several times as much.
        self._host = tuple(x.numpy() for x in here)
        self._ops = ops
        self._stream = EagerStream()
        self._sample: Callable[[], None] | None = None

    def greedy(self, logits: torch.Tensor, live: torch.Tensor | None, stream: Stream) -> None:
        """Launch the greedy choice of each row."""
        stream.launch(self._ops.argmax, logits, self.tokens[: logits.shape[0]], live)

    def begin(self, rows: Sequence[Row], positions: Sequence[int], logits: torch.Tensor) -> None:
        """Further choices are for these rows, from `logits` (their leading rows), at these positions and on."""
        n = len(rows)
        _, host_positions, seeds, rules = self._host
        host_positions[:n] = positions
        self._send(1)
        self._sample = None
        if not any(row.by_step and row.rule[0] for row in rows):
            return
        for i, row in enumerate(rows):
            seeds[i] = signed64(row.seed)
            rules[i] = row.rule if row.by_step else (0.0, 0, 1.0, 0.0)  # the host chooses that one again
        self._send(2, 3)
        args = logits[:n], self._rules[:n], self._seeds[:n], self.positions[:n], self.tokens[:n]
        self._sample = partial(self._stream.launch, self._ops.sample, *args)

    def take(self, n: int) -> list[int]:
        """The tokens of the first n rows, after a step: the greedy ones, or sampled where a row asks for that."""
        if self._sample is not None:
            self._sample()
        if self._staging is not None:
            self._staging[0].copy_(self.tokens)  # waits for the step
        tokens: list[int] = self._host[0][:n].tolist()
        return tokens

    def relay(self, tokens: Sequence[int]) -> None:
        """Tokens that were chosen elsewhere, for all rows: what the next step goes on with."""
        self._host[0][: len(tokens)] = tokens
        self._send(0)

    def _send(self, *which: int) -> None:
        """What the host has written goes to the device, where that is elsewhere."""
        if self._staging is not None:
            there = self.tokens, self.positions, self._seeds, self._rules
            for i in which:
                there[i].copy_(self._staging[i])

"""Capture and replay of a plain torch model, without any engine: `ostinato.graphs` and `ostinato.padding` alone.

A small MLP gets ragged batches. Batches are padded to a few bucket sizes, each bucket is captured once on the
CPU tape and replayed afterwards, and the pads never show: every answer equals the unpadded one (up to rounding,
since torch's matrix product picks its order of sums by the number of rows).

    python examples/graphs_alone.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.graphs import (
    GraphBufferRegistry,
    GraphRunner,
    GraphSlot,
    PaddingPolicy,
    Stream,
    TapeBackend,
    decode_buckets,
)
from ostinato.padding import Buckets, ShapeRules, StepMode, decide_shape

FEATURES, HIDDEN, CLASSES, MAX_ROWS = 16, 64, 4, 8


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one step; the registry hands out padded views of the same type."""

    batch_size: int
    features: torch.Tensor
    group: torch.Tensor


def build_runner(seed: int = 0) -> GraphRunner[Batch, torch.Tensor]:
    """An MLP with an embedding of the row's group, over two named static buffers."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(FEATURES, HIDDEN, generator=generator) / FEATURES**0.5
    second = torch.randn(HIDDEN, CLASSES, generator=generator) / HIDDEN**0.5
    groups = torch.randn(3, HIDDEN, generator=generator)

    def mlp(view: Batch, stream: Stream) -> torch.Tensor:
        # Plain torch between launches is recorded too; kernels of your own go through stream.launch.
        hidden = torch.relu(view.features @ first + groups[view.group])
        return torch.softmax(hidden @ second, dim=-1)

    registry: GraphBufferRegistry[Batch] = GraphBufferRegistry(MAX_ROWS, MAX_ROWS)
    registry.register_slot(
        GraphSlot(
            "features",
            lambda bs, tokens: (bs, FEATURES),
            torch.float32,
            "bs",
            padding_policy=PaddingPolicy.ZERO,
        )
    )
    # `group` is used as an index, so a stale tail could point anywhere: it is zeroed at each step.
    registry.register_slot(
        GraphSlot("group", lambda bs, tokens: (bs,), torch.int64, "bs", padding_policy=PaddingPolicy.ZERO)
    )
    return GraphRunner(mlp, registry, backend=TapeBackend(), capture_on_first_use=True)


def main() -> None:
    runner = build_runner()
    unpadded = ShapeRules(decode=Buckets(()), extend=Buckets(()))
    rules = ShapeRules(decode=decode_buckets(MAX_ROWS, sizes=[2, 4, 8]), extend=Buckets(()))
    generator = torch.Generator().manual_seed(1)
    for rows in (3, 7, 1, 4, 3, 8, 2, 5):
        batch = Batch(
            rows,
            torch.randn(rows, FEATURES, generator=generator),
            torch.randint(3, (rows,), generator=generator),
        )
        shape = decide_shape(StepMode.DECODE, [rows], rows, rules)
        answer = runner.run(shape, batch)[:rows].clone()
        alone = runner.run(decide_shape(StepMode.DECODE, [rows], rows, unpadded), batch)[:rows]
        gap = float((answer - alone).abs().max())
        print(f"{rows} rows in a bucket of {shape.padded_bs}: largest difference from unpadded {gap:.1e}")
        assert gap < 1e-6
    stats = runner.stats.as_dict()
    print({key: stats[key] for key in ("captures", "replays", "eager_reasons", "real_rows", "pad_rows")})


if __name__ == "__main__":
    main()

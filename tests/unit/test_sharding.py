"""What a rank holds of a model: spans of every axis, cuts of stored weights, and what of a file is read for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato.errors import ConfigError, ModelError
from ostinato.models.loader import WeightSource
from ostinato.models.sharding import AXES, Sharding
from ostinato.models.weights import Cut, Part, StoredWeight
from ostinato.parallel.topology import Topology


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("layout", [(1, 1, 1), (4, 2, 2), (4, 1, 4), (8, 4, 2)], ids=str)
def test_spans_cover_an_axis(axis: str, layout: tuple[int, int, int]) -> None:
    """Once for each set of ranks that splits it."""
    ranks = [Sharding(Topology(*layout, rank=r)) for r in range(layout[0])]
    covered = [i for share in ranks for i in range(*share.span(axis, 16))]
    copies = len(covered) // 16
    assert sorted(covered) == sorted(list(range(16)) * copies)
    assert copies == layout[0] // getattr(ranks[0].topology, AXES[axis])


def test_ranks_share_few_kv_heads() -> None:
    assert [Sharding(Topology(4, rank=r)).span("kv_heads", 2) for r in range(4)] == [
        (0, 1),
        (0, 1),
        (1, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("axis", "size", "message"),
    [
        ("heads", 6, r"6 heads cannot be shared out over attn_tp 4: 6 / 4 = 1\.5"),
        ("kv_heads", 3, r"3 kv heads .* 3 / 4 = 0\.75"),
        ("experts", 10, r"10 experts cannot be shared out over ep 4: 10 / 4 = 2\.5"),
    ],
)
def test_refusals_show_the_arithmetic(axis: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sharding(Topology(4, 1, 4)).span(axis, size)


class _Watched(WeightSource):
    """Remembers which tensors were opened, and how much of them was asked for."""

    opened: list[str]

    @contextmanager
    def open(self, name: str, shape: tuple[int, ...]) -> Iterator[Any]:
        self.opened.append(name)
        with super().open(name, shape) as stored:
            yield stored


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"q": (8, 6), "k": (4, 6), "fused": (3, 10, 6), "turned": (3, 6, 10)}
    shapes |= {f"e{i}.{part}": (5, 6) for i in range(4) for part in ("gate", "up")}
    return {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}


@pytest.fixture
def source(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> _Watched:
    save_file(tensors, tmp_path / "model.safetensors")
    found = _Watched(tmp_path)
    found.opened = []
    return found


def _built(weight: StoredWeight) -> torch.Tensor:
    """The weight put together from its pieces; every value written once."""
    out = torch.full(weight.shape if len(weight.shape) == 3 else (1, *weight.shape), torch.nan)
    for matrix, first, block in weight.pieces():
        assert out[matrix, first : first + len(block)].isnan().all()
        out[matrix, first : first + len(block)] = block
    assert not out.isnan().any()
    return out if len(weight.shape) == 3 else out[0]


def test_rows_of_stacked_tensors(source: _Watched, tensors: dict[str, torch.Tensor]) -> None:
    parts = (Part("q", (8, 6)), Part("k", (4, 6), first=8))
    weight = StoredWeight(source, (12, 6), torch.float32, parts)
    cut = weight.cut(Cut(((2, 4), (9, 11))))
    assert cut.shape == (4, 6)
    assert torch.equal(_built(cut), torch.cat((tensors["q"][2:4], tensors["k"][1:3])))
    source.opened.clear()
    assert torch.equal(_built(weight.cut(Cut(((0, 8),)))), tensors["q"])
    assert source.opened == ["q"], "k is another rank's"


def test_experts_of_one_rank(source: _Watched, tensors: dict[str, torch.Tensor]) -> None:
    """Slots 3, 1, 3 of four experts, columns and rows cut too; tensors of experts 0 and 2 are not opened."""
    parts = [
        Part(f"e{i}.{part}", (5, 6), matrix=i, first=5 * (part == "up"))
        for i in range(4)
        for part in ("gate", "up")
    ]
    weight = StoredWeight(source, (4, 10, 6), torch.float32, tuple(parts))
    cut = weight.cut(Cut(((1, 3), (6, 8)), (2, 5), (3, 1, 3)))
    assert cut.shape == (3, 4, 3)
    expected = [torch.cat((tensors[f"e{e}.gate"][1:3], tensors[f"e{e}.up"][1:3]))[:, 2:5] for e in (3, 1, 3)]
    assert torch.equal(_built(cut), torch.stack(expected))
    assert sorted(set(source.opened)) == ["e1.gate", "e1.up", "e3.gate", "e3.up"]


@pytest.mark.parametrize("name", ["fused", "turned"])
def test_fused_experts(name: str, source: _Watched, tensors: dict[str, torch.Tensor]) -> None:
    turned = name == "turned"
    whole = tensors[name].transpose(1, 2) if turned else tensors[name]
    part = Part(name, tuple(tensors[name].shape), transposed=turned)
    weight = StoredWeight(source, (3, 10, 6), torch.float32, (part,))
    assert torch.equal(_built(weight.cut(Cut(((0, 3), (5, 8)), None, (2,)))), whole[2:, [0, 1, 2, 5, 6, 7]])


def test_what_is_left_is_checked_all_the_same(source: _Watched) -> None:
    parts = (Part("q", (8, 6)), Part("missing", (4, 6), first=8))
    with pytest.raises(ModelError, match="no tensor missing"):
        list(StoredWeight(source, (12, 6), torch.float32, parts).cut(Cut(((0, 8),))).pieces())
    parts = (Part("q", (8, 6)), Part("k", (5, 6), first=8))
    with pytest.raises(ModelError, match=r"k has shape \[4, 6\]"):
        list(StoredWeight(source, (13, 6), torch.float32, parts).cut(Cut(((0, 8),))).pieces())

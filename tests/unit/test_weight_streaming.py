"""Reading weights: files mapped and checked, tensors handed over in blocks, memory given back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ostinato.models.loader import BLOCK_BYTES, WeightSource
from ostinato.models.safetensors_file import DamagedFileError, SafetensorsFile
from ostinato.models.weights import Part, StoredWeight
from ostinato.ops.cpu.huge_pages import mapped_zeros
from ostinato.ops.cpu.opset import open_numba_ops
from ostinato.ops.cpu.packing import Panels
from ostinato.ops.opset import pieces_of, whole_weight

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
WIDE = BLOCK_BYTES // 2 // 64  # bf16 columns of a matrix of which 64 rows are a block


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def source_of(directory: Path, tensors: dict[str, torch.Tensor]) -> WeightSource:
    save_file(tensors, directory / "model.safetensors")
    return WeightSource(directory)


def raw_file(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(first: int, last: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        (b"{", 0),
        (b"[]", 0),
        ({"a": {}}, 0),
        ({"a": entry(0, 8, 2), "b": entry(12, 16, 1)}, 16),  # a gap
        ({"a": entry(0, 8, 2), "b": entry(4, 8, 1)}, 8),  # one over the other
        ({"a": entry(0, 8, 3)}, 8),  # more values than bytes
        ({"a": entry(0, 8, -2)}, 8),
        ({"a": entry(8, 0, 2)}, 8),
        ({"a": entry(0, 8, 2)}, 12),  # bytes that belong to nobody
        ({"a": entry(0, 8, 2)}, 4),  # bytes that are missing
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(tmp_path: Path, header: Any, size: int) -> None:
    with pytest.raises(DamagedFileError):
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, bytes(size)))


def test_views_hold_what_was_saved(tmp_path: Path) -> None:
    tensors = {
        "odd": draw(3),  # what follows it begins at an odd place
        "next": draw(5, 7, dtype=torch.float32),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "half": draw(2, 3, 4, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(file.view(name), tensor)


def test_blocks_are_small_and_whole_together(tmp_path: Path) -> None:
    weight = draw(150, WIDE)
    source = source_of(tmp_path, {"w": weight})
    blocks = []
    with source.open("w", (150, WIDE)) as stored:
        for first, block in stored.blocks(stored.values):
            assert block.nbytes <= BLOCK_BYTES
            blocks.append((first, block.clone()))
    assert [first for first, _ in blocks] == [0, 64, 128]
    assert torch.equal(torch.cat([block for _, block in blocks]), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_come_to_their_places(tmp_path: Path, dtype: torch.dtype) -> None:
    one, two, fused = draw(70, WIDE), draw(5, WIDE), draw(3, 6, 20)
    source = source_of(tmp_path, {"one": one, "two": two, "fused": fused})
    parts = (Part("one", (70, WIDE)), Part("two", (5, WIDE), first=70))
    stacked = StoredWeight(source, (75, WIDE), dtype, parts)
    assert torch.equal(whole_weight(stacked), torch.cat((one, two)).to(dtype))
    turned = StoredWeight(source, (3, 20, 6), dtype, (Part("fused", (3, 6, 20), transposed=True),))
    assert torch.equal(whole_weight(turned), fused.transpose(1, 2).to(dtype))
    source.finish()


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(
    "pack",
    [
        lambda ops, w: [ops.pack_linear(w).panels],
        lambda ops, w: [ops.pack_gated(w).panels],
        lambda ops, w: [ops.pack_linear(w, out_dtype=torch.float32).panels],
    ],
    ids=["linear", "gated", "fp32"],
)
def test_packed_by_blocks_is_packed_whole(
    tmp_path: Path, pack: Callable[[Any, Any], list[Panels]], quantization: str | None
) -> None:
    ops = open_numba_ops(quantization=quantization)
    weight = draw(2 * 50, WIDE)
    parts = (Part("gate", (50, WIDE)), Part("up", (50, WIDE), first=50))
    source = source_of(tmp_path, {"gate": weight[:50].clone(), "up": weight[50:].clone()})
    stored = StoredWeight(source, (100, WIDE), torch.bfloat16, parts)
    for ours, whole in zip(pack(ops, stored), pack(ops, weight), strict=True):
        assert torch.equal(ours.words, whole.words)


def test_experts_packed_one_by_one_are_packed_whole(tmp_path: Path) -> None:
    ops = open_numba_ops()
    gate_up, down = draw(4, 40, 33), draw(4, 33, 20)
    source = source_of(tmp_path, {"gate_up": gate_up.transpose(1, 2).contiguous(), "down": down})
    stored = ops.pack_experts(
        StoredWeight(source, (4, 40, 33), torch.bfloat16, (Part("gate_up", (4, 33, 40), transposed=True),)),
        StoredWeight(source, (4, 33, 20), torch.bfloat16, (Part("down", (4, 33, 20)),)),
    )
    whole = ops.pack_experts(gate_up, down)
    assert torch.equal(stored.gate_up.words, whole.gate_up.words)
    assert torch.equal(stored.down.words, whole.down.words)


def test_pieces_of_a_tensor_are_its_matrices() -> None:
    weight = draw(3, 4, 5)
    assert [(i, first) for i, first, _ in pieces_of(weight)] == [(0, 0), (1, 0), (2, 0)]
    assert torch.equal(torch.stack([rows for *_, rows in pieces_of(weight)]), weight)
    assert [rows.shape for *_, rows in pieces_of(weight[0])] == [(4, 5)]


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping under a tensor that are in memory."""
    inside, address = False, tensor.data_ptr()
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                start, end = (int(part, 16) for part in words[0].split("-"))
                inside = start <= address < end
            elif inside and words[0] == "Rss:":
                return int(words[1]) << 10
    raise AssertionError("the tensor lies in no mapping")


@LINUX
def test_a_slice_reads_its_own_bytes_and_gives_them_back(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"w": draw(256, WIDE)})
    with source.open("w", (256, WIDE)) as stored:
        total = stored.values.nbytes
        assert float(stored.values[64:80].float().sum()) != 0
        assert 0 < resident(stored.values) <= total // 2  # files may be mapped in huge pages
        assert float(stored.values.float().sum()) != 0
        assert resident(stored.values) >= total
        stored.drop()
        assert resident(stored.values) == 0


@LINUX
@pytest.mark.parametrize("huge", [False, True])
def test_mapped_zeros_take_memory_when_they_are_written(huge: bool) -> None:
    rows = mapped_zeros((512, 1 << 14), torch.float32, huge=huge)  # 32 MiB
    other = mapped_zeros((3,), torch.int64)
    assert other.tolist() == [0, 0, 0]
    before = resident(rows)
    rows[200] = 1.0
    assert before < resident(rows) <= before + (4 << 20)
    assert int(rows.sum()) == 1 << 14

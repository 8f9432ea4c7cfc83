"""`ostinato bench kernels` on tiny shapes: every kernel is measured, and its bytes and operations are counted right."""

from __future__ import annotations

import pytest

from ostinato.cli.kernels import KernelShapes, measure_kernels
from ostinato.config import EngineConfig
from ostinato.ops.cpu.isa import select_isa

TINY = KernelShapes(
    hidden=64,
    vocab=96,
    experts=4,
    top_k=2,
    intermediate=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    linear_rows=(1, 3),
    head_rows=(2,),
    expert_rows=(2,),
    contexts=((2, 20),),
    cold_bytes=1 << 20,
)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_every_kernel_is_measured(quantization: str | None) -> None:
    config = EngineConfig.of(quantization=quantization, threads=1, weight_coding="plain")
    found = measure_kernels(config, 2, TINY)
    assert found["threads"] == 1
    assert found["isa"] == select_isa().name
    name, size = ("int8", 1) if quantization else ("bf16", 2)
    linear = found["kernels"][f"linear {name} 64x64, 3 rows"]
    assert (linear["bytes"], linear["operations"]) == (size * 64 * 64, 2 * 3 * 64 * 64)
    head = found["kernels"]["head bf16 96x64, 2 rows"]
    assert head["bytes"] == 2 * 96 * 64, "the head keeps its dtype"
    experts = found["kernels"][f"experts {name} 4 of 32x64, 2 rows"]
    assert 2 * 3 * size * 64 * 32 <= experts["bytes"] <= 4 * 3 * size * 64 * 32, (
        "two to four experts are active"
    )
    attention = found["kernels"]["attention bf16 4/2 heads of 16, 2 requests of 20"]
    assert (attention["bytes"], attention["operations"]) == (2 * 20 * 2 * 2 * 16 * 2, 2 * 20 * 4 * 16 * 4)
    assert len(found["kernels"]) == 5
    assert all(len(k["share"]["rounds"]) == 2 and k["share"]["least"] > 0 for k in found["kernels"].values())
    assert set(found["operations_per_s"]) == {"bf16", name}


def test_bytes_are_counted_as_they_are_stored() -> None:
    if not select_isa().byte_tables:
        pytest.skip("this CPU cannot decode weights as it multiplies")
    found = measure_kernels(EngineConfig.of(threads=1), 1, TINY)
    assert found["weight_coding"] == "12 bits"
    linear = found["kernels"]["linear bf16 at 12 bits 64x64, 3 rows"]
    header = 64
    assert linear["bytes"] >= 1.5 * 64 * 64 + 2 * header
    assert linear["bytes"] < 1.6 * 64 * 64 + 2 * header
    assert linear["operations"] == 2 * 3 * 64 * 64

"""Coded weights give every request the bits that plain ones do, and take less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, select_isa

from .paths import DEMO, NumericPath, subject
from .score import ensemble
from .stage import Setting, Stage

TAPE = Setting(graph="tape", chunk_pages=2)


@pytest.mark.parametrize("isa", [AVX512_BF16, AVX2])
@pytest.mark.parametrize("name", [DEMO, "llama_tied", "qwen2_moe"])
def test_as_with_plain_weights(name: str, isa: str, checkpoint: Callable[[str], Path]) -> None:
    coded = NumericPath("numba", isa, "bfloat16")
    coded.skip_where_missing()
    if not select_isa(isa).byte_tables:
        pytest.skip("this CPU cannot decode weights as it multiplies")
    theirs = Stage(subject(name, replace(coded, weight_coding="plain"), checkpoint))
    ours = Stage(subject(name, coded, checkpoint))
    parts = ensemble(theirs.vocab, 5)
    try:
        theirs.check("coded weights", TAPE, parts, ours.player(TAPE).play(parts))
        sizes = [stage.player(TAPE).llm.stats()["weights"] for stage in (ours, theirs)]
    finally:
        ours.close()
        theirs.close()
    assert sizes[1]["stored_bytes"] == sizes[1]["uncoded_bytes"] == sizes[0]["uncoded_bytes"]
    assert sizes[0]["stored_bytes"] < 0.8 * sizes[0]["uncoded_bytes"]

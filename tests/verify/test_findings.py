"""Reports survive JSON, say where a finding is, and refuse what they cannot read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ostinato.verify.findings import Cell, CheckResult, Finding, Place, Report, from_json, to_json

PLACE = Place("pads", "decode", 8, 5, rank=1, layer=3, slot="positions", row=6)
FINDING = Finding(PLACE, "tail is stale", 0.5, "ostinato verify --cell decode:8:5")
CHECK = CheckResult("pads", "Pads", "Pads change nothing.", (Cell("decode", 8, 5, 12, (FINDING,)),), 40, 1.5)
REPORT = Report("demo", {"layers": "4"}, {"tp": "1"}, checks=(CHECK,), passed=False)


def test_a_report_survives_json() -> None:
    assert from_json(to_json(REPORT)) == REPORT
    assert list(REPORT.findings()) == [FINDING]
    assert not CHECK.passed
    assert CHECK.comparisons == 12


def test_no_number_is_no_number_in_json() -> None:
    assert Finding(PLACE, "NaN", math.nan).max_abs is None
    assert Finding(PLACE, "Inf", math.inf).max_abs is None


def test_a_place_reads_as_words() -> None:
    assert str(PLACE) == "decode bucket 8, n 5, rank 1, layer 3, slot positions, row 6"
    assert str(Place("reference")) == "reference, rank 0"


def test_other_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="version 2"):
        from_json(to_json(replace(REPORT, version=2)))
    with pytest.raises(ValueError, match="model"):
        from_json(b"{}")

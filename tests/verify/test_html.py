"""The HTML report: whole, self-contained, and text in it stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from ostinato.verify.findings import Cell, CheckResult, Finding, Place, Report, from_json
from ostinato.verify.html import MAX_COLUMNS, heat_maps, render


def _finding(mode: str = "decode", bucket: int = 8, n: int = 5, what: str = "real rows differ") -> Finding:
    return Finding(
        Place("poison", mode, bucket, n, rank=1, layer=3, row=4), what, 0.25, "ostinato verify --cell x"
    )


def _report(*cells: Cell, model: str = "demo", skipped: str = "") -> Report:
    check = CheckResult("poison", "Pad poison", "Pads are never read.", cells, 40, 1.5, skipped)
    return Report(model, {"layers": "4"}, {"tp": "2"}, checks=(check,), seconds=2.0, passed=check.passed)


class _Page(HTMLParser):
    """Collects what a browser would fetch, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("findings", [(), (_finding(),)])
def test_a_page_is_whole_and_fetches_nothing(findings: tuple[Finding, ...]) -> None:
    html = render(_report(Cell("decode", 8, 5, 7, findings), Cell("decode", 4, 1, 7)))
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert page.fetched == []
    assert ("Failed: 1 finding in 1 check" in html) == bool(findings)
    assert ("ostinato verify --cell x" in html) == bool(findings)


def test_the_report_can_be_read_back_from_the_page() -> None:
    report = _report(Cell("decode", 8, 5, 7, (_finding(what="</script><b>"),)), model="<img src=x>")
    html = render(report)
    found = re.search(r'id="report">(.*?)</script>', html, re.S)
    assert found is not None
    assert from_json(found[1].encode()) == report
    assert "<img" not in html
    assert "<b>" not in html


def test_a_check_that_did_not_run_says_why() -> None:
    assert "Not run: transformers is not installed" in render(
        _report(skipped="transformers is not installed")
    )


def test_a_map_shows_each_bucket_and_n_once() -> None:
    cells = [Cell("decode", 4, 1, 3), Cell("decode", 8, 1, 3), Cell("decode", 8, 5, 3, (_finding(),))]
    (decode, prefill) = heat_maps([*cells, Cell("prefill-full", 16, 9, 1), Cell("", 0, 0, 1)])
    assert [mark.text for mark in decode.rows] == ["4", "8"]
    tones = [square.tone for square in decode.cells]
    assert tones == ["ok", "ok", "no"]  # n = 5 does not fit bucket 4
    assert "layer 3" in decode.cells[-1].title
    assert prefill.mode == "prefill-full"


def test_cells_that_did_not_run_are_shown_as_such() -> None:
    (decode,) = heat_maps([Cell("decode", 8, 1, 1), Cell("decode", 4, 3, 1)])
    assert [square.tone for square in decode.cells] == ["rest", "ok", "ok", "rest"]


def test_a_wide_map_is_thinned_but_keeps_what_is_wrong() -> None:
    cells = [Cell("prefill-full", 1000, n, 1, (_finding(),) if n == 778 else ()) for n in range(1, 1001)]
    (chart,) = heat_maps(cells)
    assert len(chart.cells) <= MAX_COLUMNS + 1
    assert [square.tone for square in chart.cells].count("no") == 1

"""One picture of a run, as SVG: how latencies are spread, and how the run went over time.

Pure functions of the outcomes. Colours are readable on white and on black. Invariant: what is drawn is every request
that went well; failed ones appear in the title only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ostinato.loadgen.client import Outcome
from ostinato.loadgen.figures import Latencies, spread

_WIDTH, _HEIGHT, _TITLE = 960, 500, 34
_PANEL_WIDTH, _PANEL_HEIGHT = 320, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 34, 26
_INK, _GREY, _MARK = "#6b7280", "#6b728055", "#c2410c"

Points = Sequence[tuple[float, float]]


def plot(outcomes: Sequence[Outcome], title: str) -> str:
    """Six panels: shares of requests by TTFT, TPOT, ITL and E2E, tokens a second, requests under way."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    latencies = [Latencies.of(outcome) for outcome in good]
    values = {
        "time to first token": [one.ttft for one in latencies if one.ttft is not None],
        "time per output token": [one.tpot for one in latencies if one.tpot is not None],
        "between two pieces of text": [gap for one in latencies for gap in one.itl],
        "whole request": [one.e2e for one in latencies],
    }
    panels = [_spread_panel(name, seconds) for name, seconds in values.items()]
    panels.insert(2, _time_panel("output tokens a second", _token_rate(good)))
    panels.append(_time_panel("requests under way", _under_way(outcomes)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{_INK}">',
        f'<text x="16" y="22" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        x, y = number % 3 * _PANEL_WIDTH, _TITLE + number // 3 * _PANEL_HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{"".join(panel)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(share: float) -> float:
    return _LEFT + share * (_PANEL_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _PANEL_HEIGHT - _BOTTOM - share * (_PANEL_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def _frame(name: str) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="18" font-weight="600">{escape(name)}</text>'
    yield _line(_LEFT, _y(0), _PANEL_WIDTH - _RIGHT, _y(0), _GREY)


def _curve(points: Points, top_x: float, top_y: float) -> str:
    places = " ".join(f"{_x(x / top_x):.1f},{_y(y / top_y):.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{_MARK}" stroke-width="1.6"/>'


def _spread_panel(name: str, seconds: Sequence[float]) -> Iterator[str]:
    """The share of values up to each length, with the percentiles marked."""
    yield from _frame(name)
    found = spread(seconds)
    if found is None:
        yield _text(_x(0.5), _y(0.5), "nothing to measure")
        return
    top = _round_up(max(found["most"] / 1000, 1e-6))
    ordered = sorted(seconds)
    for share in (0.5, 1.0):
        yield _line(_LEFT, _y(share), _PANEL_WIDTH - _RIGHT, _y(share), _GREY)
        yield _text(_LEFT - 6, _y(share) + 4, f"{share:.0%}", "end")
    for place in (0.0, 0.5, 1.0):
        yield _text(_x(place), _PANEL_HEIGHT - 8, _duration(top * place))
    step = max(1, len(ordered) // 300)
    points = [(0.0, 0.0), (ordered[0], 0.0)]
    points += [(ordered[n], (n + 1) / len(ordered)) for n in range(0, len(ordered), step)]
    yield _curve([*points, (ordered[-1], 1.0), (top, 1.0)], top, 1.0)
    words = "   ".join(f"{p} {_duration(found[p] / 1000)}" for p in ("p50", "p90", "p99"))
    yield _text(_PANEL_WIDTH - _RIGHT, _y(0) - 8, words, "end")


def _time_panel(name: str, points: Points) -> Iterator[str]:
    """A value over the run's seconds."""
    yield from _frame(name)
    if not points:
        yield _text(_x(0.5), _y(0.5), "nothing to measure")
        return
    top_x, top_y = max(points[-1][0], 1e-9), _round_up(max(max(y for _, y in points), 1e-9))
    for share in (0.5, 1.0):
        yield _line(_LEFT, _y(share), _PANEL_WIDTH - _RIGHT, _y(share), _GREY)
        yield _text(_LEFT - 6, _y(share) + 4, f"{top_y * share:g}", "end")
        yield _text(_x(share), _PANEL_HEIGHT - 8, _duration(top_x * share), "middle" if share < 1 else "end")
    yield _curve(points, top_x, top_y)


def _token_rate(good: Sequence[Outcome], bins: int = 60) -> Points:
    """Output tokens a second over the run; a piece stands for its share of its request's tokens."""
    if not good:
        return []
    start, end = min(o.start for o in good), max(o.end for o in good)
    width = max((end - start) / bins, 1e-9)
    sums = [0.0] * bins
    for outcome in good:
        for piece in outcome.pieces:
            place = min(bins - 1, max(0, int((piece - start) / width)))
            sums[place] += outcome.output_tokens / len(outcome.pieces)
    return [((n + 0.5) * width, total / width) for n, total in enumerate(sums)]


def _under_way(outcomes: Sequence[Outcome]) -> Points:
    """Steps of the number of requests under way, failed ones too."""
    if not outcomes:
        return []
    start = min(o.start for o in outcomes)
    points, now = [(0.0, 0.0)], 0
    for moment, change in sorted([(o.end, -1) for o in outcomes] + [(o.start, 1) for o in outcomes]):
        points.append((moment - start, float(now)))
        now += change
        points.append((moment - start, float(now)))
    return points


def _round_up(value: float) -> float:
    """The next number of the form 1, 2, 2.5 or 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= value * 0.999)


def _duration(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

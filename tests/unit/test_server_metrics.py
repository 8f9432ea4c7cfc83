"""Histograms count right, and the exposition is what Prometheus reads."""

from __future__ import annotations

import pytest

from ostinato.server.metrics import Histogram


def test_a_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == pytest.approx(4.65)

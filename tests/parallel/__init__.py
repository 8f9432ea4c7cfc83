"""Engines of several ranks, as threads of one process.

    ensemble.py   a parallel engine whose ranks are threads
    table.py      the layout table: layouts, ways to run them, what is played and how answers compare

`test_layout_table` plays the table, a sample of it or all of it with `--exhaustive`; `test_layouts` what else must hold
in every layout; the others whatever can go wrong between ranks.
"""

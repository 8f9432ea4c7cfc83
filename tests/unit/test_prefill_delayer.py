"""The cases of docs/behaviour.md, section 6, and what keeps ranks in step: one exchange per pass, bounded waits."""

from __future__ import annotations

import pytest

from ostinato.engine.prefill_delayer import (
    STATE_WORDS,
    DelayerOptions,
    LocalLoad,
    PassExecutor,
    PassState,
    PrefillDelayer,
    Verdict,
)

ALL, NONE, MIXED = (1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 1, 0)


def _states(prefillable: tuple[int, ...], **fields: int) -> list[PassState]:
    return [PassState(prefillable=p, **fields) for p in prefillable]


def _forced(
    rank: int, prefillable: tuple[int, ...], usage: float, watermark: float | None
) -> list[PassState]:
    """What four executors would tell, `rank` with a low usage, the others with a high one."""
    told: list[PassState] = []
    for r, p in enumerate(prefillable):
        delayer = PrefillDelayer(DelayerOptions(100, watermark))

        def exchange(row: list[int]) -> list[list[int]]:
            told.append(PassState(*row))
            return [row]

        executor = PassExecutor(delayer, exchange, lambda: 0.0)
        executor.begin(LocalLoad(1, 1, usage if r == rank else 0.9))
        executor.ask(bool(p))
    return told


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([ALL], [Verdict(True, "no_wait")]),
        ([MIXED, ALL], [Verdict(False, "delay"), Verdict(True, "wait_success")]),
        ([NONE], [Verdict(True)]),
        ([MIXED], [Verdict(False, "delay")]),
        ([MIXED, NONE, ALL], [Verdict(False, "delay"), Verdict(True), Verdict(True, "no_wait")]),
    ],
)
def test_passes(passes: list[tuple[int, ...]], expected: list[Verdict]) -> None:
    delayer = PrefillDelayer(DelayerOptions(100))
    assert [delayer.decide(_states(p)) for p in passes] == expected


@pytest.mark.parametrize(
    ("rank", "watermark", "expected"),
    [
        (0, 0.8, Verdict(True, "token_watermark")),  # a prefillable rank
        (0, None, Verdict(False, "delay")),
        (1, 0.8, Verdict(False, "delay")),  # a rank that cannot prefill
    ],
)
def test_watermark(rank: int, watermark: float | None, expected: Verdict) -> None:
    states = _forced(rank, MIXED, 0.5, watermark)
    assert PrefillDelayer(DelayerOptions(100)).decide(states) == expected


def test_timeout_and_counts() -> None:
    delayer = PrefillDelayer(DelayerOptions(3))
    verdicts = [delayer.decide(_states(MIXED)) for _ in range(6)]
    assert [v.reason for v in verdicts] == ["delay", "delay", "wait_timeout"] * 2
    assert [v.allow for v in verdicts] == [False, False, True] * 2
    assert delayer.counts == {"delay": 4, "wait_timeout": 2}


def test_a_watermark_also_ends_a_wait_of_all() -> None:
    delayer = PrefillDelayer(DelayerOptions(100, wait_for_slots=True, max_running=8))
    states = [PassState(1, f, 8, 2) for f in (0, 1)]
    assert delayer.decide(states) == Verdict(True, "token_watermark")


def test_optional_waits_skip_the_first_cause_and_are_bounded() -> None:
    full = _states(ALL, running_bs=7, max_prefill_bs=2)
    free = _states(ALL, running_bs=6, max_prefill_bs=2)
    delayer = PrefillDelayer(DelayerOptions(3, wait_for_slots=True, max_running=8))
    assert [delayer.decide(s).reason for s in (full, free, full)] == ["no_wait"] * 3, (
        "each time the first one"
    )
    assert [delayer.decide(full).reason for _ in range(3)] == ["delay_slots", "delay_slots", "wait_timeout"]
    assert [delayer.decide(s).reason for s in (full, free)] == ["delay_slots", "wait_success"]


def test_waits_for_the_queue_and_for_quiet() -> None:
    queue = PrefillDelayer(DelayerOptions(100, queue_ratio=0.5, queue_cap=4, max_delay_ms=10))
    queue.decide(_states(ALL, running_bs=20, waiting_len=3))
    assert queue.decide(_states(ALL, running_bs=20, waiting_len=3)).reason == "delay_queue"
    assert queue.decide(_states(ALL, running_bs=20, waiting_len=4)).reason == "wait_success"
    queue.decide(_states(ALL, running_bs=20, waiting_len=1))
    assert queue.decide(_states(ALL, running_bs=20, waiting_len=1, wait_elapsed_us=10_000)).allow
    quiet = PrefillDelayer(DelayerOptions(100, quiet_us=500))
    quiet.decide(_states(ALL, queue_quiet_us=0))
    assert quiet.decide(_states(ALL, queue_quiet_us=499)).reason == "delay_quiet"
    assert quiet.decide(_states(ALL, queue_quiet_us=500)).reason == "wait_success"


def test_one_exchange_per_pass_whoever_asks() -> None:
    rows: list[list[int]] = []
    time = [10.0]

    def exchange(row: list[int]) -> list[list[int]]:
        assert len(row) == STATE_WORDS
        rows.append(row)
        return [row, [0] * STATE_WORDS]

    executor = PassExecutor(PrefillDelayer(DelayerOptions(100)), exchange, lambda: time[0])
    executor.begin(LocalLoad(2, 3, 0.5))
    time[0] = 10.5
    assert not executor.ask(True)
    assert not executor.ask(True), "the verdict of the pass is kept"
    executor.end(0)
    assert rows == [[1, 0, 2, 0, 3, 500_000, 500_000]]

    executor.begin(LocalLoad(2, 0, 0.5))
    executor.end(0)
    assert rows[1][:1] == [0], "nobody asked: the rank takes part all the same"
    executor.begin(LocalLoad(2, 0, 0.5))
    executor.end(5)
    executor.begin(LocalLoad(2, 0, 0.5))
    executor.end(0)
    assert rows[3][3] == 5, "the largest of the recent prefills"
    assert len(rows) == 4

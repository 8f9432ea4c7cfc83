"""Interrupts wait for the end of a block; a second one does not."""

from __future__ import annotations

import signal

import pytest

from ostinato.engine.interrupts import delayed_interrupts


def test_delayed_and_nested() -> None:
    done = []

    def work() -> None:
        with delayed_interrupts():
            with delayed_interrupts():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_wait() -> None:
    done = []

    def work() -> None:
        with delayed_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_beside_an_error_is_not_lost() -> None:
    def work() -> None:
        with delayed_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("x")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_errors_pass() -> None:
    with pytest.raises(ValueError, match="x"), delayed_interrupts():
        raise ValueError("x")
    with delayed_interrupts():
        pass

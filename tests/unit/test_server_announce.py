"""What a server says of itself when it listens: a JSON line for programs, and for people who may come in."""

from __future__ import annotations

import json
import socket

import pytest

from ostinato.server.run import _announce


@pytest.mark.parametrize(
    ("address", "guarded", "open_to_all"),
    [("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False)],
)
def test_a_server_open_to_all_says_so(
    capsys: pytest.CaptureFixture[str], address: str, guarded: bool, open_to_all: bool
) -> None:
    with socket.socket() as listener:
        listener.bind((address, 0))
        _announce(listener, "mine", guarded=guarded)
        port = listener.getsockname()[1]
    told = capsys.readouterr()
    line = {"event": "listening", "url": f"http://{address}:{port}", "model": "mine"}
    assert json.loads(told.out) == line
    assert ("there is no key (OSTINATO_API_KEY)" in told.err) == open_to_all
    assert f"dashboard at http://{address}:{port}, API under" in told.err

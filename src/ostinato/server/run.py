"""`serve`: bind, run, end in order.

    bind ─▶ engine starts ─▶ serve ──SIGTERM──▶ no new requests, running ones finish ─▶ engine stops ─▶ exit 0

Knows nothing of routes. Invariants: an address that cannot be had is told before a model is loaded; a second signal
ends the server at once; no exit leaves an engine process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.types import ASGIApp

from ostinato.config import EngineConfig, ServerConfig
from ostinato.errors import ConfigError
from ostinato.server.app import build_app
from ostinato.server.connection import BoundedHttp
from ostinato.server.service import Service
from ostinato.server.supervisor import ENGINE_MODULE

ENGINE_LOST = 1
KEEP_ALIVE_S = 75
"""Longer than clients' pools and proxies keep a connection, so that it is not closed just when they use it again."""

_BACKLOG = 2048


class _Uvicorn(uvicorn.Server):
    """uvicorn with signals that end in exit status 0: they are handled here, not raised again at the end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self.end)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def end(self) -> None:
        """Finish what runs and exit; a second time, exit at once."""
        running = self._service.client.in_flight
        if running and not self.should_exit:
            seconds = self.config.timeout_graceful_shutdown
            print(
                f"ostinato: ending; completions in flight ({running}) have {seconds} s (a second signal ends at once)",
                file=sys.stderr,
            )
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.draining = True


def serve(config: EngineConfig, options: ServerConfig, engine_module: str = ENGINE_MODULE) -> int:
    """Serve until told to stop; the exit status. Raises ConfigError when it cannot listen or start the engine.

    engine_module: what the engine process runs. No option of the command leads here; tests serve a broken engine by it.
    """
    logging.basicConfig(format="ostinato: %(message)s")
    _allow_many_files()
    listener = _bind(options)
    app, service = build_app(config, options, engine_module)
    return asyncio.Runner(loop_factory=_new_loop).run(_run(app, service, options, listener))


async def _run(app: ASGIApp, service: Service, options: ServerConfig, listener: socket.socket) -> int:
    server = _Uvicorn(
        uvicorn.Config(
            app,
            http=BoundedHttp,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=options.shutdown_timeout,
        ),
        service,
    )
    _announce(listener, service.model_name, guarded=bool(options.api_keys))
    watcher = asyncio.create_task(_end_when_over(server, service))
    await server.serve(sockets=[listener])
    watcher.cancel()
    failure = service.client.failure
    if failure is None:
        return 0
    if service.client.info is None:
        raise ConfigError(failure)
    print(f"ostinato: {failure}; giving up", file=sys.stderr)
    return ENGINE_LOST


async def _end_when_over(server: _Uvicorn, service: Service) -> None:
    """The engine is given up: so is the server, so that whoever watches it starts a new one."""
    await service.client.over.wait()
    server.end()


def _bind(options: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # at once, so that nobody who has read the announcement is refused
    except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host's name
        reason = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port} ({reason}); choose another --host or --port"
        ) from None
    listener.set_inheritable(False)
    return listener


def _announce(listener: socket.socket, model: str, *, guarded: bool) -> None:
    """The first line of stdout, for programs (JSON), and one on stderr, for people; another if all may come in."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    line = {"event": "listening", "url": url, "model": model}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
    print(
        f"ostinato: {model}: dashboard at {url}, API under {url}/v1 (Ctrl-C ends it)",
        file=sys.stderr,
    )
    if not guarded and not ipaddress.ip_address(host).is_loopback:
        print(
            f"ostinato: whoever reaches {host} may use it: there is no key (OSTINATO_API_KEY)",
            file=sys.stderr,
        )


def _allow_many_files() -> None:
    """Every connection is a file: take as many as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()

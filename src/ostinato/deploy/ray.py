"""Replicas of the whole server under Ray Serve: placed, scaled by load, restarted, behind Serve's own proxy.

    serve run ostinato.deploy.ray:app model=… dp_size=2 min_replicas=1 max_replicas=4

A replica is the application that `ostinato serve` runs, engine process included, without a socket of its own. Ray
decides how many there are and which one answers; ranks are for what a single copy needs, replicas for more copies.
Knows nothing of requests. Invariants: replicas share nothing, so how many there are changes no answer; Ray hears of a
replica only when its engine is loaded, so a copy that starts refuses nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.config import EngineConfig, ServerConfig
from ostinato.errors import ConfigError
from ostinato.server.app import build_app
from ostinato.server.client import EngineState
from ostinato.server.service import Service

_SCALING: Mapping[str, int] = {
    "min_replicas": 1,
    "max_replicas": 1,
    "target_ongoing_requests": 8,
    "upscale_delay": 10,
    "downscale_delay": 300,
    "cpus": 1,
}
"""Options of the deployment, beside those of engine and server, and their defaults."""

_SERVES_OWN = ("host", "port")
_LOOK_S = 0.05


def app(options: Mapping[str, Any]) -> serve.Application:
    """The application of `serve run`: `options` are those of EngineConfig, of ServerConfig, and

    min_replicas, max_replicas: bounds of autoscaling. target_ongoing_requests: requests in one replica from which on
    Ray adds another. upscale_delay, downscale_delay: seconds for which the load must ask for more, or for fewer.
    cpus: cores that Ray sets aside for a replica.

    The environment counts where this is called (OSTINATO_MODEL, OSTINATO_API_KEY); replicas, wherever they run, get
    what came of it. Raises ConfigError for an option that nobody knows, or for a value that cannot work.
    """
    scaling, engine_options, server_options = _split(options)
    engine, server = EngineConfig.of(**engine_options), ServerConfig.of(**server_options)
    built: list[Service] = []  # in a replica's process: its one service

    def build() -> Any:
        """In the replica's process: nothing of it could travel there."""
        application, service = build_app(engine, server)
        built.append(service)
        return WhenReady(application, service)

    class Replica:
        """One copy of the server; requests go to the application that Serve mounts on it."""

        def check_health(self) -> None:
            """Asked by Serve, which replaces a replica whose engine was given up: it would refuse everything."""
            for service in built:
                service.check_engine()

    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        name="ostinato",
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        autoscaling_config={
            "min_replicas": scaling["min_replicas"],
            "max_replicas": scaling["max_replicas"],
            "target_ongoing_requests": scaling["target_ongoing_requests"],
            "upscale_delay_s": scaling["upscale_delay"],
            "downscale_delay_s": scaling["downscale_delay"],
        },
        max_ongoing_requests=max(4 * scaling["target_ongoing_requests"], 8),
        ray_actor_options={"num_cpus": scaling["cpus"]},
    )
    bound: serve.Application = deployment.bind()
    return bound


class WhenReady:
    """An application whose start is over when its engine can answer, or failed when that one never will."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def tell(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                message = await self._started(message)
            await send(message)

        await self._app(scope, receive, tell)

    async def _started(self, message: Message) -> Message:
        while self._service.state == EngineState.STARTING.value:
            await asyncio.sleep(_LOOK_S)
        if self._service.state == EngineState.READY.value:
            return message
        return {
            "type": "lifespan.startup.failed",
            "message": f"{self._service.state}: the replica's log tells more",
        }


def _split(options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any], dict[str, Any]]:
    """Options by whom they are for. Serve's command line gives strings: numbers and switches are made of them."""
    scaling, engine, server = dict(_SCALING), {}, {}
    kinds = {spec.name: str(spec.type) for cls in (EngineConfig, ServerConfig) for spec in fields(cls)}
    engine_names = {spec.name for spec in fields(EngineConfig)}
    for name, value in options.items():
        if name in _SERVES_OWN:
            raise ConfigError(
                f"{name} is Serve's: replicas have no socket of their own; give it to `serve start`"
            )
        if name in scaling:
            scaling[name] = _number(name, value)
        elif name in engine_names:
            engine[name] = _typed(name, kinds[name], value)
        elif name in kinds:
            server[name] = _typed(name, kinds[name], value)
        else:
            raise ConfigError(f"unknown option {name!r}; the deployment's own are {', '.join(_SCALING)}")
    if scaling["min_replicas"] > scaling["max_replicas"]:
        raise ConfigError(
            f"min_replicas {scaling['min_replicas']} is over max_replicas {scaling['max_replicas']}; raise the latter"
        )
    return scaling, engine, server


def _typed(name: str, kind: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if kind.startswith("int"):
        return _number(name, value)
    if kind.startswith("float"):
        return _number(name, value, float)
    if kind.startswith("tuple[str"):
        return tuple(value.split(","))
    if kind.startswith("tuple[int"):
        return tuple(_number(name, part) for part in value.split(","))
    if kind == "bool":
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        return value.lower() == "true"
    return value


def _number(name: str, value: Any, kind: Callable[[Any], Any] = int) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        wanted = "whole number" if kind is int else "number"
        raise ConfigError(f"{name} must be a {wanted}, got {value!r}") from error

"""What routes share: the engine's client, the text side, the name of the model, the deadline of requests.

Knows nothing of routes or of how answers look. Invariant: whoever gets a `Reply` from `open` closes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path, PurePath

from ostinato import __version__
from ostinato.config import DEMO_NAME, EngineConfig, ServerConfig
from ostinato.engine.request import SamplingParams
from ostinato.errors import ParallelError
from ostinato.server.api_errors import ApiError, bad_field, shutting_down
from ostinato.server.client import EngineClient
from ostinato.server.dashboard.data import About, DashboardData
from ostinato.server.dashboard.recorder import Recorder
from ostinato.server.forms import AnswerForms
from ostinato.server.messages import EngineInfo
from ostinato.server.metrics import Metrics
from ostinato.server.prompts import Prompts
from ostinato.server.protocol import Sampling
from ostinato.server.replies import Receive, Reply
from ostinato.server.supervisor import ENGINE_MODULE
from ostinato.server.token_text import TokenText
from ostinato.text.tokenizer import Tokenizer

_TIMEOUT = "x-request-timeout"


class Service:
    """One server: a model, its engine, its text side."""

    def __init__(
        self, config: EngineConfig, options: ServerConfig, engine_module: str = ENGINE_MODULE
    ) -> None:
        self.config = config
        self.options = options
        self.started = time.time()
        self.model_name = options.served_model_name or model_name(config.model)
        self.metrics = Metrics(Recorder(self._about(None)))
        self.client = EngineClient(config, options, self.metrics, engine_module)
        self.draining = False
        self._prompts: Prompts | None = None
        self._tokens: TokenText | None = None
        self._forms: AnswerForms | None = None

    def start(self) -> None:
        """Start the engine; the text side is loaded once the engine has told where the model lies."""
        self.client.start(self._load_text)

    async def stop(self) -> None:
        await self.client.stop()
        if self._prompts is not None:
            self._prompts.close()

    async def _load_text(self, info: EngineInfo) -> None:
        if self._prompts is None:
            self.metrics.recorder.about = self._about(info)
            tokenizer = await asyncio.to_thread(Tokenizer.from_dir, info.directory)
            self._prompts, self._tokens = Prompts(tokenizer, info), TokenText(tokenizer)
            self._forms = AnswerForms(tokenizer, self.options)

    def _about(self, info: EngineInfo | None) -> About:
        """For the dashboard; empty while the engine is being loaded."""
        return About(
            model=self.model_name,
            version=__version__,
            started=self.started,
            chat=info is not None and info.chat,
            family=info.family if info else "",
            layers=info.layers if info else 0,
            experts=info.experts if info else None,
            dtype=info.dtype if info else "",
            backend=info.backend if info else "",
            ops=info.ops if info else "",
            threads=info.threads if info else 0,
            max_running_requests=info.max_running_requests if info else 0,
        )

    @property
    def state(self) -> str:
        """One word for people."""
        if self.draining:
            return "draining"
        return "engine lost" if self.client.over.is_set() else self.client.state.value

    def check_engine(self) -> None:
        """Raises ParallelError when the engine was given up: everything would be refused from then on."""
        if self.client.over.is_set():
            raise ParallelError("the engine was given up; the log tells why")

    def dashboard(self, after: int) -> DashboardData:
        """What a poll of the dashboard gets."""
        return self.metrics.recorder.data(after, state=self.state)

    @property
    def prompts(self) -> Prompts:
        """The text side. Raises ApiError 503 while the engine is not there."""
        self.check_ready()
        assert self._prompts is not None
        return self._prompts

    @property
    def token_text(self) -> TokenText:
        assert self._tokens is not None
        return self._tokens

    @property
    def forms(self) -> AnswerForms:
        """The forms that answers can have. Raises ApiError 503 while the engine is not there."""
        self.check_ready()
        assert self._forms is not None
        return self._forms

    def check_ready(self) -> None:
        """Raises ApiError 503 unless requests can be served."""
        if self.draining:
            raise shutting_down()
        self.client.check_ready()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def open(
        self,
        request: Sampling,
        field: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        receive: Receive,
    ) -> Reply:
        """Send checked prompts to the engine; the stream ends when the client disconnects. Raises ApiError."""
        self.prompts.check_lengths(field, prompts, params)
        reply = self.client.submit(
            prompts,
            [params] * len(prompts),
            priority=request.priority or 0,
            extra_key=request.cache_salt or "",
        )
        reply.watch(receive)
        return reply

    def deadline(self, wanted: str | None) -> float:
        """When a request that starts now must have ended, on the loop's clock.

        `wanted`: the header x-request-timeout, in seconds; it can only shorten the server's own. Raises ApiError 400.
        """
        limit = float(self.options.request_timeout)
        if wanted is not None:
            try:
                seconds = float(wanted)
            except ValueError:
                seconds = 0.0
            if not seconds > 0.0:  # NaN is not either
                raise bad_field(_TIMEOUT, f"{_TIMEOUT} must be a number of seconds above 0, got {wanted!r}")
            limit = min(limit, seconds)
        return asyncio.get_running_loop().time() + limit


def model_name(model: str | None) -> str:
    """What a model option is called in the API: the last part of a path, a hub id as it is."""
    if model is None:
        return DEMO_NAME
    path = PurePath(model)
    if not path.is_absolute() and not model.startswith((".", "~")):
        return model
    return path.name if path.name not in ("", "..") else Path(model).resolve().name or model

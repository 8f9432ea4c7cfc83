"""The routes that generate: `/v1/completions` and `/v1/chat/completions`.

    fields ─▶ SamplingParams, token ids ─▶ Reply ─▶ first news ─▶ event stream | whole answer

Waiting for the first news before answering lets a refusal be a status of its own. Knows nothing of the engine process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request, Response

from ostinato.engine.request import SamplingParams
from ostinato.server.answers import ChatChunk, ChatCompletion, Completion, CompletionChunk, event_stream
from ostinato.server.api_errors import ApiError
from ostinato.server.edge import record_of
from ostinato.server.forms import under_its_name
from ostinato.server.frames import AnswerHead, Frames, Shape
from ostinato.server.params import chat_params, check_stream_options, completion_params
from ostinato.server.protocol import ChatCompletionRequest, CompletionRequest, Sampling
from ostinato.server.replies import Reply
from ostinato.server.route import PROBLEMS, JsonRoute, service_of
from ostinato.server.service import Service
from ostinato.server.shapes import ChatShape, CompletionShape
from ostinato.server.sse import EventStream, timed_out

_T = TypeVar("_T")

router = APIRouter(route_class=JsonRoute, responses=PROBLEMS)

_COMPLETION: Final[dict[int | str, Any]] = {
    200: {"model": Completion, "content": {"text/event-stream": event_stream(CompletionChunk)}}
}
_CHAT: Final[dict[int | str, Any]] = {
    200: {"model": ChatCompletion, "content": {"text/event-stream": event_stream(ChatChunk)}}
}


@router.post("/v1/completions", response_model=None, responses=_COMPLETION)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    service = service_of(request)
    service.check_model(body.model)
    check_stream_options(body)
    params = completion_params(body)
    ask = _ask(request, body, "cmpl", "prompt")
    text_side = service.prompts
    special = body.add_special_tokens is not False
    prompts = await ask.in_time(text_side.completion(body.prompt, add_special_tokens=special))
    echoed = None
    if body.echo:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not isinstance(texts[0], str):
            texts = [await ask.in_time(text_side.echo(ids)) for ids in prompts]
        echoed = list(zip(texts, prompts, strict=True))
    shape = CompletionShape(
        service.token_text,
        n=params.n,
        logprobs=params.logprobs is not None,
        every_token=bool(body.return_token_ids),
        echoed=echoed,
        silent=service.token_text.special if params.skip_special_tokens else (),
    )
    return await _answer(ask, prompts, params, shape)


@router.post("/v1/chat/completions", response_model=None, responses=_CHAT)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    check_stream_options(body)
    form = service.forms.of(body)
    params = chat_params(body, form)
    ask = _ask(request, body, "chatcmpl", "messages")
    prompt, thinking = await ask.in_time(
        service.prompts.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=form.tools,
            variables=body.chat_template_kwargs,
        )
    )
    shape = ChatShape(
        service.token_text,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        every_token=bool(body.return_token_ids),
        new_parser=form.parser(thinking=thinking),
    )
    try:
        return await _answer(ask, [prompt], params, shape)
    except ApiError as error:
        raise under_its_name(error, body) from None


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request on its way through: `prefix` of its answer's id, `field` that holds its prompt, when it must end."""

    service: Service
    request: Request
    body: Sampling
    prefix: str
    field: str
    deadline: float

    async def in_time(self, work: Awaitable[_T]) -> _T:
        """What the work gives. Raises ApiError 504 when it takes longer than the request may."""
        try:
            async with asyncio.timeout_at(self.deadline):
                return await work
        except TimeoutError:
            raise timed_out() from None


def _ask(request: Request, body: Sampling, prefix: str, field: str) -> _Ask:
    service = service_of(request)
    deadline = service.deadline(request.headers.get("x-request-timeout"))
    return _Ask(service, request, body, prefix, field, deadline)


async def _answer(ask: _Ask, prompts: Sequence[list[int]], params: SamplingParams, shape: Shape) -> Response:
    options = ask.body.stream_options
    record = record_of(ask.request.scope)
    head = AnswerHead(
        answer_id=f"{ask.prefix}-{record.request_id}",
        created=int(time.time()),
        model=ask.service.model_name,
        n=params.n,
        num_choices=params.n * len(prompts),
        prompt_tokens=sum(len(ids) for ids in prompts),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(ask.body.return_token_ids),
        fingerprint=None if ask.service.client.info is None else ask.service.client.info.fingerprint,
    )
    record.prompt_tokens = head.prompt_tokens
    record.user = ask.body.user or ask.body.safety_identifier
    frames = Frames(head, shape)
    reply = ask.service.open(ask.body, ask.field, prompts, params, ask.request.receive)

    def note() -> None:
        record.completion_tokens, record.finish_reasons = frames.completion_tokens, frames.finish_reasons

    try:
        async with asyncio.timeout_at(ask.deadline):
            if ask.body.stream:
                first = await reply.take()
                return EventStream(reply, frames, first, ask.deadline, note)
            return await _whole(reply, frames)
    except TimeoutError:
        reply.close()
        raise timed_out() from None
    except BaseException:
        reply.close()
        raise
    finally:
        note()


async def _whole(reply: Reply, frames: Frames) -> Response:
    body = frames.body(await reply.take_all())
    reply.close()
    return Response(body, media_type="application/json")

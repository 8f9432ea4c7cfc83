"""The routes that tell and convert: models, tokens, health, metrics.

Knows nothing of generation.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ostinato import __version__
from ostinato.server.answers import Detokenized, ModelCard, ModelList, Status, Tokenized, Version
from ostinato.server.api_errors import bad_field, engine_down
from ostinato.server.exposition import CONTENT_TYPE, Exposition
from ostinato.server.protocol import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from ostinato.server.route import PROBLEMS, JsonRoute, service_of
from ostinato.server.service import Service

router = APIRouter(route_class=JsonRoute, responses=PROBLEMS)


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    """The models that are served: one."""
    return ModelList(object="list", data=[_card(service_of(request))])


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> ModelCard:
    """One model."""
    service = service_of(request)
    service.check_model(model)
    return _card(service)


def _card(service: Service) -> ModelCard:
    info = service.client.info
    return ModelCard(
        id=service.model_name,
        object="model",
        created=int(service.started),
        owned_by="ostinato",
        max_model_len=None if info is None else info.context_length,
    )


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> None:
    """Not there: the models served here generate text."""
    service = service_of(request)
    service.check_model(body.model)
    raise bad_field("model", f"the model {service.model_name!r} generates text and gives no embeddings")


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
    """Token ids of a text, or of a conversation through the chat template."""
    service = service_of(request)
    service.check_model(body.model)
    prompts = service.prompts
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if body.messages is not None:
        ids, _ = await prompts.chat(
            body.messages, add_generation_prompt=body.add_generation_prompt is not False
        )
    else:
        (ids,) = await prompts.completion(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    texts = [service.token_text.of(token)[0] for token in ids] if body.return_token_strs else None
    return Tokenized(
        tokens=ids, count=len(ids), max_model_len=prompts.limits.context_length, token_strs=texts
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
    """The text of token ids."""
    service = service_of(request)
    service.check_model(body.model)
    return Detokenized(prompt=await service.prompts.decode(body.tokens))


@router.get("/health")
async def health(request: Request) -> Status:
    """Whether the server lives: it does while it loads or restarts its engine, not once it has given up."""
    if service_of(request).client.over.is_set():
        raise engine_down("the engine is down")
    return Status(status="ok")


@router.get("/ready")
async def ready(request: Request) -> Status:
    """Whether requests can be served now."""
    service_of(request).check_ready()
    return Status(status="ready")


@router.get("/version")
async def version() -> Version:
    """The server's version."""
    return Version(version=__version__)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    exposition = request.app.state.exposition
    assert isinstance(exposition, Exposition)
    return Response(exposition.text(), headers={"content-type": CONTENT_TYPE})

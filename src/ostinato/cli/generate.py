"""`ostinato generate`: one prompt, its text as it is generated, or one JSON object.

Must not import torch or the engine before the arguments were found good. Invariant: with `--json` stdout
holds one JSON object and nothing else.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ostinato.cli.flags import engine_flags, sampling_flags
from ostinato.cli.screen import lasting, note, open_engine
from ostinato.config import EngineConfig
from ostinato.errors import RequestError

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.request import CompletionOutput, RequestOutput, SamplingParams

DEFAULT_MAX_TOKENS = 128
MODEL_HELP = "Checkpoint directory, hub id or fetched model; the bundled demo when left out."


@engine_flags
@sampling_flags(max_tokens=DEFAULT_MAX_TOKENS)
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask it as a user's message, through the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt. The text streams to the terminal as it is generated."""
    config = EngineConfig.of(model=model, **engine)
    if system is not None and not chat:
        raise RequestError("--system needs --chat; a plain prompt has no system message")
    text = decoded(piped().read() if prompt == "-" else prompt)
    if not text:
        raise RequestError("the prompt is empty; give some text to continue")
    if "logprobs" in sampling and not as_json:
        raise RequestError("--logprobs needs --json; text has no place for them")
    from ostinato.engine.request import SamplingParams

    given = {"max_tokens": DEFAULT_MAX_TOKENS} | sampling
    SamplingParams(**given)  # refused here, before anything is loaded
    with lasting():
        import ostinato.engine.llm  # noqa: F401  (so that loading the model is timed without loading torch)

    started = time.perf_counter()
    with open_engine(config) as llm:
        loaded = time.perf_counter()
        params = llm.sampling_params(**given)
        outputs = _ask(llm, text, params, chat=chat, system=system)
        last, first_token = follow(outputs, echo=not as_json and params.n == 1)
        timings = Timings.of(last, started, loaded, first_token, time.perf_counter())
        if as_json:
            print(json.dumps(describe(last, timings, llm.stats()), ensure_ascii=False))
        elif params.n > 1:
            print("\n\n".join(f"[{choice.index}] {choice.text}" for choice in last.outputs))
        note(timings.line())


def piped() -> TextIO:
    """stdin before its first read: it passes on as they are the bytes that it cannot read, and `decoded` says which."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def decoded(text: str) -> str:
    """Text from the terminal or stdin, whose bytes Python passes on as they are where it could not read them."""
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(
            f"the prompt is not UTF-8: byte {error.start} is 0x{byte:02x}; convert it"
        ) from None


def _ask(
    llm: LLM, text: str, params: SamplingParams, *, chat: bool, system: str | None
) -> Iterator[RequestOutput]:
    if not chat:
        return llm.generate_stream(text, params)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_stream([*messages, {"role": "user", "content": text}], params)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one answer, and its decode speed (None with under two tokens)."""

    load_s: float
    first_token_s: float
    generate_s: float
    completion_tokens: int
    decode_tokens_per_s: float | None

    @classmethod
    def of(cls, last: RequestOutput, started: float, loaded: float, first: float, ended: float) -> Timings:
        """From clock readings; the first token belongs to the prefill, so it is no decode step."""
        tokens = sum(len(choice.token_ids) for choice in last.outputs)
        steps = tokens - len(last.outputs)
        speed = steps / (ended - first) if steps > 0 and ended > first else None
        return cls(loaded - started, first - loaded, ended - loaded, tokens, speed)

    def line(self) -> str:
        """For a person."""
        speed = "" if self.decode_tokens_per_s is None else f", {self.decode_tokens_per_s:.1f} tokens/s"
        return (
            f"{self.completion_tokens} tokens in {self.generate_s:.2f} s{speed} "
            f"(loaded in {self.load_s:.2f} s, first token after {self.first_token_s:.3f} s)"
        )


def follow(outputs: Iterator[RequestOutput], *, echo: bool) -> tuple[RequestOutput, float]:
    """Run a stream to its end, printing text as it comes; the last output and the time of the first token.

    Raises RequestError for an answer that ended in error.
    """
    last: RequestOutput | None = None
    first_token: float | None = None
    sent = 0
    try:
        for last in outputs:
            if first_token is None:
                first_token = time.perf_counter()
            if echo:
                text = last.outputs[0].text
                sys.stdout.write(text[sent:])
                sys.stdout.flush()
                sent = len(text)
    finally:
        close = getattr(outputs, "close", None)
        if close is not None:
            close()  # stopped early: the request is aborted now, not when it is collected
        if echo and sent:
            sys.stdout.write("\n")
            sys.stdout.flush()
    assert last is not None, "a stream has at least its final output"
    for choice in last.outputs:
        if choice.finish_reason == "error":
            raise RequestError(
                f"the answer could not be finished: {choice.stop_reason or 'a step has failed'}"
            )
    return last, first_token or time.perf_counter()


def describe(last: RequestOutput, timings: Timings, stats: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer; with `n` over 1 the first choice stands at the top and all of them in `choices`."""
    prompt_tokens = len(last.prompt_token_ids)
    value = _choice(last.outputs[0])
    if len(last.outputs) > 1:
        value["choices"] = [_choice(choice) for choice in last.outputs]
    value["usage"] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": timings.completion_tokens,
        "total_tokens": prompt_tokens + timings.completion_tokens,
    }
    value["timings"] = asdict(timings)
    value["stats"] = stats
    return value


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    value: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
    }
    if choice.logprobs is not None:
        value["logprobs"] = [
            {str(token_id): logprob.logprob for token_id, logprob in position.items()}
            for position in choice.logprobs
        ]
    return value

"""`ostinato chat`: a conversation, typed or piped (one message per line).

Must not import torch or the engine before the arguments were found good. Invariant: the history holds whole
turns only; a turn that failed or was interrupted leaves no half of itself behind.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli.flags import engine_flags, sampling_flags
from ostinato.cli.generate import MODEL_HELP, decoded, follow, piped
from ostinato.cli.screen import note, open_engine
from ostinato.config import EngineConfig
from ostinato.errors import OstinatoError

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.request import SamplingParams

DEFAULT_MAX_TOKENS = 512
COMMANDS = (
    "/quit ends, /reset forgets the turns, /system TEXT starts over with a system message, Ctrl-C stops"
)


@engine_flags
@sampling_flags(max_tokens=DEFAULT_MAX_TOKENS, without=("n", "logprobs"))
def chat(
    *,
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model; without a terminal, one message per line. /help lists the commands."""
    config = EngineConfig.of(model=model, **engine)
    from ostinato.engine.request import SamplingParams

    given = {"max_tokens": DEFAULT_MAX_TOKENS} | sampling
    SamplingParams(**given)  # refused here, before anything is loaded
    with open_engine(config) as llm:
        typed = sys.stdin.isatty()
        if typed:
            _line_editing()
            note(COMMANDS)
        else:
            piped()
        _converse(Conversation(llm, llm.sampling_params(**given), system), typed=typed)


class Conversation:
    """The turns so far; `ask` adds one."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self.start_over(system)

    def start_over(self, system: str | None) -> None:
        """Forget everything, and open with a system message if there is one."""
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.start_over(self._system)

    def ask(self, text: str) -> None:
        """Print the answer to a message as it comes, and remember both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        last, _ = follow(self._llm.chat_stream(messages, self._params), echo=True)
        self.messages = [*messages, {"role": "assistant", "content": last.outputs[0].text}]


def _converse(conversation: Conversation, *, typed: bool) -> None:
    while (line := _read(typed)) is not None:
        command, _, rest = line.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.start_over(rest)
        elif command.startswith("/"):
            unknown = "" if command == "/help" else f"{command} is unknown: "
            print(unknown + COMMANDS, file=sys.stderr)
        elif command:
            _take_turn(conversation, line.strip(), typed)


def _take_turn(conversation: Conversation, text: str, typed: bool) -> None:
    """A person can go on after an error or an interrupted answer; a pipe cannot."""
    try:
        conversation.ask(text)
    except OstinatoError as error:
        if not typed:
            raise
        hint = " (/reset forgets the turns so far)" if conversation.messages else ""
        print(f"error: {error}{hint}", file=sys.stderr)
    except KeyboardInterrupt:
        if not typed:
            raise


def _read(typed: bool) -> str | None:
    if not typed:
        return decoded(sys.stdin.readline()) or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _line_editing() -> None:
    """History and cursor keys in `input`, where Python was built with them."""
    try:
        import readline  # noqa: F401  (importing it is what installs it)
    except ImportError:
        return

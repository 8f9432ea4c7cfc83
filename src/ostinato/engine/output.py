"""From chosen tokens to what a caller sees: text, stop strings, log-probabilities, finish reasons.

One `OutputStream` follows one sequence. It knows the text layer and nothing of steps, pages or models.
Invariant: the joined deltas are the final text, and nothing is handed out that a stop string could take back.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.engine.delta import SequenceDelta, TokenLogprobs
from ostinato.engine.request import CompletionOutput, FinishReason, Logprob, SamplingParams
from ostinato.engine.sampler import Sampled
from ostinato.text.detokenizer import open_detokenizer
from ostinato.text.stop import StopSet, StopStream
from ostinato.text.tokenizer import Tokenizer


class OutputStream:
    """The visible side of one sequence: `push` a token, read `text`, `delta` and `finish_reason`."""

    __slots__ = (
        "_cumulative",
        "_detokenizer",
        "_logprobs",
        "_stops",
        "_taken",
        "_text",
        "_told",
        "_watches",
        "delta",
        "finish_reason",
        "index",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        stops: StopSet,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.delta = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = open_detokenizer(
            tokenizer, prompt_ids=prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stops = StopStream(
            stops, include=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )
        self._watches = bool(stops.stops)
        self._text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self._taken = 0  # tokens that deltas have handed out
        self._told = False  # whether a delta has handed out the end

    @property
    def text(self) -> str:
        """All text handed out so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def push(self, token_id: int, sampled: Sampled | None, *, ends_sequence: bool) -> bool:
        """Take the next token, and what was asked about it; True when a stop string has just been completed.

        `ends_sequence` marks a stop token: it counts as a token and has no text.
        """
        self.token_ids.append(token_id)
        if self._logprobs is not None:
            assert sampled is not None
            assert sampled.logprob is not None
            assert sampled.top_logprobs is not None
            self._logprobs.append(sampled.top_logprobs)
            self._cumulative += sampled.logprob
        text = "" if ends_sequence else self._detokenizer.push(token_id)
        if self._watches:
            text = self._stops.push(text, num_tokens=len(self.token_ids))
        if text:
            self._text.append(text)
            self.delta += text
        return self._watches and self._stops.matched is not None

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """The sequence has ended: flush what was held back, unless a stop string ended it. An error stays one."""
        if self.finish_reason is not None:
            return
        if self._stops.matched is None:
            rest = self._stops.push(self._detokenizer.finish(), num_tokens=len(self.token_ids))
            if self._stops.matched is None:
                rest += self._stops.finish()
            self._hand_out(rest)
        if self._stops.matched is not None and reason != "error":
            reason, stop_reason = "stop", self._stops.matched
        self.finish_reason, self.stop_reason = reason, stop_reason

    def take(self) -> CompletionOutput:
        """The state as a value; `delta` is what came since the last `take`."""
        output = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            delta=self.delta,
        )
        self.delta = ""
        return output

    def take_delta(self, request_id: str) -> SequenceDelta | None:
        """What came since the last `take_delta`, or None when nothing did. A caller uses this or `take`, not both."""
        first, self._taken = self._taken, len(self.token_ids)
        ended = self.finish_reason is not None and not self._told
        if first == self._taken and not self.delta and not ended:
            return None
        news = SequenceDelta(request_id, self.index, self.delta, self.token_ids[first:])
        self.delta = ""
        if ended:
            self._told = True
            news.finish_reason, news.stop_reason = self.finish_reason, self.stop_reason
        if self._logprobs is not None:
            news.logprobs = [as_rows(position) for position in self._logprobs[first:]]
        return news

    def _hand_out(self, text: str) -> None:
        if text:
            self._text.append(text)
            self.delta += text


def as_rows(position: dict[int, Logprob]) -> TokenLogprobs:
    """One position's log-probabilities as rows, in their order."""
    return [(token, value.logprob, value.rank) for token, value in position.items()]


def as_position(rows: TokenLogprobs) -> dict[int, Logprob]:
    """The other way round."""
    return {token: Logprob(logprob, rank) for token, logprob, rank in rows}

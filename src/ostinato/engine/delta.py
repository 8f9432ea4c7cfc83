"""What one step added to a request: only the news, in a form that crosses a process boundary cheaply.

The offline `RequestOutput` repeats all text and tokens each time; a server's streams need the difference. msgspec
structs encoded as arrays, since one is made per sequence and step. Invariant: the deltas of a sequence, joined, are its
final `CompletionOutput`.
"""

from __future__ import annotations

import msgspec

TokenLogprobs = list[tuple[int, float, int]]
"""One position: (token id, natural log-probability, rank) of the best tokens and of the chosen one."""


class SequenceDelta(msgspec.Struct, array_like=True):
    """News of completion `index` of a request: text, tokens, and, when it has ended, why.

    `done` is true with the last news of the whole request. `prompt_logprobs` (an entry per prompt token, None for the
    first) and `num_cached_tokens` come with the first news of the request.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    done: bool = False
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

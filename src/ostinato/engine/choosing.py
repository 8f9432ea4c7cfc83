"""From a step's result to the token of each of its sequences: the step's own choice, or the host's.

The host chooses where history, bias or a form bears on the choice, and computes log-probabilities. Knows nothing of
text. Invariant: the worker knows the tokens that are not the step's own, so the next step can go on from them.
"""

from __future__ import annotations

import math

from ostinato.engine.plan import ScheduledSequence
from ostinato.engine.sampler import Sampled, SampleInput, sample, with_logprobs
from ostinato.engine.sequence import Sequence
from ostinato.engine.worker import StepResult, Worker

NO_NUMBERS = (
    "the model's logits are no finite numbers; its weights are damaged, or overflow this dtype (try bfloat16)"
)


Sampling = dict[Sequence, Sampled]
"""Of sequences whose requests ask for more than the token: it, and what is told about it."""


def choose(result: StepResult, worker: Worker) -> tuple[dict[Sequence, int], Sampling]:
    """The token of each row that chooses one, in order; those that are not the step's own go back to the worker.

    A sequence whose first token comes from NaN or an infinity gets a `problem`: what follows would mean nothing. One
    whose form can be followed no further gets one, too.
    """
    chosen: dict[Sequence, int] = {}
    more: Sampling = {}
    others: list[int] = []
    for i, (row, token) in enumerate(zip(result.sampling, result.tokens, strict=True)):
        sequence = row.sequence
        chosen[sequence] = token
        if not sequence.output_token_ids and not math.isfinite(result.logits[i, token]):
            sequence.problem = NO_NUMBERS
        if sequence.bare:
            continue
        if sequence.by_step:
            more[sequence] = with_logprobs(result.logits[i], token, sequence.request.params.logprobs)
        else:
            others.append(i)
    if others:
        rows = [result.sampling[i] for i in others]
        sampled = sample(result.logits[others].cpu(), [_sample_input(row) for row in rows], worker.model.ops)
        for row, found in zip(rows, sampled, strict=True):
            chosen[row.sequence], more[row.sequence] = found.token_id, found
            matcher = row.sequence.matcher
            if matcher is not None:
                matcher.accept(found.token_id)
                row.sequence.problem = row.sequence.problem or matcher.problem
        worker.relay(list(chosen.values()))
    return chosen, more


def _sample_input(row: ScheduledSequence) -> SampleInput:
    sequence = row.sequence
    params = sequence.request.params
    blocked: frozenset[int] = frozenset()
    if len(sequence.output_token_ids) < params.min_tokens:
        blocked = sequence.stop_token_ids
    return SampleInput(
        params,
        sequence.seed,
        sequence.num_tokens,
        sequence.request.prompt_token_ids,
        sequence.output_token_ids,
        blocked,
        None if sequence.matcher is None else sequence.matcher.allowed(),
    )

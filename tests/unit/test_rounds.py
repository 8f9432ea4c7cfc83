"""What ranks tell each other: every sampling parameter survives, messages of any length, requests put together anew."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ostinato.engine.delta import SequenceDelta
from ostinato.engine.remote import RemoteRequest
from ostinato.engine.request import Logprob, Request, SamplingParams
from ostinato.engine.rounds import FRAME, Courier, News, Round, Submit, accepted, params_as_dict
from ostinato.parallel.shm import ShmGroup, create_memory, map_memory, shm_supported
from ostinato.parallel.watchdog import Watchdog

EVERYTHING = SamplingParams(
    n=2,
    max_tokens=7,
    min_tokens=1,
    temperature=0.5,
    top_p=0.9,
    top_k=11,
    min_p=0.1,
    seed=-(2**63),
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias={3: 1.5, 140: -100.0},
    stop=("a", "Ω"),
    stop_token_ids=(4, 5),
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    structured_outputs={"choice": ["yes", "no"]},
)


class _Whole(int):
    pass


class _Real(float):
    pass


class _Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "shown otherwise"


def _sent(rounds: list[Round]) -> list[Round]:
    """Rounds as the other of two ranks gets them."""
    fd = create_memory(2, capacity=1 << 12)
    groups = [
        ShmGroup(map_memory(fd, 2, capacity=1 << 12), r, (0, 1), Watchdog(20.0), capacity=1 << 12)
        for r in range(2)
    ]
    os.close(fd)
    leader, follower = map(Courier, groups)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(lambda: [follower.follow() for _ in rounds])
        for one in rounds:
            leader.lead(one)
        found = there.result()
    for group in groups:
        group.close()
    return found


@pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
def test_values_of_other_classes_are_sent_as_plain_ones() -> None:
    """One rank takes a float of NumPy's for a float, so several do, too; no request may end the engine."""
    params = SamplingParams(
        n=_Whole(2),
        temperature=np.float64(0.5),
        top_p=_Real(0.9),
        seed=_Whole(7),
        logit_bias={_Whole(3): np.float64(1.5)},
        stop=[_Text("a")],
        structured_outputs={"choice": [_Text("yes"), "no"]},
    )
    submit = Submit(1, _Text("r"), [1, _Whole(2)], params_as_dict(params), _Whole(-4), _Text("tenant"))
    (there,) = _sent([Round("step", [submit], [_Text("x")])])
    request = there.submits[0].request()
    assert request == Request("r", (1, 2), params, None, -4, "tenant")
    assert (type(request.params.temperature), type(request.params.seed)) == (float, int)
    assert [type(text) for text in (request.request_id, request.params.stop[0], there.aborts[0])] == [str] * 3
    assert (request.params.stop, there.aborts) == (("a",), ["x"])


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING], ids=["defaults", "everything"])
def test_requests_survive_the_wire(params: SamplingParams) -> None:
    submit = Submit(1, "r", [1, 2, 3], params_as_dict(params), -4, "tenant")
    (there,) = _sent([Round("step", [submit], ["x"])])
    assert there.submits[0].request() == Request("r", (1, 2, 3), params, None, -4, "tenant")
    assert there.aborts == ["x"]
    assert accepted(there.submits, 0) == []
    assert accepted(there.submits, 1) == there.submits


@pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
@pytest.mark.parametrize("length", [0, FRAME - 200, FRAME, 5 * FRAME])
def test_messages_of_any_length(length: int) -> None:
    fd = create_memory(3, capacity=1 << 12)
    groups = [
        ShmGroup(map_memory(fd, 3, capacity=1 << 12), r, (0, 1, 2), Watchdog(20.0), capacity=1 << 12)
        for r in range(3)
    ]
    os.close(fd)
    sent = [Round("step", [], ["x" * length]), Round("tell"), Round("stop")]

    def run(group: ShmGroup) -> tuple[list[Round], list[list[News]]]:
        courier, seen, told = Courier(group), [], []
        for round_ in sent:
            if group.rank == 0:
                courier.lead(round_)
            else:
                seen.append(courier.follow())
            # Only one of them has much to say.
            told.append(courier.gather(News([], b"y" * (length if group.rank == 1 else group.rank))))
        return seen, told

    with ThreadPoolExecutor(3) as pool:
        (_, told), *others = pool.map(run, groups)
    assert all(seen == sent for seen, _ in others)
    assert [[len(news.stats) for news in one] for one in told] == [[0, length, 2]] * 3


def test_a_request_from_its_news() -> None:
    request = Request("r", (1, 2), SamplingParams(n=2, logprobs=1, prompt_logprobs=1), "text")
    remote = RemoteRequest(request)
    rows = [[(7, -0.5, 1), (8, -0.9, 2)], [(8, -0.25, 1)]]
    remote.add(
        SequenceDelta(
            "r", 0, "ab", [8, 8], logprobs=rows, num_cached_tokens=16, prompt_logprobs=[None, [(2, -1.0, 3)]]
        )
    )
    remote.add(SequenceDelta("r", 1, "", [], finish_reason="length", logprobs=[]))
    first = remote.output()
    assert not first.finished
    assert first.prompt_logprobs is None, "only with the last output"
    assert first.outputs[0].delta == "ab"
    remote.add(SequenceDelta("r", 0, "c", [7], "stop", True, 7, logprobs=[[(7, -2.0, 4)]]))
    last = remote.output()
    assert last.finished
    assert (last.prompt, last.prompt_token_ids, last.num_cached_tokens) == ("text", (1, 2), 16)
    assert last.prompt_logprobs == (None, {2: Logprob(-1.0, 3)})
    one, two = last.outputs
    assert (one.text, one.delta, one.token_ids) == ("abc", "c", (8, 8, 7))
    assert one.cumulative_logprob == -0.9 - 0.25 - 2.0
    assert one.logprobs == (
        {7: Logprob(-0.5, 1), 8: Logprob(-0.9, 2)},
        {8: Logprob(-0.25, 1)},
        {7: Logprob(-2.0, 4)},
    )
    assert (one.finish_reason, one.stop_reason) == ("stop", 7)
    assert (two.finish_reason, two.token_ids) == ("length", ())


def test_what_ends_here_ends_with_a_reason() -> None:
    remote = RemoteRequest(Request("r", (1,), SamplingParams(n=2)))
    remote.add(SequenceDelta("r", 0, "a", [3], "stop"))
    assert [o.finish_reason for o in remote.end("abort").outputs] == ["stop", "abort"]
    assert remote.finished

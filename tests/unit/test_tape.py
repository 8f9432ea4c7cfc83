"""The tape: what it repeats, what it freezes, what it refuses. F7: a replay on new inputs equals eager on them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from ostinato.errors import CaptureError
from ostinato.graphs import EagerBackend, EagerStream, Stream, TapeBackend
from ostinato.graphs.audit import first_difference

torch.manual_seed(0)
WEIGHT = torch.randn(6, 4)
BIAS = torch.randn(6)
TABLE = torch.randn(5, 4)
NORM = torch.randn(4)

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def _views(x: torch.Tensor, i: torch.Tensor) -> Any:
    y = x * 2
    y.t()[1:].unsqueeze(0)[..., 0].mul_(3)
    return y, y.reshape(-1)[2:6], x.expand(2, *x.shape)[1].contiguous()


def _accumulate(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(4)
    for row in x.unbind(0):
        total += row
    return total


def _uninitialised(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = torch.empty(3, 4)
    out.copy_(x)
    other = torch.empty_like(out)
    torch.add(out, 1, out=other)
    return other


def _host_constant(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    start = torch.tensor([1.0, 2.0, 3.0, 4.0])
    start.add_(x[0])
    return start


def _set_items(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 5
    y[i[:2], 1] = x[i[:2], 2]
    y[1, :] += 1
    return y


def _factories(x: torch.Tensor, i: torch.Tensor) -> Any:
    rows = torch.arange(3, dtype=torch.float32)
    rows.mul_(x[:, 0])
    ones = x.new_ones(4) + torch.full((4,), 2.0) + torch.ones_like(x[0])
    ones *= x[1]
    return rows, ones, torch.arange(1, 9, 2) * i[:1]


def _in_place_only(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float64)
    y.relu_().add_(1).masked_fill_(y > 1.5, 0).sqrt_()
    y.index_add_(0, i, x.double())
    y.scatter_(1, i.unsqueeze(1), 9.0)
    return y


PROGRAMS: dict[str, Program] = {
    "elementwise": lambda x, i: torch.relu(x + 1) * x.sigmoid() - x / 3,
    "scalars": lambda x, i: 2 - x * 3 + torch.tensor(0.5),
    "views": _views,
    "accumulate": _accumulate,
    "uninitialised": _uninitialised,
    "host_constant": _host_constant,
    "set_items": _set_items,
    "factories": _factories,
    "in_place": _in_place_only,
    "linear": lambda x, i: F.linear(x, WEIGHT, BIAS),
    "matmul": lambda x, i: (x @ WEIGHT.t(), torch.einsum("ab,cb->ac", x, WEIGHT)),
    "bf16": lambda x, i: (x.bfloat16() @ WEIGHT.t().bfloat16()).float(),
    "bmm": lambda x, i: torch.matmul(x.expand(2, 3, 4), WEIGHT.t().expand(2, 4, 6)),
    "multi_output": lambda x, i: (
        *x.topk(2, -1),
        *x.sort(-1, descending=True),
        *x.max(0),
        *torch.std_mean(x, 1),
    ),
    "softmax": lambda x, i: (x.softmax(-1), x.log_softmax(0), x.logsumexp(1)),
    "norms": lambda x, i: (F.layer_norm(x, (4,), NORM), F.rms_norm(x, (4,), NORM), F.normalize(x)),
    "reductions": lambda x, i: (x.sum(), x.mean(1, keepdim=True), x.argmax(1), x.cumsum(0), x.amax((0, 1))),
    "joins": lambda x, i: (torch.cat([x, x * 2]), torch.stack([x[0], x[1]]), torch.hstack([x, x])),
    "splits": lambda x, i: [part + 1 for part in (x * 2).chunk(2, 1)],
    "index": lambda x, i: (x[i], x[:, i], torch.gather(x, 1, i.unsqueeze(1)), x.index_select(0, i)),
    "embedding": lambda x, i: F.embedding(i, TABLE),
    "masks": lambda x, i: (torch.where(x > 0, x, -x), x.masked_fill(x > 0, 7), (x > 0).sum(1), x.tril()),
    "dtypes": lambda x, i: (x.to(torch.int32), i.float(), x.double(), i.bool(), x.half()),
    "attention": lambda x, i: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3, is_causal=True),
    "foreach": lambda x, i: torch._foreach_add([x, x[0]], 2.0),
    "activations": lambda x, i: (F.gelu(x), F.silu(x), F.softplus(x), F.glu(x), torch.exp(x).rsqrt()),
    "convolution": lambda x, i: F.conv1d(x.unsqueeze(0), WEIGHT[:2, :3].reshape(1, 3, 2)),
    "integers": lambda x, i: (i // 2, i % 2, i << 1, i == 1, ~(i > 0)),
    "repeats": lambda x, i: (x.repeat(2, 1), torch.repeat_interleave(i, 2), x.roll(1, 0), x.flip(0)),
    "fixed_repeat": lambda x, i: torch.repeat_interleave(x, torch.tensor([1, 2, 0]), dim=0, output_size=3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_f7_replay_equals_eager(name: str) -> None:
    """F7: captured with one input, replayed on two others, bit for bit what eager gives, at fixed addresses."""
    program = PROGRAMS[name]
    x, i = torch.randn(3, 4), torch.tensor([0, 2, 1])
    tape = TapeBackend().capture(lambda stream: program(x, i), warmup=0)
    assert first_difference(tape.outputs, program(x, i)) is None
    addresses = [t.data_ptr() for t in _leaves(tape.outputs)]
    for index in ([1, 1, 2], [2, 0, 0]):
        x.copy_(torch.randn(3, 4))
        i.copy_(torch.tensor(index))
        expected = program(x, i)
        assert first_difference(tape.replay(), expected) is None
        assert first_difference(tape.replay(), expected) is None, "a second replay must not pile up"
    assert [t.data_ptr() for t in _leaves(tape.outputs)] == addresses


def _leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in _leaves(v)]


def test_views_and_uninitialised_memory_cost_no_call() -> None:
    x = torch.ones(3, 4)
    tape = TapeBackend().capture(lambda stream: torch.empty(4).copy_(x.t()[:, 0].view(4)), warmup=0)
    assert tape.trace == ("aten.copy_.default",)
    assert tape.num_launches == 0


@torch.library.custom_op("ostinato_test::no_out_form", mutates_args=())
def no_out_form(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x.sum(0)


@torch.library.custom_op("ostinato_test::mutates", mutates_args=("x",))
def mutates(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


def test_ops_without_an_out_form() -> None:
    x = torch.ones(2, 2)

    def program() -> Any:
        doubled, summed = no_out_form(x)
        kept = torch.zeros(2, 2)
        new = mutates(kept, doubled)
        return doubled, summed, kept, new

    tape = TapeBackend().capture(lambda stream: program(), warmup=0)
    x.copy_(torch.arange(4.0).view(2, 2))
    assert first_difference(tape.replay(), program()) is None


def test_python_scalars_are_frozen() -> None:
    x, scale = torch.ones(2), [2.0]
    tape = TapeBackend().capture(lambda stream: x * scale[0], warmup=0)
    scale[0] = 100.0
    x.fill_(3)
    assert tape.replay().tolist() == [6, 6]


def test_inputs_that_are_rebound_are_not_followed() -> None:
    """Addresses are fixed: a new tensor under the same name is not seen, a write into the old one is."""
    inputs = {"x": torch.ones(2)}
    tape = TapeBackend().capture(lambda stream: inputs["x"] + 1, warmup=0)
    old = inputs["x"]
    inputs["x"] = torch.full((2,), 50.0)
    assert tape.replay().tolist() == [2, 2]
    old.fill_(7)
    assert tape.replay().tolist() == [8, 8]


def test_memory_of_a_tape_is_never_reused() -> None:
    """Intermediates and arguments are held strongly, after everything else has let go of them."""

    def capture() -> Any:
        x = torch.ones(1000)
        kernel_input = x * 2

        def add_into(out: torch.Tensor, y: torch.Tensor) -> None:
            out.add_(y)

        def program(stream: Stream) -> torch.Tensor:
            out = torch.zeros(1000)
            stream.launch(add_into, out, kernel_input + 1)
            return out.view(10, 100)[0] + 1

        return TapeBackend().capture(program, warmup=0)

    tape = capture()
    gc.collect()
    junk = [torch.full((1000,), -1.0) for _ in range(50)]
    assert tape.replay().tolist() == [4.0] * 100
    assert len(junk) == 50


# --- launches -----------------------------------------------------------------------------------------------


def double(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2, out=out)


def data_dependent(x: torch.Tensor, out: torch.Tensor, calls: list[int]) -> None:
    """Host reads, shapes that follow data, fresh memory: all fine in the body of a kernel."""
    calls.append(int(x.sum().item()))
    positive = x[x > 0]
    out.zero_()
    out[: positive.numel()] = positive + torch.tensor(x.tolist()).max() + float(np.asarray(x.numpy()).min())


def test_launches_and_torch_ops_interleave_in_order() -> None:
    x, a, b = torch.ones(3), torch.empty(3), torch.empty(3)

    def program(stream: Stream) -> torch.Tensor:
        stream.launch(double, x, a)
        middle = a + 1
        stream.launch(double, middle, b)
        return b - a

    tape = TapeBackend().capture(program, warmup=0)
    assert tape.trace == ("double", "aten.add.Tensor", "double", "aten.sub.Tensor")
    assert tape.num_launches == 2
    for value in (2.0, 5.0):
        x.fill_(value)
        assert tape.replay().tolist() == program(EagerStream()).tolist() == [2 * value + 2] * 3


def test_the_body_of_a_kernel_is_its_own_affair() -> None:
    x, out, calls = torch.tensor([1.0, -2.0, 3.0]), torch.empty(3), []
    tape = TapeBackend().capture(lambda stream: stream.launch(data_dependent, x, out, calls), warmup=0)
    assert tape.trace == ("data_dependent",)
    x.copy_(torch.tensor([4.0, 5.0, -6.0]))
    tape.replay()
    assert calls == [2, 3]
    assert out.tolist() == [4 + 5 - 6, 5 + 5 - 6, 0]


def test_a_launch_inside_a_kernel_belongs_to_it() -> None:
    x, out, seen = torch.ones(2), torch.zeros(2), []

    def outer(stream: Stream) -> None:
        seen.append(1)
        stream.launch(double, x, out)

    tape = TapeBackend().capture(lambda stream: stream.launch(outer, stream), warmup=0)
    assert tape.num_launches == 1
    x.fill_(4)
    tape.replay()
    assert (out.tolist(), len(seen)) == ([8, 8], 2)


class Bindable:
    """A kernel with a cheaper form for the same arguments again."""

    def __init__(self) -> None:
        self.direct = 0

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.direct += 1
        double(x, out)

    def bind(self, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        return partial(double, x, out)


def test_kernels_may_bind_their_arguments() -> None:
    kernel, x, out = Bindable(), torch.ones(2), torch.zeros(2)
    tape = TapeBackend().capture(lambda stream: stream.launch(kernel, x, out), warmup=0)
    assert (tape.trace, kernel.direct) == (("Bindable",), 1)
    x.fill_(3)
    tape.replay()
    assert out.tolist() == [6, 6]
    assert kernel.direct == 1, "a replay takes the bound form"


def test_neighbours_that_can_be_chained_become_one_call() -> None:
    """In order, without those of another chain; names and launches are still told one by one."""
    chained: list[int] = []

    class Bound:
        def __init__(self, out: torch.Tensor, step: int) -> None:
            self.out, self.step = out, step

        def __call__(self) -> None:
            self.out.mul_(2).add_(self.step)

        @staticmethod
        def chain(calls: list[Bound]) -> Callable[[], None]:
            chained.append(len(calls))
            return lambda: [call() for call in calls] and None

    class Kernel:
        def __call__(self, out: torch.Tensor, step: int) -> None:
            self.bind(out, step)()

        def bind(self, out: torch.Tensor, step: int) -> Bound:
            return Bound(out, step)

    def program(stream: Stream) -> torch.Tensor:
        for step in (1, 2, 3):
            stream.launch(Kernel(), out, step)
        stream.launch(torch.Tensor.neg_, out)
        stream.launch(Kernel(), out, 4)
        out.add_(0.5)
        stream.launch(Kernel(), out, 5)
        stream.launch(Kernel(), out, 6)
        return out

    out = torch.ones(2)
    tape = TapeBackend().capture(program, warmup=0)
    first, launches = out.clone(), tape.num_launches
    assert chained == [3, 2]
    whole = TapeBackend().capture(lambda stream: stream.launch(Kernel(), out, 1), warmup=0)
    out.fill_(2.0)
    whole.replay()
    assert out.tolist() == [5.0, 5.0], "a tape of one such call is that call"
    assert launches == 7
    assert len(tape.trace) == 8
    out.fill_(1.0)
    assert torch.equal(tape.replay(), first)


def test_warmups_run_eagerly_before_the_recording() -> None:
    capturing: list[bool] = []
    TapeBackend().capture(lambda stream: capturing.append(stream.capturing), warmup=2)
    assert capturing == [False, False, True]


def test_weights_that_require_gradients() -> None:
    x = torch.ones(2, 4)
    weight = torch.nn.Parameter(WEIGHT.clone())
    tape = TapeBackend().capture(lambda stream: F.linear(x, weight), warmup=1)
    x.fill_(2)
    assert torch.equal(tape.replay(), F.linear(x, weight).detach())
    assert not tape.outputs.requires_grad


# --- refusals -----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Program, str]] = {
    "item": (lambda x, i: x[0, 0].item(), "_local_scalar_dense"),
    "float": (lambda x, i: float(x[0, 0]), "_local_scalar_dense"),
    "if": (lambda x, i: 1 if (x > 0).any() else 2, "_local_scalar_dense"),
    "scalar_index": (lambda x, i: x[i[0]], "_local_scalar_dense"),
    "tolist": (lambda x, i: x.tolist(), "tolist"),
    "numpy": (lambda x, i: x.numpy(), "numpy"),
    "asarray": (lambda x, i: np.asarray(x), "__array__"),
    "dlpack": (lambda x, i: np.from_dlpack(x), "__dlpack__"),
    "equal": (lambda x, i: torch.equal(x, x), "aten.equal"),
    "nonzero": (lambda x, i: x.nonzero(), "aten.nonzero"),
    "masked_select": (lambda x, i: x.masked_select(x > 0), "aten.masked_select"),
    "mask_index": (lambda x, i: x[x > 0], "aten.index"),
    "unique": (lambda x, i: i.unique(), "_unique2"),
    "bincount": (lambda x, i: i.bincount(), "aten.bincount"),
    "repeat_interleave": (lambda x, i: x.repeat_interleave(i, 0), "repeat_interleave"),
    "rand": (lambda x, i: torch.rand(3), "aten.rand"),
    "normal": (lambda x, i: torch.zeros(3).normal_(), "aten.normal_"),
    "multinomial": (lambda x, i: x.abs().multinomial(1), "aten.multinomial"),
    "dropout": (lambda x, i: F.dropout(x, 0.5), "aten.bernoulli_"),
    "resize": (lambda x, i: torch.zeros(3).resize_(4), "aten.resize_"),
    "transpose_": (lambda x, i: (x + 1).t_(), "aten.t_"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_repeat_is_refused_by_name(name: str) -> None:
    program, op = REFUSED[name]
    x, i = torch.ones(3, 4), torch.tensor([0, 2, 1])
    with pytest.raises(CaptureError, match=op):
        TapeBackend().capture(lambda stream: program(x, i), warmup=0)
    # The modes are gone with the failed capture.
    assert x.tolist()[0] == [1, 1, 1, 1]
    assert float(torch.ones(2).sum()) == 2


def test_a_failing_kernel_leaves_no_trace() -> None:
    def broken(x: torch.Tensor) -> None:
        raise ZeroDivisionError("kernel")

    with pytest.raises(ZeroDivisionError):
        TapeBackend().capture(lambda stream: stream.launch(broken, torch.ones(1)), warmup=0)
    assert torch.ones(2).numpy().sum() == 2


# --- the eager backend --------------------------------------------------------------------------------------


def test_the_eager_backend_follows_everything() -> None:
    x, out = torch.ones(2), torch.zeros(2)
    scale = [1.0]

    def program(stream: Stream) -> torch.Tensor:
        stream.launch(double, x, out)
        return out * scale[0]

    graph = EagerBackend().capture(program, warmup=1)
    assert (graph.trace, graph.num_launches) == (("double",), 1)
    scale[0] = 10.0
    assert graph.replay().tolist() == graph.outputs.tolist() == [20, 20]
    assert not EagerBackend.captures


def test_dropping_a_tape_frees_its_memory() -> None:
    x = torch.ones(4)
    tape = TapeBackend().capture(lambda stream: x * 2, warmup=0)
    held = weakref.ref(tape.outputs)
    assert held() is not None
    del tape
    gc.collect()
    assert held() is None

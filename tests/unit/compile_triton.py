"""Compiles every launch of the Triton kernels for a GPU that is not there, as far as machine code. A script, run by a
test in a process of its own, since kernels are either interpreted or compiled.

Prints one line a compiled kernel. Launches are caught where Triton would make them; integers that are 1 are constants,
as in a real launch.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "enable_reflect_ftz")


class Compiler:
    """What stands in for a launch: compiles the kernel for the arguments, once for each signature."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    def launch(self, kernel: JITFunction[Any], grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        assert grid
        assert all(n > 0 for n in grid), f"{kernel.__name__} over {grid}"
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        signature, constants = {}, {}
        for param in kernel.params:
            value = values[param.name]
            if param.is_constexpr or (isinstance(value, int) and value == 1):
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = TYPES[value.dtype]
            else:
                signature[param.name] = (
                    "fp32" if isinstance(value, float) else "i64" if value >> 31 else "i32"
                )
        key = f"{kernel.__name__} {signature} {constants} {options}"
        if key not in self.done:
            made = triton.compile(ASTSource(kernel, signature, constants), target=TARGET, options=options)
            for rounded in ("div.rn.ftz", "sqrt.rn.ftz"):
                assert rounded not in made.asm["ptx"], f"{kernel.__name__} would flush subnormals: {rounded}"
            self.done[key] = len(made.asm["cubin"])
            print(kernel.__name__, made.metadata.shared, flush=True)


def launches(dtype: torch.dtype) -> None:
    """One launch of everything, of the shapes of a small model in `dtype`."""
    from ostinato.ops.cuda.opset import TritonOps
    from ostinato.ops.opset import RoutingRule

    ops, T, H, W, E = TritonOps("cpu"), 3, 128, 64, 8
    x, live, ids = torch.zeros(T, H, dtype=dtype), torch.ones(1, dtype=torch.int32), torch.zeros(T).long()
    weight, out = torch.zeros(H, dtype=dtype), torch.zeros(T, H, dtype=dtype)
    for count in (None, live):
        ops.rms_norm(x, weight, 1e-6, out, count)
        ops.linear(x, ops.pack_linear(torch.zeros(H, H, dtype=dtype), weight), out, count)
    ops.add_rms_norm(x, out, weight, 1e-6, out, live)
    ops.add_layer_norm(x, out, weight, weight, 1e-6, out, live)
    ops.linear(x, ops.pack_gated(torch.zeros(2 * W, H, dtype=dtype)), torch.zeros(T, W, dtype=dtype), live)
    ops.linear(x, ops.pack_linear(torch.zeros(E, H, dtype=dtype)), torch.zeros(T, E), live)
    ops.linear(x, ops.pack_linear(torch.zeros(1, H, dtype=dtype)), torch.zeros(T, 1), live)
    q, k, table = torch.zeros(T, 4, 80, dtype=dtype), torch.zeros(T, 1, 80, dtype=dtype), torch.zeros(9, 32)
    ops.rope(q, k, ids, table, False, live)
    ops.norm_rope(q, k, weight[:80], weight[:80], 1e-6, ids, table, True, live)
    ops.embedding(ids, torch.zeros(10, H, dtype=dtype), out)
    ops.sigmoid_gated_add(x, torch.zeros(T, 1), x, out)
    ops.argmax(torch.zeros(T, 5000), ids, live)
    page_table = torch.zeros(4, 4, dtype=torch.int32)
    ops.advance(ids, ids, ids, ids, ids, page_table, 16, (ids, ids), live)
    experts = ops.pack_experts(torch.zeros(E, 2 * W, H, dtype=dtype), torch.zeros(E, H, W, dtype=dtype))
    shares, chosen = torch.zeros(T, 2), torch.zeros(T, 2, dtype=torch.int32)
    for on_input in (False, True):
        ops.moe_experts(x, shares, chosen, experts, on_input, out)
    ops.combine_slots(torch.zeros(6, H), chosen.long(), shares, out)
    load = torch.zeros(E, dtype=torch.int64)
    for scoring, renormalize in (("softmax", True), ("sqrtsoftplus", False), ("raw_logits", True)):
        kernel = ops.routing_kernel(RoutingRule(E, 2, scoring, renormalize))
        assert kernel is not None
        kernel(torch.zeros(T, E), shares, chosen, live, load, load[:1])
    grouped = RoutingRule(E, 2, "sigmoid", True, torch.zeros(E), 4, 2, 2.5, 1)
    kernel = ops.routing_kernel(grouped)
    assert kernel is not None
    kernel(torch.zeros(T, E), torch.zeros(T, 3), torch.zeros(T, 3, dtype=torch.int32), live, load, load[:1])
    ops.linear = TritonOps("cpu", exact=False).linear
    ops.linear(x, ops.pack_linear(torch.zeros(H, H, dtype=dtype)), out, live)


def attention(dtype: torch.dtype) -> None:
    """Prefill and decode of heads of usual sizes, with a window, with pages of several sizes."""
    from ostinato.attention.backend import AttentionLayer
    from ostinato.attention.triton import TritonAttention
    from ostinato.graphs.stream import EagerStream
    from ostinato.kv.pool import KVLayout, KVPool
    from ostinato.padding import StepMode

    for heads, dim, window in ((6, 80, 50), (1, 256, None)):
        layout = KVLayout(1, 1, dim, dtype, 16)
        kv = KVPool(layout, num_pages=3, max_requests=2, max_pages_per_request=64)
        backend = TritonAttention(kv)
        backend.init_graph_state(2, 4)
        q, k = torch.zeros(4, heads, dim, dtype=dtype), torch.zeros(4, 1, dim, dtype=dtype)
        for mode in (StepMode.EXTEND, StepMode.DECODE):
            view: Any = SimpleNamespace(
                mode=mode, out_cache_loc=torch.zeros(4).long(), req_pool_indices=torch.zeros(2).long()
            )
            layer = AttentionLayer(0, 0.1, window)
            backend.forward(EagerStream(), layer, q, k, k, view, torch.zeros_like(q))


def main() -> None:
    compiler = Compiler()
    JITFunction.__getitem__ = lambda kernel, grid: lambda *a, **n: compiler.launch(kernel, grid, *a, **n)
    for name in sys.argv[1:]:
        launches(getattr(torch, name))
        attention(getattr(torch, name))
    print("compiled", len(compiler.done))


if __name__ == "__main__":
    main()

"""Attention backends of other packages: found by entry point, declared by a table, adapted to the engine's protocol.

    [project.entry-points."ostinato.attention_backends"]
    mate = "mate_attention:PLUGIN"

Knows nothing of any backend. Invariant: what the engine asks of a plug-in's nature (captures, fill value, pads) is
answered by its declaration alone, which was checked before the plug-in was given any memory.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import torch

from ostinato.attention.backend import AttentionBackend, AttentionLayer, AttentionView, CaptureLimits, KVCache
from ostinato.attention.capabilities import AttentionCapabilities, AttentionNeeds, check_fit
from ostinato.errors import ConfigError
from ostinato.graphs.stream import Stream
from ostinato.padding import PadContract, StepMode, StepShape

GROUP = "ostinato.attention_backends"
BUILT_IN = ("auto", "cpu", "triton", "flash", "reference")


class AttentionKernels(Protocol):
    """What a plug-in computes; see `AttentionBackend` for each of these."""

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...
    def plan(self, view: AttentionView, shape: StepShape) -> None: ...
    @property
    def planned_lens(self) -> torch.Tensor | None: ...
    def forward(
        self,
        stream: Stream,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        view: AttentionView,
        out: torch.Tensor,
    ) -> None: ...


class AttentionPlugin(Protocol):
    """What an entry point names: a module, an object or a class with these two."""

    @property
    def capabilities(self) -> AttentionCapabilities: ...
    def build(self, kv: KVCache, needs: AttentionNeeds) -> AttentionKernels:
        """The kernels over this cache, whose memory and page table stay where they are; `needs` fit already."""
        ...


class DeclaredAttention:
    """`AttentionBackend` of kernels and what is declared of them."""

    def __init__(
        self, capabilities: AttentionCapabilities, kernels: AttentionKernels, device: torch.device
    ) -> None:
        self.capabilities = capabilities
        self._kernels = kernels
        self._device = device

    @property
    def name(self) -> str:
        return self.capabilities.name

    @property
    def pad_contract(self) -> PadContract:
        return self.capabilities.pad_contract

    @property
    def seq_len_fill_value(self) -> int:
        return self.capabilities.seq_len_fill_value

    def can_capture(self, mode: StepMode) -> bool:
        return mode in self.capabilities.captures

    @property
    def capture_limits(self) -> CaptureLimits:
        return self.capabilities.capture_limits

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._kernels.init_graph_state(max_bs, max_num_tokens)

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        self._kernels.plan(view, shape)

    @property
    def planned_lens(self) -> torch.Tensor | None:
        return self._kernels.planned_lens if self.capabilities.can_advance(self._device) else None

    def forward(
        self,
        stream: Stream,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        view: AttentionView,
        out: torch.Tensor,
    ) -> None:
        self._kernels.forward(stream, layer, q, k, v, view, out)


def build_attention(plugin: AttentionPlugin, needs: AttentionNeeds, kv: KVCache) -> AttentionBackend:
    """The plug-in's backend over `kv`. Raises ConfigError when its declaration does not cover `needs`."""
    capabilities = plugin.capabilities
    check_fit(capabilities, needs)
    return DeclaredAttention(capabilities, plugin.build(kv, needs), needs.device)


def find_plugin(name: str) -> AttentionPlugin:
    """The plug-in of an installed package.

    Raises ConfigError for a name that nobody has, that two packages have, or whose package cannot be imported.
    """
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        others = sorted({entry.name for entry in entry_points(group=GROUP)})
        raise ConfigError(
            f"attention_backend {name!r} is unknown; choose one of {', '.join((*BUILT_IN, *others))}, or install the "
            f"package that has it (entry point group {GROUP})"
        )
    if len({entry.value for entry in found}) > 1:
        values = ", ".join(sorted(entry.value for entry in found))
        raise ConfigError(
            f"attention_backend {name!r} is named by several packages ({values}); uninstall all but one"
        )
    return _load(found[0])


def _load(entry: EntryPoint) -> AttentionPlugin:
    try:
        plugin = entry.load()
    except Exception as error:  # whatever a foreign module raises when it is imported
        raise ConfigError(
            f"attention_backend {entry.name!r} ({entry.value}) cannot be loaded: {error}; repair its package, "
            "or uninstall it"
        ) from error
    if not isinstance(getattr(plugin, "capabilities", None), AttentionCapabilities) or not hasattr(
        plugin, "build"
    ):
        raise ConfigError(
            f"attention_backend {entry.name!r} ({entry.value}) has no AttentionCapabilities and build(kv, needs); see "
            "docs/attention-backends.md"
        )
    found: AttentionPlugin = plugin
    return found

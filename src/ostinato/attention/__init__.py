"""Attention over the paged KV cache: the backend protocol and its reference in plain torch.

Knows nothing of weights or schedulers. Invariant: keys and values are always read back from the pages, pads
come out as zeros and write to no live page.
"""

from ostinato.attention.backend import (
    AttentionBackend,
    AttentionLayer,
    AttentionView,
    CaptureLimits,
    KVCache,
)
from ostinato.attention.reference import ReferenceAttention

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionView",
    "CaptureLimits",
    "KVCache",
    "ReferenceAttention",
]

"""The op set of the decoder: a protocol, and its implementations with a plain torch twin as the oracle.

Knows nothing of models; kernels write into tensors they are given and are launched through a `Stream`.
Invariant: every kernel is row local, so what pad rows hold never reaches a real row.
"""

from ostinato.ops.opset import OpSet, PackedExperts, PackedLinear
from ostinato.ops.reference import ReferenceOps

__all__ = ["OpSet", "PackedExperts", "PackedLinear", "ReferenceOps"]

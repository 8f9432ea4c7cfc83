"""Ranks and what passes between them: the topology, collectives with a fixed order of sums, the step sync of
data-parallel ranks, and the launch of rank processes.

Knows nothing of models or requests. Invariant: whatever ranks decide together is a pure function of values that
all of them gathered, and every rank enters the same collectives in the same order.
"""

from ostinato.parallel.topology import Topology

__all__ = ["Topology"]

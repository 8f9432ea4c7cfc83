"""Running many copies of the server: one module for each system that places and scales them.

Each needs an extra of its own (`pip install ostinato[ray]`) and is imported by whoever uses it, by nothing else here.
Knows nothing of engines. Invariant: nothing of what such a system does well is made again.
"""

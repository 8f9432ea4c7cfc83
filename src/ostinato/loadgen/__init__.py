"""A load generator for OpenAI-compatible servers: what to send, when, and figures of what came back.

    workload ─▶ drive ─▶ client ─▶ outcomes ─▶ figures ─▶ JSON, plot

Knows nothing of the engine: it speaks HTTP to whatever server is there.
"""

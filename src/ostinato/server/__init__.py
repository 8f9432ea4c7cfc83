"""The HTTP server: an OpenAI-compatible endpoint in front of an engine that runs in its own process.

    client ─HTTP─▶ app (FastAPI) ─▶ EngineClient ═ZeroMQ ipc═▶ engine_process (Engine.step_deltas) ═▶ streams

Text becomes token ids here, on threads; the engine process gets ids and sends back text, tokens and reasons, one
message per step. Invariant: whatever a client does, the engine and other requests' streams go on.
"""

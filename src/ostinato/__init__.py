"""ostinato: an LLM inference engine whose answers repeat exactly, whatever is played around them."""

__version__ = "0.1.0"

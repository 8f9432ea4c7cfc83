"""Text on its way in and out: tokenizer, incremental detokenizer, chat templates, stop strings.

Knows nothing of models, batches or devices. Invariant of the way out: the joined stream is the final text.
"""

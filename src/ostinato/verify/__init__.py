"""`ostinato verify`: proof that a checkpoint in a deployment computes what it should, whatever is around a request.

findings.py: what a run found, as values        docs/verification.md: what each check can and cannot prove
"""

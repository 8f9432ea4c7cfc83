"""The exactness contract: a request's logits and tokens are the same bits, whatever is played around it.

    paths.py      models and instruction paths
    score.py      requests: prompts, lengths, ways of sampling
    stage.py      engines, watched at their logits
    axes.py       the axes of the contract, one check each
    report.py     comparison bit by bit, and what it says when bits differ
    programme.py  who is played in which setting: a sample of the product, or all of it with `--exhaustive`

`test_families` plays all of it, `test_real_models` SmolLM2, `test_any_schedule` whatever hypothesis thinks of, and
`test_faults` proves that each check notices an engine that breaks its axis. `test_kernels` and `test_attention` hold
single kernels to the same promise, without an engine.

`--exhaustive` takes some 50 minutes of one core; paths can run side by side (`-k portable-int8`). Settings that an
engine reads anew at each step share one engine there (`Setting.shared`); those of the sample have engines of their own.
"""

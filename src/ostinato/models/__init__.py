"""Models: from a Hugging Face checkpoint to a decoder that runs on views of padded batches.

    path or hub id --resolve_model--> directory --read_config--> ModelConfig --load_model--> CausalLM

Knows nothing of schedulers or sampling. Invariant: whatever of a checkpoint cannot be honoured is refused by
name.
"""

from ostinato.models.build import load_model
from ostinato.models.config import ModelConfig, MoEConfig, read_config
from ostinato.models.decoder import CausalLM
from ostinato.models.hub import resolve_model
from ostinato.models.layers import LayerSpec
from ostinato.models.parts import DecoderView

__all__ = [
    "CausalLM",
    "DecoderView",
    "LayerSpec",
    "MoEConfig",
    "ModelConfig",
    "load_model",
    "read_config",
    "resolve_model",
]

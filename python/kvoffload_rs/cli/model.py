"""A tiny Llama with random weights, made on the spot: nothing is downloaded.

The weights are drawn so that greedy answers vary from prompt to prompt and depend on the whole
prompt: attention is sharp (wide queries and keys), so a block whose KV is wrong changes the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2000
"""Token ids the model knows; ids below :data:`FIRST_TOKEN` are never used in prompts."""

FIRST_TOKEN = 3
MAX_POSITIONS = 8192

_HIDDEN = 256
_LAYERS = 4
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 64
_INTERMEDIATE = 512


def kv_bytes_per_token() -> int:
    """Bytes of KV that one token takes in all layers (float32 keys and values)."""
    return 2 * _LAYERS * _KV_HEADS * _HEAD_DIM * 4


def config() -> dict[str, Any]:
    """The model's ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_model(directory: Path, seed: int) -> Path:
    """Write ``config.json`` and ``model.safetensors`` into ``directory`` and return it.

    The same seed gives the same weights on every machine. Needs numpy and safetensors, which come
    with vLLM; imported here so that the command line works without them.
    """
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, gain: float) -> Any:
        """Weights that give outputs of standard deviation ``gain`` for inputs of deviation 1."""
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)

    ones: Any = np.ones(_HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB_SIZE, _HIDDEN), dtype=np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": normal(VOCAB_SIZE, _HIDDEN, 4.0),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        mlp = prefix + "mlp."
        weights[prefix + "input_layernorm.weight"] = ones
        weights[prefix + "post_attention_layernorm.weight"] = ones
        weights[attention + "q_proj.weight"] = normal(_HEADS * _HEAD_DIM, _HIDDEN, 1.6)
        weights[attention + "k_proj.weight"] = normal(_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.6)
        weights[attention + "v_proj.weight"] = normal(_KV_HEADS * _HEAD_DIM, _HIDDEN, 2.0)
        weights[attention + "o_proj.weight"] = normal(_HIDDEN, _HEADS * _HEAD_DIM, 2.0)
        weights[mlp + "gate_proj.weight"] = normal(_INTERMEDIATE, _HIDDEN, 1.0)
        weights[mlp + "up_proj.weight"] = normal(_INTERMEDIATE, _HIDDEN, 1.0)
        weights[mlp + "down_proj.weight"] = normal(_HIDDEN, _INTERMEDIATE, 1.0)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(), indent=1), encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory

"""Llama models small enough for a test, with random weights whose outputs vary. No download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 2000
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 4, 2, 32
SLIDING_WINDOW = 64

# What differs between the models: some layers of the hybrid one look back a few tokens only, which
# gives the engine a second KV cache group.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {
        "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
        "sliding_window": SLIDING_WINDOW,
    },
}


def make_model(kind: str, parent: Path) -> Path:
    """Write the model ``kind`` below ``parent``, unless it is there, and return its folder."""
    import torch
    from safetensors.torch import save_file

    folder = parent / kind
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
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
    (folder / "config.json").write_text(json.dumps(config | KINDS[kind], indent=1))
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    state = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN, 0.5),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        state[prefix + "input_layernorm.weight"] = torch.ones(HIDDEN)
        state[prefix + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        # Attention weights of this size let what was read from the KV cache decide the next token.
        state[prefix + "self_attn.q_proj.weight"] = random(HEADS * HEAD_DIM, HIDDEN, 0.3)
        state[prefix + "self_attn.k_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN, 0.3)
        state[prefix + "self_attn.v_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN, 0.3)
        state[prefix + "self_attn.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM, 0.3)
        state[prefix + "mlp.gate_proj.weight"] = random(2 * HIDDEN, HIDDEN, 0.1)
        state[prefix + "mlp.up_proj.weight"] = random(2 * HIDDEN, HIDDEN, 0.1)
        state[prefix + "mlp.down_proj.weight"] = random(HIDDEN, 2 * HIDDEN, 0.1)
    partial = weights.with_suffix(".partial")
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.rename(weights)
    return folder

"""Models small enough for a test, with random weights whose outputs vary. No download."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Random = Callable[[int, int, float], torch.Tensor]
    Weights = dict[str, torch.Tensor]

VOCAB = 2000
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 4, 2, 32
SLIDING_WINDOW = 64
# What attention with a latent (MLA) keeps of a token. vLLM's CPU kernel takes these sizes only.
LATENT, ROPE_DIM = 512, 64

EVERY_MODEL: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
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
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": HEAD_DIM,
    "first_k_dense_replace": LAYERS,  # no layer has experts, which the CPU build need not have
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": HIDDEN,
}

# What the models are. Some layers of the hybrid one look back a few tokens only, which gives the
# engine a second KV cache group. The KV of the one with MLA is the same on every rank.
KINDS: dict[str, dict[str, Any]] = {
    "full": LLAMA,
    "hybrid": LLAMA
    | {
        "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2),
        "sliding_window": SLIDING_WINDOW,
    },
    "mla": DEEPSEEK,
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
    (folder / "config.json").write_text(json.dumps(EVERY_MODEL | KINDS[kind], indent=1))
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    attention = _latent_attention if kind == "mla" else _attention
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
        for name, weight in attention(random).items():
            state[f"{prefix}self_attn.{name}.weight"] = weight
        state[prefix + "mlp.gate_proj.weight"] = random(2 * HIDDEN, HIDDEN, 0.1)
        state[prefix + "mlp.up_proj.weight"] = random(2 * HIDDEN, HIDDEN, 0.1)
        state[prefix + "mlp.down_proj.weight"] = random(HIDDEN, 2 * HIDDEN, 0.1)
    partial = weights.with_suffix(".partial")
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.rename(weights)
    return folder


def _attention(random: Random) -> Weights:
    return {
        "q_proj": random(HEADS * HEAD_DIM, HIDDEN, 0.3),
        "k_proj": random(KV_HEADS * HEAD_DIM, HIDDEN, 0.3),
        "v_proj": random(KV_HEADS * HEAD_DIM, HIDDEN, 0.3),
        "o_proj": random(HIDDEN, HEADS * HEAD_DIM, 0.3),
    }


def _latent_attention(random: Random) -> Weights:
    import torch

    return {
        "q_proj": random(HEADS * (HEAD_DIM + ROPE_DIM), HIDDEN, 0.3),
        "kv_a_proj_with_mqa": random(LATENT + ROPE_DIM, HIDDEN, 0.3),
        "kv_a_layernorm": torch.ones(LATENT),
        # The latent has four times as many numbers as the hidden state: half the scale.
        "kv_b_proj": random(HEADS * 2 * HEAD_DIM, LATENT, 0.15),
        "o_proj": random(HIDDEN, HEADS * HEAD_DIM, 0.3),
    }

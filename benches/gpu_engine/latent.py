"""Models with MLA (DeepSeek-V2) of the measured shapes: every rank holds the same KV."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LatentShape:
    """A DeepSeek-V2 model without experts.

    Attributes:
        layers: transformer layers.
        hidden: size of the hidden state.
        inner: size of the MLP.
        heads: attention heads.
        head_dim: size of one head's keys without position, and of its values.
        latent: numbers that are kept of a token's keys and values.
        rope_dim: numbers that are kept of its position.
        vocab: tokens of the vocabulary.
        dtype: type of the weights.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    head_dim: int
    latent: int = 512
    rope_dim: int = 64
    vocab: int = 32_000
    dtype: str = "bfloat16"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV on one rank, all layers."""
        size = 4 if self.dtype == "float32" else 2
        return self.layers * (self.latent + self.rope_dim) * size


#: What is kept of a token has DeepSeek's sizes in both: kernels for MLA take few others.
LATENT_SHAPES = {
    "mla-small": LatentShape(layers=8, hidden=1024, inner=2816, heads=16, head_dim=128),
    "mla-cpu": LatentShape(layers=2, hidden=128, inner=256, heads=8, head_dim=32, dtype="float32"),
}


def write_latent_model(name: str, parent: Path, *, weights: bool) -> Path:
    """Writes a model, unless it is there.

    Args:
        name: one of `LATENT_SHAPES`.
        parent: the folder that holds the model's.
        weights: write random weights whose answers vary.

    Returns:
        The model's folder.
    """
    shape = LATENT_SHAPES[name]
    folder = parent / f"{name}{'-weights' if weights else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.head_dim,
        # The first layers are dense: here all of them. What follows describes experts of none.
        "first_k_dense_replace": shape.layers,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": shape.inner,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    file = folder / "model.safetensors"
    if weights and not file.exists():
        _write_weights(shape, file)
    return folder


def _write_weights(shape: LatentShape, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, shape.dtype)

    def random(rows: int, columns: int, std: float | None = None) -> Any:
        # As in `models`: from an input of variance 1 an output of variance 2.5.
        weight = torch.randn(rows, columns, generator=generator)
        return (weight * (std or 1.6 / columns**0.5)).to(dtype)

    def ones(size: int = shape.hidden) -> Any:
        return torch.ones(size, dtype=dtype)

    queries = shape.heads * (shape.head_dim + shape.rope_dim)
    values = shape.heads * shape.head_dim
    state = {
        "model.embed_tokens.weight": random(shape.vocab, shape.hidden, 1.0),
        "model.norm.weight": ones(),
        "lm_head.weight": random(shape.vocab, shape.hidden),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        state |= {
            prefix + "input_layernorm.weight": ones(),
            prefix + "post_attention_layernorm.weight": ones(),
            prefix + "self_attn.q_proj.weight": random(queries, shape.hidden),
            prefix + "self_attn.kv_a_proj_with_mqa.weight": random(
                shape.latent + shape.rope_dim, shape.hidden
            ),
            prefix + "self_attn.kv_a_layernorm.weight": ones(shape.latent),
            prefix + "self_attn.kv_b_proj.weight": random(2 * values, shape.latent),
            prefix + "self_attn.o_proj.weight": random(shape.hidden, values),
            prefix + "mlp.gate_proj.weight": random(shape.inner, shape.hidden),
            prefix + "mlp.up_proj.weight": random(shape.inner, shape.hidden),
            prefix + "mlp.down_proj.weight": random(shape.hidden, shape.inner),
        }
    partial = file.with_suffix(".partial")
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.rename(file)

"""Models of the measured shapes, written to a folder: Llama, or `latent`. Nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_engine.latent import LATENT_SHAPES, write_latent_model


@dataclass(frozen=True)
class Shape:
    """A Llama model.

    Attributes:
        layers: transformer layers.
        hidden: size of the hidden state.
        inner: size of the MLP.
        heads: attention heads.
        head_dim: size of one head.
        vocab: tokens of the vocabulary.
        dtype: type of the weights.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    head_dim: int
    vocab: int = 32_000
    dtype: str = "bfloat16"

    def kv_bytes_per_token(self, kv_heads: int) -> int:
        """Bytes of one token's KV, all layers."""
        return 2 * self.layers * kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)


#: `8b` is Llama-3-8B's with a small vocabulary; `cpu` is for trying the scripts without a GPU.
SHAPES = {
    "8b": Shape(layers=32, hidden=4096, inner=14_336, heads=32, head_dim=128),
    "small": Shape(layers=8, hidden=1024, inner=2816, heads=8, head_dim=128),
    "cpu": Shape(layers=2, hidden=128, inner=256, heads=8, head_dim=32, dtype="float32"),
}


def write_model(name: str, kv_heads: int, parent: Path, *, weights: bool) -> Path:
    """Writes a model, unless it is there.

    Args:
        name: one of `SHAPES`, or of `LATENT_SHAPES`, which have no KV heads.
        kv_heads: KV heads; 1 is what a rank of eight sees of a model with 8.
        parent: the folder that holds the model's.
        weights: write random weights whose answers vary. Without them vLLM must be told to invent
            some (`load_format="dummy"`), which are so small that every answer is alike.

    Returns:
        The model's folder.
    """
    if name in LATENT_SHAPES:
        return write_latent_model(name, parent, weights=weights)
    shape = SHAPES[name]
    folder = parent / f"{name}-{kv_heads}{'-weights' if weights else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": shape.head_dim,
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
        _write_weights(shape, kv_heads, file)
    return folder


def _write_weights(shape: Shape, kv_heads: int, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    # A row of `hidden` such weights turns an input of variance 1 into an output of variance 2.5:
    # attention then picks out single tokens, so that what is read from the KV cache decides.
    scale = 1.6 / shape.hidden**0.5

    def random(rows: int, columns: int, std: float = scale) -> Any:
        return (torch.randn(rows, columns, generator=generator) * std).to(dtype)

    def ones() -> Any:
        return torch.ones(shape.hidden, dtype=dtype)

    queries, keys = shape.heads * shape.head_dim, kv_heads * shape.head_dim
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
            prefix + "self_attn.k_proj.weight": random(keys, shape.hidden),
            prefix + "self_attn.v_proj.weight": random(keys, shape.hidden),
            prefix + "self_attn.o_proj.weight": random(shape.hidden, queries),
            prefix + "mlp.gate_proj.weight": random(shape.inner, shape.hidden),
            prefix + "mlp.up_proj.weight": random(shape.inner, shape.hidden),
            prefix + "mlp.down_proj.weight": random(shape.hidden, shape.inner),
        }
    partial = file.with_suffix(".partial")
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.rename(file)

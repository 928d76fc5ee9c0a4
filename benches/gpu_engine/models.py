"""Models of the measured shapes, written to a folder: Llama, or `latent`. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_engine.latent import LATENT_SHAPES, write_latent_model
from gpu_engine.written import Shape, Weights, write


@dataclass(frozen=True)
class LlamaShape(Shape):
    """A Llama model."""

    def kv_bytes_per_token(self, kv_heads: int) -> int:
        """Bytes of one token's KV, all layers."""
        return 2 * self.layers * kv_heads * self.head_dim * self.number_bytes


#: `8b` is Llama-3-8B's with a small vocabulary; `cpu` is for trying the scripts without a GPU.
SHAPES = {
    "8b": LlamaShape(layers=32, hidden=4096, inner=14_336, heads=32, head_dim=128),
    "small": LlamaShape(layers=8, hidden=1024, inner=2816, heads=8, head_dim=128),
    "cpu": LlamaShape(layers=2, hidden=128, inner=256, heads=8, head_dim=32, dtype="float32"),
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
    config = shape.config(kv_heads) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_dim,
    }

    def attention(make: Weights) -> dict[str, Any]:
        queries, keys = shape.heads * shape.head_dim, kv_heads * shape.head_dim
        return {
            "q_proj.weight": make.random(queries, shape.hidden),
            "k_proj.weight": make.random(keys, shape.hidden),
            "v_proj.weight": make.random(keys, shape.hidden),
            "o_proj.weight": make.random(shape.hidden, queries),
        }

    folder = parent / f"{name}-{kv_heads}{'-weights' if weights else ''}"
    return write(folder, config, attention if weights else None)

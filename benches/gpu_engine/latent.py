"""Models with MLA (DeepSeek-V2) of the measured shapes: every rank holds the same KV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_engine.written import Shape, Weights, write


@dataclass(frozen=True)
class LatentShape(Shape):
    """A DeepSeek-V2 model without experts.

    Attributes:
        latent: numbers that are kept of a token's keys and values.
        rope_dim: numbers that are kept of its position.
    """

    latent: int = 512
    rope_dim: int = 64

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV on one rank, all layers."""
        return self.layers * (self.latent + self.rope_dim) * self.number_bytes


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
    config = shape.config(shape.heads) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
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
    }

    def attention(make: Weights) -> dict[str, Any]:
        queries = shape.heads * (shape.head_dim + shape.rope_dim)
        values = shape.heads * shape.head_dim
        kept = shape.latent + shape.rope_dim
        return {
            "q_proj.weight": make.random(queries, shape.hidden),
            "kv_a_proj_with_mqa.weight": make.random(kept, shape.hidden),
            "kv_a_layernorm.weight": make.ones(shape.latent),
            "kv_b_proj.weight": make.random(2 * values, shape.latent),
            "o_proj.weight": make.random(shape.hidden, values),
        }

    folder = parent / f"{name}{'-weights' if weights else ''}"
    return write(folder, config, attention if weights else None)

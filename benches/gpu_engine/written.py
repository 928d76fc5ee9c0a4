"""What the measured models have in common, and how they get into a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Entries of every model's `config.json`.
COMMON = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Shape:
    """Sizes that every model has.

    Attributes:
        layers: transformer layers.
        hidden: size of the hidden state.
        inner: size of the MLP.
        heads: attention heads.
        head_dim: size of one head; with MLA, of its keys without position, and of its values.
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

    @property
    def number_bytes(self) -> int:
        """Bytes of one weight, and of one number in the KV cache."""
        return 4 if self.dtype == "float32" else 2

    def config(self, kv_heads: int) -> dict[str, Any]:
        """What every model's `config.json` says of them."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": self.vocab,
            "torch_dtype": self.dtype,
        }


#: Makes the weights of one layer's attention, by name.
Attention = Callable[["Weights"], dict[str, Any]]


class Weights:
    """Random weights, the same every time.

    Args:
        dtype: their type.
    """

    def __init__(self, dtype: str) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(0)
        self._dtype = getattr(torch, dtype)

    def random(self, rows: int, columns: int, std: float | None = None) -> Any:
        """A matrix; without `std`, its outputs have variance 2.5 where its inputs have 1.

        Attention then picks out single tokens, so that what is read from the KV cache decides.
        """
        import torch

        weight = torch.randn(rows, columns, generator=self._generator)
        return (weight * (std or 1.6 / columns**0.5)).to(self._dtype)

    def ones(self, size: int) -> Any:
        """The weights of a norm."""
        import torch

        return torch.ones(size, dtype=self._dtype)


def write(folder: Path, config: dict[str, Any], attention: Attention | None) -> Path:
    """Writes a model, unless it is there.

    Args:
        folder: where to.
        config: what its `config.json` has besides `COMMON`.
        attention: how to make the weights of one layer's attention; None: no weights are written.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | COMMON, indent=1))
    file = folder / "model.safetensors"
    if attention is not None and not file.exists():
        _write_weights(config, attention, file)
    return folder


def _write_weights(config: dict[str, Any], attention: Attention, file: Path) -> None:
    from safetensors.torch import save_file

    hidden, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    weights = Weights(config["torch_dtype"])
    state = {
        "model.embed_tokens.weight": weights.random(vocab, hidden, 1.0),
        "model.norm.weight": weights.ones(hidden),
        "lm_head.weight": weights.random(vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        state |= {prefix + f"self_attn.{name}": one for name, one in attention(weights).items()}
        state |= {
            prefix + "input_layernorm.weight": weights.ones(hidden),
            prefix + "post_attention_layernorm.weight": weights.ones(hidden),
            prefix + "mlp.gate_proj.weight": weights.random(inner, hidden),
            prefix + "mlp.up_proj.weight": weights.random(inner, hidden),
            prefix + "mlp.down_proj.weight": weights.random(hidden, inner),
        }
    partial = file.with_suffix(".partial")
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.rename(file)

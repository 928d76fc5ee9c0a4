"""What the connector has to know of the model's KV cache and of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vllm.v1 import kv_cache_interface as kv

from kvoffload_rs.errors import ConfigError
from kvoffload_rs.vllm import compat

Span = Literal["full", "window", "local", "state"]


@dataclass(frozen=True)
class GroupFacts:
    """One KV group.

    Attributes:
        group_id: its number in vLLM's list.
        tokens_per_block: tokens of one block over all context-parallel ranks.
        span: what of a prefix it must hold: all, a window's tokens, the tokens of a local chunk,
            or one state.
        tokens: size of the window or the local chunk.
        draft: it holds a draft model's layers.
    """

    group_id: int
    tokens_per_block: int
    span: Span
    tokens: int
    draft: bool

    def as_tuple(self) -> tuple[int, int, str, int, bool]:
        """As `_core.Requests` takes it."""
        return (self.group_id, self.tokens_per_block, self.span, self.tokens, self.draft)


def group_facts(kv_cache_config: Any, tokens_per_block: tuple[int, ...]) -> list[GroupFacts]:
    """The model's KV groups.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
        tokens_per_block: of each group that vLLM offloads.

    Raises:
        ConfigError: a group cannot be offloaded, or cannot be looked up by hashes.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != len(tokens_per_block):
        raise ConfigError(
            f"the model has {len(groups)} KV groups, of which vLLM offloads "
            f"{len(tokens_per_block)}",
            field="kv_cache_groups",
            value=len(groups),
            hint="KvOffloadConnector offloads all groups or none: use KvOffloadSpec.",
        )
    return [
        GroupFacts(number, tokens, *_span(number, group.kv_cache_spec), _is_draft(group))
        for number, (group, tokens) in enumerate(zip(groups, tokens_per_block, strict=True))
    ]


def check_states(groups: list[GroupFacts], tokens_per_hash: int, speculative: bool) -> None:
    """Refuses what would make states of a Mamba group end somewhere inside their block.

    A state is found by the end of its block. With hashes finer than blocks, or with speculative
    decoding, vLLM (from 0.30) keeps states of other lengths in blocks of the same table.

    Raises:
        ConfigError: there is such a group, or this vLLM is wrong with any connector.
    """
    states = [group for group in groups if group.span == "state"]
    if not states:
        return
    if compat.CONTINUES_WITHOUT_STATE and len(groups) > 1:
        raise ConfigError(
            f"KV group {states[0].group_id} keeps states (Mamba), and vLLM {compat.version_text()} "
            "continues such models from states that it does not have when there is a KV connector, "
            "whichever it is: wrong tokens",
            field="kv_connector",
            hint="Use vLLM 0.28 or later, or no KV connector for this model.",
        )
    hint = "Use KvOffloadSpec for this model, or leave out that setting."
    if speculative:
        raise ConfigError(
            f"KV group {states[0].group_id} keeps states (Mamba), and speculative decoding is on: "
            "where its states end is not known",
            field="speculative_config",
            hint=hint,
        )
    for group in states:
        if group.tokens_per_block != tokens_per_hash:
            raise ConfigError(
                f"KV group {group.group_id} keeps states (Mamba) in blocks of "
                f"{group.tokens_per_block} tokens, but is found by hashes of {tokens_per_hash}",
                field="prefix_match_unit",
                value=tokens_per_hash,
                hint=hint,
            )


def _is_draft(group: Any) -> bool:
    return bool(getattr(group, "is_eagle_group", False))


def _is_cached(spec: Any) -> bool:
    not_by_prefix = ("HiddenStateCacheSpec", "RSWASpec")
    return getattr(spec, "prefix_cacheable", True) and type(spec).__name__ not in not_by_prefix


def _span(number: int, spec: Any) -> tuple[Span, int]:
    if isinstance(spec, kv.UniformTypeKVCacheSpecs):
        spans = {_span(number, one) for one in spec.kv_cache_specs.values()}
        if len(spans) == 1:
            return spans.pop()
    elif isinstance(spec, kv.SlidingWindowSpec):
        # Newer releases keep some tokens beyond the window, and look for them after a hit.
        return "window", spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    elif isinstance(spec, kv.ChunkedLocalAttentionSpec):
        return "local", spec.attention_chunk_size
    elif isinstance(spec, kv.MambaSpec):
        if getattr(spec, "mamba_cache_mode", "none") != "none":
            return "state", 0
    # Hidden states and the like are rewritten, not cached.
    elif isinstance(spec, kv.FullAttentionSpec) and _is_cached(spec):
        return "full", 0
    raise ConfigError(
        f"KV group {number} is of the kind {type(spec).__name__}, whose blocks cannot be found "
        "again by their tokens",
        field="kv_cache_groups",
        value=type(spec).__name__,
        hint="Remove the KV offloading settings for this model.",
    )

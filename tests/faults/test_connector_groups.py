"""Section D for our connector: sliding windows, states, draft models, groups that differ."""

from __future__ import annotations

from typing import Any

import pytest
from connector_kit import BLOCK, FULL, Connector, chain, numbers
from kvoffload_rs.errors import ConfigError
from kvoffload_rs.vllm.connector.facts import group_facts

WINDOW = (1, BLOCK, "window", 2 * BLOCK, False)
STATE = (1, BLOCK, "state", 0, False)
LOCAL = (1, BLOCK, "local", 2 * BLOCK, False)


def test_D1_chunk_whose_block_has_left_the_window_is_not_stored() -> None:
    """There was no room at first; by the time there is, the block is another request's."""
    c = Connector(2, groups=(FULL, WINDOW))
    (held,) = c.run("other", "o", 16, [[90], [91]])
    c.add("a", "p", 96)
    c.lookup("a")
    c.allocated("a", [[1, 2, 3], [11, 12, 13]])
    assert c.step({"a": ([[1, 2, 3], [11, 12, 13]], 0, 48)}).stores == []
    # The window has passed 11: the engine gives it to somebody else, and tells "a" nothing.
    c.add("b", "q", 16)
    c.lookup("b")
    c.allocated("b", [[21], [11]])
    c.step({"b": ([[21], [11]], 0, 8)}, {"a": ([[4], [14]], 48, 16)})
    c.report(held, "a fault")  # now there is room for two chunks
    orders = c.step(more={"a": (None, 64, 1)}).stores
    assert orders
    assert 11 not in [block for one in orders for block in numbers(one.blocks)]
    # Nor is it later, when it comes back to "a" for another place in its text.
    c.finish("b", 8)
    for one in orders:
        c.report(one)
    more = c.step(more={"a": ([[5], [11]], 65, 15)}).stores
    for one in more:
        at = sum(one.group_sizes[:1])
        taken = dict(zip(numbers(one.blocks)[at:], range(one.first_blocks[1], 99), strict=False))
        assert taken.get(11, 4) == 4
        c.report(one)
    for name in ("a", "other"):
        c.finish(name, 80)


def test_D1_chunk_that_the_engine_gave_no_block_is_not_stored() -> None:
    """What was left of the window already when the request was admitted is the null block."""
    c = Connector(groups=(FULL, WINDOW))
    c.add("a", "p", 64)
    c.lookup("a")
    blocks = [[1, 2, 3, 4], [0, 0, 13, 14]]
    c.allocated("a", blocks)
    (store,) = c.step({"a": (blocks, 0, 64)}).stores
    assert numbers(store.blocks) == [1, 2, 3, 4, 13, 14]
    assert (store.group_sizes, store.first_blocks) == ([4, 2], [0, 2])
    c.report(store)
    assert c.found("p", 64) == 63
    c.finish("a", 64)
    c.assert_idle()


def test_D2_chunk_being_written_outside_the_usable_window_delays_nothing() -> None:
    """Present, present, absent, being written; two chunks are needed: the first two are usable."""
    c = Connector(groups=((0, BLOCK, "window", 2 * BLOCK, False),))
    c.store("p", 32)
    c.add("w", "p", 64)
    blocks = [0, 0, 0, 4]
    (writing,) = c.step({"w": (blocks, 0, 64)}).stores
    assert numbers(writing.blocks) == [4]
    c.add("a", "p", 64 + 8)
    assert c.lookup("a") == 32
    c.report(writing)
    for name in "aw":
        c.finish(name, 0)
    c.assert_idle()


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("span", ["full", "window", "local"])
def test_D3_what_is_stored_is_enough_for_a_hit(span: str, draft: bool) -> None:
    """For every length of a prompt: a draft model needs one chunk more than it loads."""
    for chunks in range(1, 8):
        group = (1, BLOCK, span, 2 * BLOCK, draft)
        c = Connector(64, groups=(FULL, group))
        c.store("p", chunks * BLOCK)
        found = c.found("p", chunks * BLOCK + 4)
        assert found == (chunks - draft) * BLOCK, (chunks, found)
        c.assert_idle()


@pytest.mark.parametrize("window", range(1, 4 * BLOCK, 5))
def test_D5_load_asks_for_what_the_lookup_looked_for(window: int) -> None:
    """A window of any size: every chunk that is loaded was found, and nothing else is needed."""
    c = Connector(64, groups=(FULL, (1, BLOCK, "window", window, False)))
    c.store("p", 96)
    c.add("a", "p", 100)
    assert c.lookup("a") == 96
    # What vLLM's own window gives up before token 96 is null.
    gone = max(0, 96 - window + 1) // BLOCK
    blocks = [list(range(1, 8)), [0] * gone + list(range(20 + gone, 27))]
    c.allocated("a", blocks, 96)
    (load,) = c.step().loads
    assert len(load.slots) == len(load.blocks) > 0
    assert load.group_sizes == [6, 6 - gone]
    c.report(load)
    c.finish("a", 96)
    c.assert_idle()


def test_D5_tokens_that_are_kept_beyond_the_window_count() -> None:
    """A release that keeps more history than the window looks for it, too."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    spec = kv.SlidingWindowSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float16,
        sliding_window=32,
        extra_retained_tokens=7,
    )
    (fact,) = group_facts(config_of(spec), (16,))
    assert (fact.span, fact.tokens) == ("window", 39)


@pytest.mark.parametrize("there", [1, 2, 3, 4])
def test_D6_state_hits_where_its_one_chunk_ends(there: int) -> None:
    """A state exists at some places only: no hit between them, and one state is loaded."""
    c = Connector(groups=(FULL, STATE))
    c.add("s", "p", 80)
    c.lookup("s")
    states = [0] * 5
    states[there - 1] = 50
    blocks = [[1, 2, 3, 4, 5], states]
    (store,) = c.step({"s": (blocks, 0, 80)}).stores
    c.report(store)
    c.finish("s", 80)
    c.add("a", "p", 84)
    assert c.lookup("a") == there * BLOCK
    given = [[11, 12, 13, 14, 15, 16], [0] * (there - 1) + [60]]
    c.allocated("a", given, there * BLOCK)
    (load,) = c.step().loads
    assert load.group_sizes == [there, 1]
    c.report(load)
    c.finish("a", there * BLOCK)
    c.assert_idle()


def test_D6_states_of_several_blocks_are_refused() -> None:
    """Only the last block of a chunk would hold one: the error says what to do."""
    with pytest.raises(ConfigError, match="blocks_per_chunk 1"):
        Connector(groups=(FULL, STATE), blocks_per_chunk=2)


def test_D7_groups_have_keys_of_their_own() -> None:
    """Several groups from the start: each has its own chunks, which share nothing."""
    from kvoffload_rs.vllm.connector import KvOffloadConnector
    from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA

    assert issubclass(KvOffloadConnector, SupportsHMA)
    c = Connector(groups=(FULL, WINDOW))
    c.store("p", 32)
    keys = set(c.core.debug_state()["keys"])
    assert keys == {one + group.to_bytes(4, "big") for one in chain("p", 2) for group in range(2)}


def test_D9_prefix_is_what_all_groups_have() -> None:
    """One group's chunk is gone, or cannot be loaded: the others' are not used without it."""
    c = Connector(8, groups=(FULL, LOCAL))
    c.store("p", 64)
    assert c.found("p", 68) == 64
    c.add("a", "p", 68)
    assert c.lookup("a") == 64
    c.allocated("a", [[1, 2, 3, 4, 5], [0, 0, 0, 0, 6]], 64)
    (load,) = c.step().loads
    c.report(load, "one group could not be read")
    assert c.lookup("a") == 0
    c.finish("a", 0)
    c.assert_idle()


def test_D10_each_group_has_chunks_of_its_own_size() -> None:
    """Blocks of 16 and of 48 tokens: chunks of as many tokens, not of the least common multiple."""
    c = Connector(32, groups=(FULL, (1, 3 * BLOCK, "window", 3 * BLOCK, False)))
    (store,) = c.run("a", "p", 96, [[1, 2, 3, 4, 5, 6], [11, 12]])
    assert store.group_sizes == [6, 2]
    assert len(numbers(store.slots)) == 8
    c.report(store)
    c.finish("a", 96)
    assert c.found("p", 96 + 4) == 96
    assert c.found("p", 80) == 48
    c.assert_idle()


def config_of(*specs: Any) -> Any:
    """As much of vLLM's configuration as is read."""
    from types import SimpleNamespace

    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in specs])

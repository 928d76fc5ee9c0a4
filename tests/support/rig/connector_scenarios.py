"""What is done to an engine with our connector only: failures, hangs, other groups, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload_rs.errors import ConfigError

from .kit import (
    BLOCK,
    HYBRID,
    LATENT,
    LOCAL,
    MAMBA,
    SLOW_COPIES,
    UNEVEN,
    Settings,
    Skipped,
    check_it_still_works,
    end,
    make_rig,
    prompt,
)
from .rig import Rig
from .versions import CAN_KEEP_STATES, CAN_RECOMPUTE_HYBRID, VERSION_TEXT


def counts_of(rig: Rig) -> dict[str, int]:
    """Our connector's counters."""
    counts: dict[str, int] = rig.core.stats()
    return counts


def failed_loads(settings: Settings, **more: Any) -> dict[str, Any]:
    """Every seventh load fails half-way: its request computes, with the same tokens."""
    rig = make_rig(settings, 64, slow=True, faults={"fail_every_load": 7}, **more)
    for turn in range(8):
        for i in range(3):
            rig.add(f"{turn}.{i}", prompt(f"p{i}", 4 + i), max_tokens=3)
        rig.drain()
        rig.forget_gpu()
    assert counts_of(rig)["loads_failed"] >= 2, counts_of(rig)
    assert counts_of(rig)["loads_done"] >= 10, counts_of(rig)
    return end(rig)


def failed_loads_async(settings: Settings) -> dict[str, Any]:
    """The same with the scheduler that runs one step ahead."""
    return failed_loads(settings, async_scheduling=True)


def failed_loads_on_one_rank(settings: Settings) -> dict[str, Any]:
    """One rank of two fails loads, and is slower than the other."""
    faults = SLOW_COPIES | {"fail_every_load": 7}
    return failed_loads(settings, ranks=2, rank_faults={1: faults | {"max_delay_us": 9000}})


def failed_loads_hybrid(settings: Settings) -> dict[str, Any]:
    """A model with two KV groups: vLLM can compute the request again from 0.30 on."""
    if CAN_RECOMPUTE_HYBRID:
        return failed_loads(settings, groups=HYBRID)
    from kvoffload_rs.errors import ConfigError

    rig = make_rig(settings, 64, faults={"seed": 1, "fail_every_load": 1}, groups=HYBRID)
    rig.run("store", prompt("a", 6))
    rig.forget_gpu()
    try:
        rig.run("load", prompt("a", 6))
    except ConfigError as error:
        assert error.field == "kv_load_failure_policy"
        assert VERSION_TEXT in str(error) and "0.30" in str(error), error
        rig.shutdown()
        return {"named": str(error)}
    raise AssertionError("a load failed that cannot be computed again, and nobody said so")


def failed_stores(settings: Settings, **more: Any) -> dict[str, Any]:
    """Every fifth store fails half-way: its chunks are absent, and stored by whoever comes next."""
    rig = make_rig(settings, 64, slow=True, faults={"fail_every_store": 5}, **more)
    for turn in range(6):
        for i in range(5):
            rig.add(f"{turn}.{i}", prompt(f"p{i}", 4), max_tokens=3)
        rig.drain()
        rig.forget_gpu()
    assert counts_of(rig)["stores_failed"] >= 1, counts_of(rig)
    assert counts_of(rig)["loads_done"] >= 10, counts_of(rig)
    assert counts_of(rig)["loads_failed"] == 0, counts_of(rig)
    return end(rig)


def failed_stores_on_one_rank(settings: Settings) -> dict[str, Any]:
    """One rank of two fails stores: no rank's chunk is used."""
    return failed_stores(settings, ranks=2, rank_faults={0: SLOW_COPIES})


def load_that_hangs(settings: Settings, **more: Any) -> dict[str, Any]:
    """A load never ends: it is given up at its deadline, and its request computes."""
    rig = make_rig(
        settings,
        64,
        faults={"seed": 1, "stall_job": 1},  # job 0 stores the prompt
        extra={"load_deadline_s": 0.05},
        **more,
    )
    tokens = rig.run("store", prompt("a", 6))
    rig.forget_gpu()
    assert rig.run("load", prompt("a", 6)) == tokens
    assert counts_of(rig)["loads_failed"] == 1, counts_of(rig)
    check_it_still_works(rig)
    return end(rig)


def load_that_hangs_on_one_rank(settings: Settings) -> dict[str, Any]:
    """The same on one rank of two; the other one has loaded long before."""
    return load_that_hangs(settings, ranks=2, rank_faults={0: {"seed": 1}})


def reports_repeated(settings: Settings) -> dict[str, Any]:
    """Workers say everything twice; nobody's pin is lost for it."""
    rig = make_rig(settings, 8, slow=True, num_blocks=30, ranks=2, prompt_only=False)
    rig.repeat_reports = True
    for turn in range(4):
        for i in range(4):
            rig.add(f"{turn}.{i}", prompt(f"p{i % 3}", 5), max_tokens=20)
        rig.drain()
        rig.forget_gpu()
    counts = counts_of(rig)
    assert counts["stray_reports"] == 2 * (counts["loads_begun"] + counts["stores_begun"]), counts
    return end(rig)


def ranks_out_of_step(settings: Settings) -> dict[str, Any]:
    """One rank of two is much slower: jobs and requests are done when it says so, too."""
    slow = {"seed": 3, "max_delay_us": 12_000}
    rig = make_rig(settings, 12, slow=True, num_blocks=40, ranks=2, rank_faults={1: slow})
    for turn in range(6):
        for i in range(4):
            rig.add(f"{turn}.{i}", prompt(f"p{(turn + i) % 5}", 5), max_tokens=6)
            rig.step()
        if turn % 2:
            rig.drain()
            rig.forget_gpu()
    rig.drain()
    assert rig.totals.loads > 0, rig.totals
    check_it_still_works(rig)
    return end(rig)


def reset_during_load_hybrid(settings: Settings) -> dict[str, Any]:
    """The host pool is reset under loads of a model with two KV groups."""
    rig = make_rig(settings, 64, faults={"seed": 1, "max_delay_us": 8000}, groups=HYBRID)
    for turn in range(4):
        rig.run(f"{turn}.store", prompt(f"p{turn}", 6))
        rig.forget_gpu()
        loads = rig.totals.loads
        rig.add(f"{turn}.load", prompt(f"p{turn}", 6))
        while rig.totals.loads == loads:
            rig.step()
        under_way = any(not job.store for job in rig.watch.live.values()) if rig.watch else False
        done = rig.scheduler.reset_connector_cache()
        # The caller is told of loads under way, whether they can be computed again or not.
        assert done == (not under_way), (done, under_way)
        if turn % 2:
            rig.drain()
    rig.drain()
    return end(rig)


def ends_with_slow_copies(settings: Settings, **more: Any) -> dict[str, Any]:
    """Requests end, and their blocks are used again, long before their stores have read them."""
    faults = {"seed": 1, "max_delay_us": 15_000}
    rig = make_rig(settings, 40, faults=faults, num_blocks=16, prompt_only=False, **more)
    for i in range(14):
        rig.add(f"r{i}", prompt(f"p{i % 7}", 5), max_tokens=1 + i % 4)
        rig.step()
        rig.step()
    rig.drain()
    assert rig.totals.flushes > 0, rig.totals
    check_it_still_works(rig)
    return end(rig)


def branches(rig: Rig, blocks: int, count: int, every: int, max_tokens: int = 20) -> None:
    """A prompt comes back whole, then prefixes of it do, which go on in other ways.

    Args:
        rig: the engine.
        blocks: full blocks of the prompt.
        count: prefixes, two times.
        every: blocks by which one is longer than the one before.
        max_tokens: what each of them generates.
    """
    first = prompt("a", blocks)
    tokens = rig.run("a", first)
    rig.forget_gpu()
    assert rig.run("b", first) == tokens
    assert rig.totals.loaded_blocks >= 12, rig.totals
    for name in "cd":
        for i in range(count):
            text = first[: (every + 1 + every * i) * BLOCK] + prompt(f"own{i}", 3)
            rig.add(f"{name}{i}", text, max_tokens=max_tokens)
            rig.step()
        rig.drain()
        rig.forget_gpu()


def chunked_local(settings: Settings, **more: Any) -> dict[str, Any]:
    """A full group and one that attends to the current local chunk only."""
    rig = make_rig(settings, 96, slow=True, num_blocks=80, groups=LOCAL, **more)
    branches(rig, 12, 4, 2)
    return end(rig)


def other_block_sizes(settings: Settings, **more: Any) -> dict[str, Any]:
    """The sliding group's blocks hold twice as many tokens; chunks are given in blocks."""
    chunks = {"block_size": None, "blocks_per_chunk": settings.blocks_per_chunk}
    rig = make_rig(settings, 96, slow=True, num_blocks=80, groups=UNEVEN, extra=chunks, **more)
    branches(rig, 16, 4, 4)
    return end(rig)


def states(settings: Settings, **more: Any) -> dict[str, Any]:
    """A full group, and one that keeps the state after each block (Mamba)."""
    refusal = None
    if not CAN_KEEP_STATES:
        refusal = "continues such models from states that it does not have"
    elif settings.blocks_per_chunk > 1:
        refusal = "of which a chunk of several blocks would hold holes"
    if refusal is not None:
        try:
            make_rig(settings, 8, groups=MAMBA)
        except ConfigError as error:
            assert refusal in str(error), error
            raise Skipped(f"refused, as it should be: {refusal}") from error
        raise AssertionError("the connector should refuse Mamba here")
    rig = make_rig(settings, 96, slow=True, num_blocks=32, groups=MAMBA, **more)
    branches(rig, 12, 5, 2, max_tokens=40)
    assert rig.totals.preemptions > 0, rig.totals
    return end(rig)


def states_async(settings: Settings) -> dict[str, Any]:
    """The same with the scheduler that runs one step ahead."""
    return states(settings, async_scheduling=True)


def replicated(settings: Settings, **more: Any) -> dict[str, Any]:
    """MLA on two ranks: the memory holds each chunk once, and the first rank alone has stored it.

    Slow copies and a small pool: what one rank stores must not reach a slot that another reads.
    """
    rig = make_rig(settings, 12, slow=True, num_blocks=40, ranks=2, groups=LATENT, **more)
    for turn in range(6):
        for name, blocks in (("a", 4), ("b", 3), (f"new{turn}", 5), ("a", 4)):
            rig.add(f"{turn}.{name}.{len(rig.model.requests)}", prompt(name, blocks), 4)
        rig.drain()
        rig.forget_gpu()
    assert rig.totals.loads > 4, rig.totals
    assert rig.manager.stats()["evicted"] > 0, rig.manager.stats()
    stores = [worker.worker_side._transfers.stats()["stores"] for worker in rig.workers]
    assert stores[0] > 4 and stores[1] == 0, stores
    return end(rig)


def replicated_with_failures(settings: Settings) -> dict[str, Any]:
    """The same where the first rank's stores fail, and the other's loads."""
    faults = {0: SLOW_COPIES | {"fail_every_store": 5}, 1: SLOW_COPIES | {"fail_every_load": 5}}
    return replicated(settings, rank_faults=faults)


def replicated_with_resets(settings: Settings) -> dict[str, Any]:
    """The memory of both ranks is emptied under loads, of which one rank's take much longer.

    Requests that end meanwhile leave nothing behind: what the first rank stored to a slot then, the
    other might still read.
    """
    slow = {"seed": 3, "max_delay_us": 30_000}
    rig = make_rig(
        settings, 12, slow=True, num_blocks=40, ranks=2, groups=LATENT, rank_faults={1: slow}
    )
    for turn in range(6):
        rig.run(f"{turn}.store", prompt(f"p{turn}", 6))
        rig.forget_gpu()
        loads = rig.totals.loads
        rig.add(f"{turn}.load", prompt(f"p{turn}", 6))
        rig.step()
        assert rig.totals.loads == loads + 1
        rig.scheduler.reset_connector_cache()
        for i in range(3):
            rig.add(f"{turn}.{i}", prompt(f"q{turn}.{i}", 6))
            rig.step()
        rig.drain()
    check_it_still_works(rig)
    return end(rig)


def deferral_with_deadline(settings: Settings) -> dict[str, Any]:
    """The chunks that a request waits for are not there in time: it computes."""
    rig = make_rig(
        settings,
        64,
        faults={"seed": 1, "max_delay_us": 600_000},
        extra={"defer_deadline_s": 0.02},
    )
    text = prompt("a", 6)
    rig.add("a", text)
    while not rig.totals.stores:
        rig.step()
    rig.step()
    while "a" not in rig.finished:
        rig.step()
    if not rig.scheduler.reset_prefix_cache():  # as if "a" had lost its blocks to others
        raise AssertionError("the engine is not idle")
    assert rig.watch is not None
    assert rig.watch.live, "the store is over: there is nothing to wait for"
    rig.add("b", text)
    while "b" not in rig.finished:
        rig.step()
    counts = counts_of(rig)
    assert counts["deferred_writing"] > 0, counts
    assert counts["deadlines"] == 1, counts
    assert counts["loads_begun"] == 0, counts
    return end(rig)


def all_wait_for_each_other(settings: Settings) -> dict[str, Any]:
    """Few GPU blocks, several requests at once whose loads hold most of them, slow copies."""
    faults = {"seed": 1, "max_delay_us": 6000}
    soon = {"defer_deadline_s": 0.1}
    rig = make_rig(settings, 40, faults=faults, num_blocks=9, prompt_only=False, extra=soon)
    for name, blocks in (("a", 4), ("b", 3), ("c", 6)):
        rig.run(name, prompt(name, blocks), max_tokens=2)
        rig.forget_gpu()
    for turn in range(4):
        for name, blocks in (("a", 4), ("b", 3), ("c", 6), ("a", 4)):
            rig.add(f"{turn}.{name}.{len(rig.model.requests)}", prompt(name, blocks), 20)
        rig.drain()
        rig.forget_gpu()
    assert rig.totals.loads > 4, rig.totals
    return end(rig)


OURS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        failed_loads,
        failed_loads_async,
        failed_loads_on_one_rank,
        failed_loads_hybrid,
        failed_stores,
        failed_stores_on_one_rank,
        load_that_hangs,
        load_that_hangs_on_one_rank,
        reports_repeated,
        ranks_out_of_step,
        reset_during_load_hybrid,
        ends_with_slow_copies,
        chunked_local,
        other_block_sizes,
        states,
        states_async,
        replicated,
        replicated_with_failures,
        replicated_with_resets,
        deferral_with_deadline,
        all_wait_for_each_other,
    )
}

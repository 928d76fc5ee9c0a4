//! The requests table when something goes wrong, or comes late: failed copies, resets, requests that
//! end before their jobs, blocks that change hands.

#[allow(dead_code, reason = "each test crate uses its part")]
mod bench;

use bench::{Bench, FULL};
use kvoffload_core::jobs::JobKind;
use kvoffload_core::manager::Answer;
use kvoffload_core::requests::{GivenBlocks, GroupConfig, Lookup, NewRequest, RequestError, Span};

const WINDOW: GroupConfig = GroupConfig {
    id: 1,
    span: Span::Window(20),
    ..FULL
};

/// A table whose requests do not wait for one another's loads.
fn eager(slots: u32) -> Bench {
    Bench::with(slots, &[FULL], |config, _| config.share_loads = false)
}

#[test]
fn what_failed_to_load_misses_and_is_stored_when_it_is_computed() {
    let mut bench = eager(8);
    bench.fill(1, 3);
    let id = bench.add("request", 1, 3);
    assert_eq!(bench.lookup(id, 56), Lookup::Tokens(48, None));
    bench.load(id, &[&[1, 2, 3]], 48);
    let load = bench.one_load();
    let ended = bench.end(&load, false);
    assert_eq!(ended.request.as_deref(), Some("request"));
    assert_eq!(ended.failures, [(0, "broken".to_owned())]);
    assert_eq!(
        (ended.kind, ended.chunks, ended.void),
        (JobKind::Load, 3, false)
    );
    assert_eq!(bench.requests.manager().stats().discarded, 3);
    assert_eq!(
        bench.requests.manager().lookup(&[1, 0, 7, 7, 0, 0, 0, 0]),
        Answer::Miss
    );
    // The engine goes on with the blocks that it has, and does not look up again.
    bench.run(id, &[&[1, 2, 3]], 48);
    let store = bench.one_store();
    assert_eq!(*store.blocks, [1, 2, 3]);
    bench.end(&store, true);
    let reader = bench.add("reader", 1, 3);
    assert_eq!(bench.lookup(reader, 56), Lookup::Tokens(48, None));
    bench.check_idle();
}

#[test]
fn a_load_that_fails_under_another_reader_leaves_that_ones_pins() {
    let mut bench = eager(4);
    bench.fill(1, 2);
    let (first, second) = (bench.add("first", 1, 2), bench.add("second", 1, 2));
    let mut loads = Vec::new();
    for (id, blocks) in [(first, [1, 2]), (second, [3, 4])] {
        assert_eq!(bench.lookup(id, 40), Lookup::Tokens(32, None));
        bench.load(id, &[&blocks], 32);
        loads.push(bench.one_load());
    }
    bench.end(&loads[0], false);
    // The slots are still being read, but nobody else gets to read them.
    let stats = bench.requests.manager().stats();
    assert_eq!((stats.pinned, stats.free), (2, 2));
    bench.run(first, &[&[1, 2]], 32);
    let store = bench.one_store();
    assert!(
        store
            .slots
            .iter()
            .all(|slot| !loads[1].slots.contains(slot))
    );
    bench.end(&store, true);
    bench.end(&loads[1], true);
    bench.check_idle();
    assert_eq!(bench.requests.manager().stats().ready, 2);
}

/// B6: *hit* at the lookup, gone at the load.
#[test]
fn a_load_of_what_is_gone_fails_and_touches_no_pins() {
    let mut bench = eager(2);
    bench.fill(1, 2);
    let (id, reader) = (bench.add("request", 1, 2), bench.add("reader", 1, 1));
    assert_eq!(bench.lookup(id, 40), Lookup::Tokens(32, None));
    assert_eq!(bench.lookup(reader, 24), Lookup::Tokens(16, None));
    bench.load(reader, &[&[5]], 16);
    let read = bench.one_load();
    let thief = bench.add("thief", 2, 1);
    bench.run(thief, &[&[7]], 16);
    let store = bench.one_store();
    assert_eq!(bench.requests.manager().stats().evicted, 1);

    bench.load(id, &[&[1, 2]], 32);
    let load = bench.one_load();
    assert!(load.is_hollow() && load.blocks.len() == 2);
    assert_eq!(bench.requests.manager().stats().pinned, 1);
    bench.end(&load, false);
    assert_eq!(bench.requests.manager().stats().pinned, 1, "the reader's");
    assert_eq!(bench.requests.manager().stats().discarded, 0);
    bench.end(&read, true);
    bench.end(&store, true);
    // What it computes is offered.
    bench.run(id, &[&[1, 2]], 32);
    let store = bench.one_store();
    bench.end(&store, true);
    bench.check_idle();
}

/// The engine waits for each load that it asked for, also where a boundary needs no KV before it.
#[test]
fn a_load_of_nothing_is_a_job_too() {
    let local = GroupConfig {
        span: Span::Local(32),
        ..FULL
    };
    let mut bench = Bench::with(4, &[local], |_, _| {});
    let id = bench.add("request", 1, 3);
    assert!(matches!(bench.lookup(id, 48), Lookup::Tokens(32, _)));
    bench.load(id, &[&[0, 0]], 32);
    let load = bench.one_load();
    assert!(load.blocks.is_empty() && !load.is_hollow());
    assert_eq!(bench.end(&load, true).request.as_deref(), Some("request"));
    // Another connector's load is none of ours.
    let other = bench.add("other", 2, 3);
    bench.load(other, &[&[1, 2]], 0);
    assert!(bench.orders().is_empty());
    bench.check_idle();
}

#[test]
fn a_block_in_two_groups_is_stored_for_both_and_read_until_both_are() {
    let twin = GroupConfig { id: 1, ..FULL };
    let mut bench = Bench::with(8, &[FULL, twin], |_, _| {});
    let id = bench.add("request", 1, 2);
    bench.run(id, &[&[1, 2], &[1, 3]], 32);
    let store = bench.one_store();
    assert_eq!(*store.blocks, [1, 2, 1, 3]);
    bench.requests.preempted(id);
    let thief = bench.add("thief", 2, 1);
    bench.run(thief, &[&[1], &[4]], 8);
    assert_eq!(bench.orders().flush, [store.id]);
    bench.end(&store, true);
    let late = bench.add("late", 3, 1);
    bench.run(late, &[&[1], &[4]], 8);
    assert!(bench.orders().flush.is_empty());
    bench.check_idle();
}

#[test]
fn what_a_window_left_is_not_stored_once_another_request_has_it() {
    for loads in [false, true] {
        let mut bench = Bench::with(3, &[FULL, WINDOW], |_, _| {});
        let full = bench.add("full", 9, 1);
        bench.run(full, &[&[30], &[31]], 16);
        let held = bench.one_store();
        let id = bench.add("request", 1, 3);
        bench.run(id, &[&[1, 2, 3], &[4, 5, 6]], 48);
        let first = bench.one_store();
        assert_eq!(first.slots.len(), 1, "no room for more");
        bench.end(&held, false);
        bench.end(&first, true);
        assert!(bench.requests.watches_blocks());
        let thief = bench.add("thief", 2, 1);
        if loads {
            // Another connector loads into it: no step tells of its blocks.
            bench.load(thief, &[&[8], &[4]], 0);
        } else {
            bench
                .requests
                .scheduled(thief, &[&[8], &[4]], true, 0)
                .unwrap();
        }
        bench.requests.store(id, 48).unwrap();
        assert!(!bench.one_store().blocks.contains(&4));
    }
}

#[test]
fn ranks_of_one_region_store_nothing_while_one_of_them_still_loads_what_a_reset_voided() {
    for one_region in [true, false] {
        let mut bench = Bench::with(4, &[FULL], |config, _| {
            config.share_loads = false;
            config.one_region = one_region;
        });
        bench.fill(1, 2);
        let loader = bench.add("loader", 1, 2);
        assert_eq!(bench.lookup(loader, 40), Lookup::Tokens(32, None));
        bench.load(loader, &[&[1, 2]], 32);
        let load = bench.one_load();
        bench.requests.reset(true);
        let other = bench.add("other", 2, 3);
        bench.run(other, &[&[3, 4, 5]], 48);
        if one_region {
            assert!(bench.orders().stores.is_empty());
            assert!(bench.end(&load, true).void);
            bench.requests.store(other, 48).unwrap();
        }
        assert_eq!(bench.one_store().slots.len(), 3);
    }
}

#[test]
fn a_reset_voids_what_is_under_way_and_stores_nothing_computed_before() {
    let mut bench = eager(8);
    bench.fill(1, 2);
    let loader = bench.add("loader", 1, 2);
    assert_eq!(bench.lookup(loader, 40), Lookup::Tokens(32, None));
    bench.load(loader, &[&[1, 2]], 32);
    let load = bench.one_load();
    let runner = bench.add("runner", 2, 3);
    bench.run(runner, &[&[3, 4, 5]], 32);
    let store = bench.one_store();
    bench.requests.reset(true);
    bench.requests.validate();
    bench.requests.store(runner, 48).unwrap();
    let orders = bench.orders();
    assert_eq!(orders.void, [load.id], "and the store may end as it likes");
    assert!(orders.stores.is_empty());
    // A block that a void store reads is still read.
    let thief = bench.add("thief", 3, 1);
    bench.run(thief, &[&[3]], 8);
    assert_eq!(bench.orders().flush, [store.id]);
    assert!(bench.end(&store, true).void);
    assert!(bench.end(&load, true).void);
    assert!(bench.requests.manager().dump().keys.is_empty());
    assert_eq!(bench.requests.manager().stats().stale_completions, 0);
    // Neither what goes on, nor what was loaded, is stored.
    for id in [loader, runner] {
        bench.run(id, &[&[1, 2]], 32);
        assert_eq!(bench.requests.storable(id, 32), 0);
    }
    assert!(bench.orders().stores.is_empty());
    // What starts again is.
    bench.requests.preempted(runner);
    bench.lookup(runner, 48);
    bench.run(runner, &[&[3, 4]], 32);
    let store = bench.one_store();
    bench.requests.reset(true);
    bench.end(&store, true);
    bench.check_idle();
    assert_eq!(bench.requests.stats().stores.voided, 2);
    assert_eq!(bench.requests.stats().loads.voided, 1);
}

/// A5, A6: the end of a request is not the end of its jobs.
#[test]
fn a_request_may_end_before_its_last_store() {
    let mut bench = Bench::new(8);
    let id = bench.add("request", 1, 2);
    bench.run(id, &[&[1, 2]], 16);
    let first = bench.one_store();
    bench.requests.finish(id, 32).unwrap();
    bench.requests.validate();
    let last = bench.one_store();
    assert_eq!(*last.blocks, [2]);
    assert_eq!(
        (bench.requests.num_requests(), bench.requests.num_jobs()),
        (1, 2)
    );
    // Its blocks are given away at once.
    let next = bench.add("next", 2, 1);
    bench.run(next, &[&[2]], 8);
    assert_eq!(bench.orders().flush, [last.id]);
    assert_eq!(bench.end(&last, true).request, None);
    assert_eq!(bench.end(&first, true).request, None);
    assert_eq!(bench.requests.num_requests(), 1);
    let reader = bench.add("reader", 1, 2);
    assert_eq!(bench.lookup(reader, 40), Lookup::Tokens(32, None));
    bench.check_idle();
}

#[test]
fn a_name_may_be_used_again_while_old_jobs_live() {
    let mut bench = Bench::new(8);
    let old = bench.add("name", 1, 1);
    bench.run(old, &[&[1]], 16);
    let first = bench.one_store();
    bench.requests.finish(old, 16).unwrap();
    assert!(matches!(
        bench.requests.find("name"),
        Err(RequestError::Unknown { .. })
    ));
    let new = bench.add("name", 2, 1);
    assert_ne!(old, new);
    bench.run(new, &[&[2]], 16);
    let second = bench.one_store();
    // Said twice, it is not the new one that ends.
    bench.requests.finish(old, 16).unwrap();
    bench.requests.validate();
    assert_eq!(bench.requests.find("name"), Ok(new));
    assert_eq!(bench.end(&first, true).request, None);
    assert_eq!(bench.end(&second, true).request.as_deref(), Some("name"));
    bench.requests.finish(new, 16).unwrap();
    assert_eq!(bench.requests.num_requests(), 0);
    bench.check_idle();
}

#[test]
fn a_job_ends_with_its_last_rank_and_fails_with_any() {
    let mut bench = Bench::with(8, &[FULL], |config, _| config.num_ranks = 3);
    let id = bench.add("request", 1, 1);
    bench.run(id, &[&[1]], 16);
    let job = bench.one_store().id;
    assert_eq!(bench.requests.report(job, 2, Ok(())), Ok(None));
    bench.requests.report(job, 2, Ok(())).unwrap_err();
    bench.requests.report(job, 3, Ok(())).unwrap_err();
    assert_eq!(bench.requests.report(job, 1, Err("late".into())), Ok(None));
    let ended = bench.requests.report(job, 0, Ok(())).unwrap().unwrap();
    assert_eq!(ended.failures, [(1, "late".to_owned())]);
    bench.requests.report(job, 0, Ok(())).unwrap_err();
    assert_eq!(bench.requests.stats().stray_reports, 3);
    assert_eq!(bench.requests.stats().stores.failed, 1);
    assert!(bench.requests.manager().dump().keys.is_empty());
    bench.check_idle();
}

#[test]
fn no_store_begins_while_too_many_jobs_are_under_way() {
    let mut bench = Bench::with(8, &[FULL], |config, _| config.max_jobs = 1);
    let id = bench.add("request", 1, 3);
    bench.run(id, &[&[1, 2, 3]], 16);
    let first = bench.one_store();
    bench.requests.store(id, 48).unwrap();
    assert!(bench.orders().stores.is_empty());
    assert_eq!(bench.requests.stats().jobs_refused, 1);
    bench.end(&first, true);
    bench.requests.store(id, 48).unwrap();
    assert_eq!(*bench.one_store().blocks, [2, 3], "nothing was passed over");
}

#[test]
fn a_prefix_in_the_gpus_cache_is_shared_and_not_written() {
    let mut bench = eager(8);
    let owner = bench.add("owner", 1, 3);
    bench.run(owner, &[&[1, 2, 3]], 48);
    let store = bench.one_store();
    // Blocks 1 and 2 hold KV already: no need to wait for those who read them.
    let guest = bench.add("guest", 1, 2);
    assert!(matches!(
        bench.requests.lookup(guest, 32, 40),
        Lookup::Tokens(0, _)
    ));
    assert_eq!(bench.requests.first_given(guest, 0), 2);
    let given = [GivenBlocks {
        ids: &[7],
        first: 2,
        fresh: 2,
    }];
    bench.requests.allocated(guest, &given, 0).unwrap();
    bench
        .requests
        .scheduled(guest, &[&[1, 2, 7]], true, 32)
        .unwrap();
    assert!(bench.orders().flush.is_empty());
    bench.end(&store, false);
    // The guest stores what the owner could not.
    bench.requests.store(guest, 40).unwrap();
    assert_eq!(*bench.one_store().blocks, [1, 2]);
    // Hashes that change are given again, and nothing is taken for stored.
    let id = bench.requests.add(
        "session",
        NewRequest {
            prompt_tokens: 32,
            ..NewRequest::default()
        },
    );
    let id = id.unwrap();
    bench.hashes(id, 5, 0..2);
    bench.run(id, &[&[11, 12]], 32);
    assert_eq!(bench.one_store().slots.len(), 2);
    bench.requests.clear_hashes(id);
    assert_eq!(bench.requests.num_hashes(id), 0);
    bench.hashes(id, 6, 0..2);
    bench.requests.store(id, 32).unwrap();
    assert_eq!(bench.one_store().slots.len(), 2);
}

//! What the requests table decides, case by case: what is stored, what is found, and why not more.

#[allow(dead_code, reason = "each test crate uses its part")]
mod bench;

use bench::{Bench, FULL};
use kvoffload_core::manager::{Missed, Room};
use kvoffload_core::requests::{
    Deferral, GroupConfig, JobOrder, Lookup, MissReason, NewRequest, RequestError, Requests,
    RequestsConfig, Span,
};

const WRITING: Lookup = Lookup::Later(Deferral::Writing);

fn missed(reason: Missed) -> Lookup {
    Lookup::Tokens(0, Some(MissReason::Missed(reason)))
}

#[test]
fn putting_off_ends_with_its_deadline_and_is_not_set_back() {
    let mut bench = Bench::new(8);
    let writer = bench.add("writer", 1, 2);
    bench.run(writer, &[&[1, 2]], 32);
    let reader = bench.add("reader", 1, 2);
    assert_eq!(bench.lookup(reader, 40), WRITING);
    bench.wait(1999);
    // Another text's end makes it look again; that is no new beginning.
    bench.requests.report(bench_job(0), 1, Ok(())).unwrap_err();
    assert_eq!(bench.lookup(reader, 40), WRITING);
    bench.wait(1);
    let slow = Lookup::Tokens(0, Some(MissReason::TooSlow));
    assert_eq!(bench.lookup(reader, 40), slow);
    // The engine has no blocks for it, and asks again with the next step.
    assert_eq!(bench.lookup(reader, 40), slow);
    assert_eq!(bench.requests.stats().deadlines, 1);
    // It ran, and was preempted: it may be put off once more.
    bench.run(reader, &[&[3, 4]], 16);
    bench.requests.preempted(reader);
    assert_eq!(bench.lookup(reader, 40), WRITING);
}

fn bench_job(id: u64) -> kvoffload_core::jobs::JobId {
    kvoffload_core::jobs::JobId(id)
}

#[test]
fn who_is_put_off_is_looked_at_again_after_a_change() {
    let mut bench = Bench::new(8);
    let writer = bench.add("writer", 1, 2);
    bench.run(writer, &[&[1, 2]], 32);
    let store = bench.one_store();
    let reader = bench.add("reader", 1, 2);
    assert_eq!(bench.lookup(reader, 40), WRITING);
    let asked = bench.requests.manager().stats().laters;
    assert_eq!(bench.lookup(reader, 40), WRITING);
    assert_eq!(bench.requests.manager().stats().laters, asked);
    assert_eq!(bench.requests.stats().deferred_writing, 2);
    bench.end(&store, true);
    assert_eq!(bench.lookup(reader, 40), Lookup::Tokens(32, None));
}

#[test]
fn two_requests_load_the_same_one_after_the_other() {
    let mut bench = Bench::new(8);
    bench.fill(1, 2);
    let (first, second) = (bench.add("first", 1, 2), bench.add("second", 1, 2));
    assert_eq!(bench.lookup(first, 40), Lookup::Tokens(32, None));
    bench.load(first, &[&[1, 2]], 32);
    assert_eq!(bench.lookup(second, 40), Lookup::Later(Deferral::Loading));
    let load = bench.one_load();
    bench.end(&load, true);
    assert_eq!(bench.lookup(second, 40), Lookup::Tokens(32, None));
}

#[test]
fn every_reason_for_a_miss_is_told() {
    let mut bench = Bench::with(2, &[FULL], |config, _| config.share_loads = false);
    let one = bench.add("one", 1, 2);
    assert_eq!(bench.lookup(one, 40), missed(Missed::NeverStored));
    bench.fill(1, 2);
    bench.fill(2, 2);
    assert_eq!(bench.lookup(one, 40), missed(Missed::Evicted));
    // Both slots are being read: there is no room.
    let two = bench.add("two", 2, 2);
    assert_eq!(bench.lookup(two, 40), Lookup::Tokens(32, None));
    bench.load(two, &[&[1, 2]], 32);
    let load = bench.one_load();
    let three = bench.add("three", 3, 2);
    bench.run(three, &[&[3, 4]], 32);
    assert_eq!(bench.requests.stats().chunks_refused, 2);
    let other = bench.add("other", 3, 2);
    assert_eq!(bench.lookup(other, 40), missed(Missed::Refused));
    bench.end(&load, false);
    assert_eq!(bench.lookup(two, 40), missed(Missed::Failed));
    bench.run(three, &[&[3, 4]], 32);
    let store = bench.one_store();
    bench.wait(5000);
    bench.end(&store, false);
    assert_eq!(bench.lookup(other, 40), missed(Missed::Failed));

    let mut bench = Bench::with(4, &[FULL], |_, manager| manager.store_threshold = 2);
    let id = bench.add("one", 1, 2);
    bench.run(id, &[&[1, 2]], 32);
    assert!(bench.orders().stores.is_empty());
    assert_eq!(bench.lookup(id, 40), missed(Missed::Threshold));
    bench.run(id, &[&[1, 2]], 16);
    // `TooSlow` and `Policy` have their own tests.
    let counts = bench.requests.stats().miss_reasons;
    let at = MissReason::ALL
        .iter()
        .position(|reason| reason.name() == "offered_too_rarely");
    assert_eq!(counts[at.unwrap()], 1);
}

#[test]
fn a_lookup_counts_once_for_each_admission() {
    let mut bench = Bench::new(8);
    bench.fill(1, 2);
    let id = bench.add("request", 1, 2);
    let before = *bench.requests.stats();
    for _ in 0..5 {
        assert_eq!(bench.lookup(id, 40), Lookup::Tokens(32, None));
    }
    bench.load(id, &[&[1, 2]], 32);
    bench.requests.scheduled(id, &[&[1, 2]], true, 32).unwrap();
    let after = *bench.requests.stats();
    assert_eq!(
        (after.lookups - before.lookups, after.hits - before.hits),
        (1, 1)
    );
    assert_eq!(after.tokens_asked - before.tokens_asked, 40);
    assert_eq!(after.tokens_hit - before.tokens_hit, 32);
}

#[test]
fn waiting_longer_than_computing_takes_is_not_worth_it() {
    let mut bench = Bench::new(8);
    let slow = bench.add("slow", 9, 1);
    bench.requests.step(100);
    bench.wait(100);
    bench.requests.step(100);
    bench.run(slow, &[&[9]], 16);
    let store = bench.one_store();
    bench.wait(1000);
    bench.end(&store, true);
    // A token takes a millisecond, a store a second.
    let writer = bench.add("writer", 1, 3);
    bench.run(writer, &[&[1, 2, 3]], 48);
    let reader = bench.add("reader", 1, 3);
    let answer = bench.lookup(reader, 60);
    assert_eq!(answer, Lookup::Tokens(0, Some(MissReason::TooSlow)));
}

#[test]
fn what_finds_no_room_is_the_end_of_the_prefix_and_is_offered_again() {
    let wide = GroupConfig {
        id: 1,
        tokens_per_block: 32,
        ..FULL
    };
    let mut bench = Bench::with(6, &[FULL, wide], |_, _| {});
    let other = bench.add("other", 2, 2);
    bench.run(other, &[&[11, 12], &[13]], 32);
    let others = bench.one_store();
    assert_eq!(others.slots.len(), 3);
    let id = bench.add("request", 1, 4);
    bench.run(id, &[&[1, 2, 3, 4], &[5, 6]], 64);
    let store = bench.one_store();
    assert_eq!(*store.blocks, [1, 2, 5], "by the position of their ends");
    assert_eq!(
        (&*store.group_sizes, &*store.first_blocks),
        (&[2, 1][..], &[0, 0][..])
    );
    assert_eq!(bench.requests.stats().chunks_refused, 3);
    let room = |bench: &Bench| bench.requests.manager().room(Room::Evict);
    assert_eq!(room(&bench), 0);
    bench.requests.store(id, 64).unwrap();
    let refused = bench.requests.stats().chunks_refused;
    assert_eq!(refused, 3, "not looked at again while there is no room");
    bench.end(&others, false);
    assert_eq!(room(&bench), 3);
    bench.requests.store(id, 64).unwrap();
    let store = bench.one_store();
    assert_eq!(
        *store.blocks,
        [3, 4, 6],
        "each once, from the first that was refused"
    );
    assert_eq!(
        (&*store.group_sizes, &*store.first_blocks),
        (&[2, 1][..], &[2, 1][..])
    );
    bench.requests.store(id, 64).unwrap();
    assert!(bench.orders().stores.is_empty());
}

#[test]
fn low_priority_makes_nothing_go() {
    let mut bench = Bench::new(3);
    bench.fill(1, 2);
    let about = NewRequest {
        low_priority: true,
        ..NewRequest::default()
    };
    let low = bench.add_as("low", 2, 2, about);
    bench.run(low, &[&[1, 2]], 32);
    assert_eq!(bench.one_store().slots.len(), 1, "the free slot");
    assert_eq!(bench.requests.manager().stats().evicted, 0);
    let high = bench.add("high", 3, 2);
    bench.run(high, &[&[3, 4]], 32);
    assert_eq!(bench.one_store().slots.len(), 2);
    assert_eq!(bench.requests.manager().stats().evicted, 2);
}

fn stored_blocks(bench: &mut Bench) -> Vec<u32> {
    let stores = bench.orders().stores;
    stores
        .iter()
        .flat_map(|order: &JobOrder| order.blocks.to_vec())
        .collect()
}

#[test]
fn a_request_sets_limits() {
    let mut bench = Bench::new(16);
    bench.fill(1, 4);
    let policy = |tokens| Lookup::Tokens(tokens, Some(MissReason::Policy));
    let about = NewRequest {
        max_load_tokens: Some(40),
        max_store_tokens: Some(40),
        ..NewRequest::default()
    };
    let limited = bench.add_as("limited", 1, 4, about);
    assert_eq!(bench.lookup(limited, 70), policy(32));
    bench.hashes(limited, 1, 4..5);
    let limited = bench.add_as("limited store", 2, 4, about);
    bench.run(limited, &[&[1, 2, 3, 4]], 64);
    assert_eq!(stored_blocks(&mut bench), [1, 2]);
    let about = NewRequest {
        skip_load: true,
        ..NewRequest::default()
    };
    let id = bench.add_as("no load", 1, 4, about);
    assert_eq!(bench.lookup(id, 70), policy(0));
    let about = NewRequest {
        skip_store: true,
        ..NewRequest::default()
    };
    let id = bench.add_as("no store", 3, 4, about);
    bench.run(id, &[&[5, 6, 7, 8]], 64);
    assert!(bench.orders().is_empty());
}

#[test]
fn what_is_generated_is_stored_if_wanted() {
    for (prompt_only, expected) in [(true, vec![1, 2]), (false, vec![1, 2, 3])] {
        let mut bench = Bench::with(16, &[FULL], |config, _| config.prompt_only = prompt_only);
        let id = bench.add("request", 1, 2);
        bench.hashes(id, 1, 2..4);
        bench.run(id, &[&[1, 2, 3, 4]], 60);
        assert_eq!(stored_blocks(&mut bench), expected);
    }
}

#[test]
fn chunks_are_stored_as_far_as_tokens_keys_and_blocks_reach() {
    let mut bench = Bench::new(16);
    // Never scheduled: no blocks.
    let id = bench.add("aborted", 1, 4);
    bench.requests.finish(id, 64).unwrap();
    assert!(bench.orders().is_empty());
    // A hash comes late: the chunk is offered when it is there.
    let id = bench.add("late", 2, 1);
    bench.requests.finish(id, 0).unwrap();
    let about = NewRequest {
        prompt_tokens: 64,
        ..NewRequest::default()
    };
    let id = bench.requests.add("late", about).unwrap();
    bench.hashes(id, 2, 0..1);
    bench.run(id, &[&[1, 2, 3]], 48);
    assert_eq!(stored_blocks(&mut bench), [1]);
    bench.hashes(id, 2, 1..3);
    bench.requests.store(id, 47).unwrap();
    assert_eq!(stored_blocks(&mut bench), [2], "the third is not complete");
    // Preempted, then aborted: its blocks may be anybody's.
    bench.requests.preempted(id);
    bench.requests.finish(id, 48).unwrap();
    assert!(bench.orders().stores.is_empty());
}

#[test]
fn a_draft_models_last_chunk_waits_for_the_one_behind_it() {
    let draft = GroupConfig {
        draft: true,
        ..FULL
    };
    let mut bench = Bench::with(16, &[draft], |config, _| config.prompt_only = false);
    let id = bench.add("request", 1, 2);
    bench.hashes(id, 1, 2..4);
    bench.run(id, &[&[1, 2, 3, 4]], 64);
    let store = bench.one_store();
    assert_eq!(
        *store.blocks,
        [1, 2, 3],
        "a rejected token is written again"
    );
    bench.end(&store, true);
    let reader = bench.add("reader", 1, 4);
    let answer = bench.lookup(reader, 64);
    assert!(
        matches!(answer, Lookup::Tokens(32, _)),
        "{answer:?}: the third proves the second"
    );
    bench.requests.finish(id, 64).unwrap();
    assert_eq!(stored_blocks(&mut bench), [4]);
}

#[test]
fn a_state_is_found_at_its_end_and_a_window_at_its_last_tokens() {
    let window = GroupConfig {
        id: 1,
        span: Span::Window(20),
        ..FULL
    };
    let state = GroupConfig {
        id: 2,
        span: Span::State,
        ..FULL
    };
    let mut bench = Bench::with(16, &[FULL, window, state], |_, _| {});
    let writer = bench.add("writer", 1, 4);
    // The window has left its first two blocks, and only one state was kept.
    let tables: [&[u32]; 3] = [&[1, 2, 3, 4], &[0, 0, 5, 6], &[0, 0, 0, 7]];
    bench.run(writer, &tables, 64);
    let store = bench.one_store();
    assert_eq!(store.slots.len(), 7);
    bench.end(&store, true);
    let reader = bench.add("reader", 1, 4);
    assert_eq!(bench.lookup(reader, 70), Lookup::Tokens(64, None));
    let given: [&[u32]; 3] = [&[11, 12, 13, 14], &[0, 0, 15, 16], &[0, 0, 0, 17]];
    bench.load(reader, &given, 64);
    let load = bench.one_load();
    assert_eq!(*load.first_blocks, [0, 2, 3]);
    assert_eq!(load.slots, store.slots);
    let shorter = bench.add("shorter", 1, 3);
    assert_eq!(bench.lookup(shorter, 56), missed(Missed::NeverStored));
}

#[test]
fn settings_and_calls_that_make_no_sense_are_named() {
    let refused = |groups: &[GroupConfig], blocks_per_chunk| {
        let config = RequestsConfig {
            groups: groups.to_vec(),
            blocks_per_chunk,
            ..RequestsConfig::new(FULL)
        };
        let manager = kvoffload_core::manager::Config::new(1);
        let manager = kvoffload_core::manager::Manager::new(manager).unwrap();
        Requests::new(config, manager).unwrap_err()
    };
    assert_eq!(refused(&[], 1), RequestError::Zero { field: "groups" });
    let zero = RequestError::Zero {
        field: "blocks_per_chunk",
    };
    assert_eq!(refused(&[FULL], 0), zero);
    assert_eq!(
        refused(&[FULL, FULL], 1),
        RequestError::SameGroup { group: 0 }
    );
    let state = GroupConfig {
        span: Span::State,
        ..FULL
    };
    assert_eq!(refused(&[state], 2), RequestError::StateChunks { group: 0 });
    let small = GroupConfig {
        tokens_per_block: 8,
        ..FULL
    };
    assert!(matches!(refused(&[small], 1), RequestError::Hashes { .. }));
    let window = GroupConfig {
        span: Span::Window(0),
        ..FULL
    };
    assert_eq!(
        refused(&[window], 1),
        RequestError::Zero { field: "window" }
    );

    let mut bench = Bench::new(4);
    let id = bench.add("request", 1, 1);
    let error = bench.requests.add("request", NewRequest::default());
    assert!(matches!(error, Err(RequestError::Duplicate { .. })));
    assert!(matches!(
        bench.requests.find("other"),
        Err(RequestError::Unknown { .. })
    ));
    let error = bench.requests.add_hash(id, b"longer than those before");
    assert!(matches!(error, Err(RequestError::HashLength { .. })));
    assert_eq!(bench.requests.num_hashes(id), 1);
    let error = bench.requests.scheduled(id, &[], true, 0);
    assert!(matches!(error, Err(RequestError::Groups { given: 0, .. })));
    let error = bench.requests.allocated(id, &[], 16);
    assert!(matches!(
        error,
        Err(RequestError::Groups { expected: 1, .. })
    ));
    assert!(!bench.requests.has_work());
}

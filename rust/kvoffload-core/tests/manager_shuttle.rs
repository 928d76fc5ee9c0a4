//! Random schedules of whole life cycles from several threads (`--cfg shuttle`).
#![cfg(shuttle)]

use std::sync::Arc;

use kvoffload_core::manager::{Answer, Config, Manager, PolicyKind, Prepared};

/// With `discards`, one thread takes what it has loaded out of the pool, also under others' pins.
fn life_cycles(policy: PolicyKind, discards: bool) {
    let manager = Arc::new(
        Manager::new(Config {
            policy,
            ..Config::new(3)
        })
        .unwrap(),
    );
    let threads: Vec<_> = (0..3u8)
        .map(|thread| {
            let manager = Arc::clone(&manager);
            shuttle::thread::spawn(move || {
                let mut prepared = Prepared::default();
                for round in 0..3u8 {
                    let names = [[thread % 2, round], [thread, round % 2]];
                    let keys: [&[u8]; 2] = [&names[0], &names[1]];
                    let mut request = manager.new_request();
                    if manager
                        .prepare_store(&keys, &mut request, &mut prepared)
                        .unwrap()
                    {
                        let stored: Vec<_> = prepared.to_store.iter().map(|at| keys[*at]).collect();
                        manager
                            .complete_store(stored.iter().copied(), &mut request, round != 1)
                            .unwrap();
                    }
                    let mut slots = Vec::new();
                    if manager.lookup(keys[0]) == Answer::Hit
                        && manager
                            .prepare_load([keys[0]], &mut request, &mut slots)
                            .is_ok()
                    {
                        if discards && thread == 2 {
                            manager.discard_load([keys[0]], &mut request).unwrap();
                        } else {
                            // Pinned: nobody else can take it away now.
                            assert!(discards || manager.lookup(keys[0]) == Answer::Hit);
                            manager.complete_load([keys[0]], &mut request).unwrap();
                        }
                    }
                    manager.finish_request(&mut request, []).unwrap();
                    assert_eq!(request.held(), 0);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let stats = manager.stats();
    assert_eq!((stats.pinned, stats.writing), (0, 0));
    assert_eq!(stats.free + stats.ready, stats.slots);
    manager.validate();
}

#[test]
fn lru_life_cycles_from_three_threads() {
    shuttle::check_random(|| life_cycles(PolicyKind::Lru, false), 2_000);
}

#[test]
fn arc_life_cycles_from_three_threads() {
    shuttle::check_random(|| life_cycles(PolicyKind::Arc, false), 2_000);
}

#[test]
fn life_cycles_with_loads_that_fail() {
    shuttle::check_random(|| life_cycles(PolicyKind::Lru, true), 2_000);
    shuttle::check_random(|| life_cycles(PolicyKind::Arc, true), 2_000);
}

//! The manager case by case: deadlines, discards, and settings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvoffload_core::manager::{
    Answer, Clock, Config, Manager, ManagerError, PolicyKind, Prepared, Room,
};

#[test]
fn an_overdue_write_misses_and_its_late_end_still_counts() {
    let millis = Arc::new(AtomicU32::new(0));
    let clock = Arc::clone(&millis);
    let manager = Manager::new(Config {
        write_deadline: Duration::from_millis(1500),
        clock: Clock::new(move || Duration::from_millis(clock.load(Ordering::Relaxed).into())),
        ..Config::new(2)
    })
    .unwrap();
    let mut request = manager.new_request();
    let mut prepared = Prepared::default();
    let keys: [&[u8]; 1] = [b"k"];
    assert!(
        manager
            .prepare_store(&keys, &mut request, &mut prepared)
            .unwrap()
    );
    millis.store(1500, Ordering::Relaxed);
    assert_eq!(manager.lookup(b"k"), Answer::Later);
    millis.store(1600, Ordering::Relaxed);
    assert_eq!(manager.lookup(b"k"), Answer::Miss);
    assert_eq!(manager.stats().overdue, 1);

    // The copy may still run: neither the key nor the slot is given out again.
    let mut other = manager.new_request();
    let two: [&[u8]; 2] = [b"k", b"l"];
    assert!(
        manager
            .prepare_store(&two, &mut other, &mut prepared)
            .unwrap()
    );
    assert_eq!(prepared.to_store, [1]);
    let three: [&[u8]; 1] = [b"m"];
    assert!(
        !manager
            .prepare_store(&three, &mut other, &mut prepared)
            .unwrap()
    );

    manager.complete_store(keys, &mut request, true).unwrap();
    assert_eq!(manager.lookup(b"k"), Answer::Hit);
}

#[test]
fn a_request_of_another_manager_is_refused() {
    let (a, b) = (
        Manager::new(Config::new(1)).unwrap(),
        Manager::new(Config::new(1)).unwrap(),
    );
    let mut request = a.new_request();
    let keys: [&[u8]; 1] = [b"k"];
    let stored = b.prepare_store(&keys, &mut request, &mut Prepared::default());
    assert_eq!(stored, Err(ManagerError::ForeignRequest));
    assert_eq!(b.stats().free, 1);
}

#[test]
fn bad_settings_are_named() {
    assert_eq!(
        Manager::new(Config::new(0)).unwrap_err(),
        ManagerError::NoSlots
    );
    let many = Config::MAX_SLOTS + 1;
    let error = Manager::new(Config::new(many)).unwrap_err();
    assert_eq!(error, ManagerError::TooManySlots { num_slots: many });
    let tracked = Config {
        store_threshold: 2,
        max_tracker_size: u32::MAX,
        ..Config::new(1)
    };
    let error = Manager::new(tracked).unwrap_err();
    assert!(error.to_string().contains("max_tracker_size"));
    assert!(
        PolicyKind::from_name("lfu")
            .unwrap_err()
            .to_string()
            .contains("\"lru\"")
    );
}

#[test]
fn metadata_stays_within_its_budget() {
    for (arc, budget) in [(false, 128), (true, 256)] {
        let manager = Manager::new(Config {
            policy: if arc {
                PolicyKind::Arc
            } else {
                PolicyKind::Lru
            },
            ..Config::new(100_000)
        })
        .unwrap();
        let bytes = manager.metadata_bytes() / 100_000;
        assert!(bytes <= budget, "{bytes} bytes a slot, arc: {arc}");
    }
}

/// A request that reads a chunk which another one discards keeps its pin on the old slot, whatever
/// becomes of the key.
#[test]
fn a_reader_of_a_discarded_chunk_keeps_its_slot() {
    let manager = Manager::new(Config::new(4)).unwrap();
    let (mut reader, mut other) = (manager.new_request(), manager.new_request());
    let mut prepared = Prepared::default();
    let key: [&[u8]; 1] = [b"k"];
    let mut slots = Vec::new();
    let mut store = |request: &mut _| {
        manager.prepare_store(&key, request, &mut prepared).unwrap();
        let stored = prepared.to_store.len();
        manager.complete_store(key, request, true).unwrap();
        stored
    };
    assert_eq!(store(&mut other), 1);
    manager.prepare_load(key, &mut reader, &mut slots).unwrap();
    manager.prepare_load(key, &mut other, &mut slots).unwrap();
    manager.discard_load(key, &mut other).unwrap();
    assert_eq!(manager.lookup(b"k"), Answer::Miss);
    assert_eq!(store(&mut reader), 0, "it reads the key");
    assert_eq!(store(&mut other), 1);
    let error = manager.prepare_load(key, &mut reader, &mut slots);
    let not_ready = ManagerError::KeyNotReady {
        position: 0,
        writing: false,
    };
    assert_eq!(error, Err(not_ready));
    assert_eq!(store(&mut reader), 0, "the key is in the pool");
    manager.complete_load(key, &mut reader).unwrap();
    manager.prepare_load(key, &mut reader, &mut slots).unwrap();
    manager.validate();
    manager.reset();
    manager.complete_load(key, &mut reader).unwrap();
    manager.validate();
    assert_eq!(manager.stats().stale_completions, 3);
}

#[test]
fn a_refusal_names_the_first_key_without_room() {
    let manager = Manager::new(Config::new(1)).unwrap();
    let mut request = manager.new_request();
    let mut prepared = Prepared::default();
    let one: [&[u8]; 1] = [b"a"];
    assert!(
        manager
            .prepare_store(&one, &mut request, &mut prepared)
            .unwrap()
    );
    manager.complete_store(one, &mut request, true).unwrap();
    let two: [&[u8]; 2] = [b"a", b"b"];
    for from in [Room::Free, Room::Evict] {
        let stored = manager.prepare_store_in(from, &two, &mut request, &mut prepared);
        assert_eq!((stored, prepared.refused_from), (Ok(false), Some(1)));
    }
    let other: [&[u8]; 1] = [b"b"];
    for (from, stored) in [(Room::Free, false), (Room::Evict, true)] {
        let answer = manager.prepare_store_in(from, &other, &mut request, &mut prepared);
        assert_eq!(answer, Ok(stored));
    }
}

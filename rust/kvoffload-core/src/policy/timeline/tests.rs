use proptest::prelude::*;

use super::*;

/// The invariants of the module's documentation.
fn validate(order: &Timeline) {
    let size = order.slots.len();
    assert!(order.write < size && order.compacted <= order.read);
    assert!(order.write <= order.sweep_at || order.read > 0);
    assert!(order.read == 0 || order.read < order.write);
    for at in 0..size {
        let live = order.live[at / 64] >> (at % 64) & 1 == 1;
        let inside = at < order.compacted || (order.read..order.write).contains(&at);
        assert!(inside || !live, "a live entry in an empty part");
        assert!(live || !order.evictable.contains(at), "an evictable hole");
        assert!(!live || order.positions[order.slots[at].index()] as usize == at);
    }
    let present = order.positions.iter().filter(|&&at| at != ABSENT).count();
    assert_eq!((present, order.iter().count()), (order.len, order.len));
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Append,
    MoveToEnd,
    MoveNewestToEnd,
    MoveOldestToEnd,
    Remove,
    Set,
    Clear,
    Take,
    ClearAll,
}

fn ops() -> impl Strategy<Value = Vec<(Op, prop::sample::Index, usize)>> {
    let op = prop_oneof![
        20 => Just(Op::Append),
        10 => Just(Op::MoveToEnd),
        3 => Just(Op::MoveNewestToEnd),
        3 => Just(Op::MoveOldestToEnd),
        4 => Just(Op::Remove),
        10 => Just(Op::Set),
        5 => Just(Op::Clear),
        4 => Just(Op::Take),
    ];
    let op = prop_oneof![300 => op, 1 => Just(Op::ClearAll)];
    // Each is repeated on successive slots: long runs of one kind are what wears the array out.
    prop::collection::vec((op, any::<prop::sample::Index>(), 1..20usize), 1..120)
}

/// Slots with their evictable bits, oldest first.
struct Model(Vec<(Slot, bool)>);

impl Model {
    fn take(&mut self, slot: Slot) -> Option<bool> {
        let at = self.0.iter().position(|entry| entry.0 == slot)?;
        Some(self.0.remove(at).1)
    }

    fn move_to_end(&mut self, slot: Slot) {
        if let Some(evictable) = self.take(slot) {
            self.0.push((slot, evictable));
        }
    }

    fn set(&mut self, slot: Slot, evictable: bool) {
        self.0
            .iter_mut()
            .filter(|entry| entry.0 == slot)
            .for_each(|entry| entry.1 = evictable);
    }
}

fn step(order: &mut Timeline, model: &mut Model, op: Op, slot: Slot) {
    match op {
        Op::Append => {
            if order.contains(slot) {
                order.move_to_end(slot);
                model.move_to_end(slot);
            } else {
                order.append(slot);
                model.0.push((slot, false));
            }
        }
        Op::MoveToEnd => {
            order.move_to_end(slot);
            model.move_to_end(slot);
        }
        Op::MoveNewestToEnd | Op::MoveOldestToEnd => {
            let newest = matches!(op, Op::MoveNewestToEnd);
            let entry = if newest {
                model.0.last()
            } else {
                model.0.first()
            };
            if let Some(&(slot, _)) = entry {
                order.move_to_end(slot);
                model.move_to_end(slot);
            }
        }
        Op::Remove => assert_eq!(order.remove(slot), model.take(slot)),
        Op::Set => {
            order.set_evictable(slot);
            model.set(slot, true);
        }
        Op::Clear => {
            order.clear_evictable(slot);
            model.set(slot, false);
        }
        Op::Take => {
            let mut from = 0;
            for _ in 0..3 {
                let first = model.0.iter().find(|entry| entry.1).map(|entry| entry.0);
                assert_eq!(order.take_evictable(&mut from), first);
                first.map(|slot| model.take(slot));
            }
        }
        Op::ClearAll => {
            order.clear();
            model.0.clear();
        }
    }
    validate(order);
    assert!(
        order.iter().eq(model.0.iter().map(|entry| entry.0)),
        "the order differs"
    );
    assert_eq!(
        order.evictable(),
        model.0.iter().filter(|entry| entry.1).count()
    );
    assert!(
        model
            .0
            .iter()
            .all(|&(slot, evictable)| order.is_evictable(slot) == evictable)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn it_is_an_ordered_list(
        num_slots in prop_oneof![1..10u32, 1..80u32],
        ops in ops(),
    ) {
        let mut order = Timeline::new(num_slots);
        let mut model = Model(Vec::new());
        for (op, first, times) in ops {
            for i in 0..times {
                let slot = (first.index(num_slots as usize) + i) as u32 % num_slots;
                step(&mut order, &mut model, op, Slot::new(slot));
            }
        }
    }
}

#[test]
fn the_worst_order_of_appends_fits() {
    // Appending again what the sweep has just moved makes it move as much as it ever can.
    for num_slots in (1..30).chain([63, 64, 65, 150]) {
        let mut order = Timeline::new(num_slots);
        (0..num_slots).for_each(|slot| order.append(Slot::new(slot)));
        for _ in 0..20 * num_slots {
            let oldest = order.iter().next().expect("nobody leaves");
            order.move_to_end(oldest);
            validate(&order);
        }
    }
}

#[test]
fn it_costs_less_than_fourteen_bytes_a_slot() {
    for num_slots in [1_000, 10_000, 1_000_000] {
        let bytes = Timeline::new(num_slots).metadata_bytes() as f64;
        assert!(
            bytes / f64::from(num_slots) < 12.7,
            "{bytes} bytes for {num_slots} slots"
        );
    }
    assert_eq!(Timeline::new(0).iter().count(), 0);
}

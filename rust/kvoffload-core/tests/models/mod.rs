//! LRU and ARC as plain lists of keys that are searched from one end to the other: slow and literal.

use kvoffload_core::key::KeyHash;
use kvoffload_core::policy::{Access, PolicyDump};
use kvoffload_core::pool::Slot;

/// A key's number. Its bytes are in [`bytes`].
pub(crate) type Name = u16;

pub(crate) fn bytes(name: Name) -> Vec<u8> {
    // Some are too long to be held in place.
    name.to_le_bytes().repeat(1 + usize::from(name) % 24)
}

pub(crate) fn hash(name: Name) -> KeyHash {
    KeyHash::of(&bytes(name))
}

/// What a policy has to do, said in keys.
pub(crate) trait Model {
    fn insert(&mut self, key: Name);
    fn remove(&mut self, key: Name);
    fn touch(&mut self, key: Name, ready: bool);
    fn wanted(&mut self, key: Name);
    fn access(&mut self, key: Name, access: Access);
    /// `n` victims among the keys that `may_go`, or nothing at all.
    fn evict(&mut self, n: usize, may_go: &dyn Fn(Name) -> bool) -> Option<Vec<Name>>;
    fn clear(&mut self);
    fn dump(&self, slot_of: &dyn Fn(Name) -> Slot) -> PolicyDump;
}

fn take(list: &mut Vec<Name>, key: Name) -> bool {
    let at = list.iter().position(|&held| held == key);
    at.map(|at| list.remove(at)).is_some()
}

#[derive(Default)]
pub(crate) struct LruModel {
    order: Vec<Name>,
}

impl LruModel {
    fn renew(&mut self, key: Name) {
        take(&mut self.order, key);
        self.order.push(key);
    }
}

impl Model for LruModel {
    fn insert(&mut self, key: Name) {
        self.order.push(key);
    }

    fn remove(&mut self, key: Name) {
        take(&mut self.order, key);
    }

    fn touch(&mut self, key: Name, _ready: bool) {
        self.renew(key);
    }

    fn wanted(&mut self, _key: Name) {}

    fn access(&mut self, key: Name, _access: Access) {
        self.renew(key);
    }

    fn evict(&mut self, n: usize, may_go: &dyn Fn(Name) -> bool) -> Option<Vec<Name>> {
        let victims: Vec<Name> = self
            .order
            .iter()
            .copied()
            .filter(|&key| may_go(key))
            .take(n)
            .collect();
        if victims.len() < n {
            return None;
        }
        self.order.retain(|key| !victims.contains(key));
        Some(victims)
    }

    fn clear(&mut self) {
        self.order.clear();
    }

    fn dump(&self, slot_of: &dyn Fn(Name) -> Slot) -> PolicyDump {
        let order = self.order.iter().map(|&key| slot_of(key)).collect();
        PolicyDump {
            resident: vec![("lru", order)],
            ghosts: Vec::new(),
            target: None,
        }
    }
}

#[derive(Default)]
pub(crate) struct ArcModel {
    capacity: usize,
    t1: Vec<Name>,
    t2: Vec<Name>,
    b1: Vec<Name>,
    b2: Vec<Name>,
    target: f64,
}

impl ArcModel {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            ..Self::default()
        }
    }
}

impl Model for ArcModel {
    fn insert(&mut self, key: Name) {
        self.t1.push(key);
        take(&mut self.b1, key);
        take(&mut self.b2, key);
    }

    fn remove(&mut self, key: Name) {
        let _ = take(&mut self.t1, key) || take(&mut self.t2, key);
    }

    fn touch(&mut self, key: Name, ready: bool) {
        if take(&mut self.t1, key) {
            if ready {
                self.t2.push(key)
            } else {
                self.t1.push(key)
            }
        } else if take(&mut self.t2, key) {
            self.t2.push(key);
        }
    }

    fn wanted(&mut self, key: Name) {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        if take(&mut self.b1, key) {
            self.target = f64::min(self.target + f64::max(1.0, b2 / b1), self.capacity as f64);
            self.b1.push(key);
        } else if take(&mut self.b2, key) {
            self.target = f64::max(self.target - f64::max(1.0, b1 / b2), 0.0);
            self.b2.push(key);
        }
    }

    fn access(&mut self, key: Name, access: Access) {
        match access {
            Access::Inserted => {
                if take(&mut self.t1, key) {
                    self.t1.push(key);
                } else if take(&mut self.t2, key) {
                    self.t2.push(key);
                }
            }
            Access::Reused => self.touch(key, true),
            Access::Observed => {}
        }
    }

    fn evict(&mut self, n: usize, may_go: &dyn Fn(Name) -> bool) -> Option<Vec<Name>> {
        let (mut t1, mut t2) = (self.t1.clone(), self.t2.clone());
        let first = |list: &[Name]| list.iter().copied().find(|&key| may_go(key));
        let mut victims = Vec::new();
        for _ in 0..n {
            let mut victim = None;
            if t1.len() >= self.target.trunc() as usize {
                victim = first(&t1).map(|key| (key, true));
            }
            victim = victim.or_else(|| first(&t2).map(|key| (key, false)));
            victim = victim.or_else(|| first(&t1).map(|key| (key, true)));
            let (key, was_in_t1) = victim?;
            take(if was_in_t1 { &mut t1 } else { &mut t2 }, key);
            victims.push((key, was_in_t1));
        }
        (self.t1, self.t2) = (t1, t2);
        for &(key, was_in_t1) in &victims {
            if was_in_t1 {
                self.b1.push(key)
            } else {
                self.b2.push(key)
            }
        }
        for ghosts in [&mut self.b1, &mut self.b2] {
            ghosts.drain(..ghosts.len().saturating_sub(self.capacity));
        }
        Some(victims.into_iter().map(|victim| victim.0).collect())
    }

    fn clear(&mut self) {
        *self = Self {
            capacity: self.capacity,
            ..Self::default()
        };
    }

    fn dump(&self, slot_of: &dyn Fn(Name) -> Slot) -> PolicyDump {
        let slots = |list: &[Name]| list.iter().map(|&key| slot_of(key)).collect();
        let keys = |list: &[Name]| list.iter().map(|&key| bytes(key)).collect();
        PolicyDump {
            resident: vec![("t1", slots(&self.t1)), ("t2", slots(&self.t2))],
            ghosts: vec![("b1", keys(&self.b1)), ("b2", keys(&self.b2))],
            target: Some(self.target),
        }
    }
}

//! What became readable and what was evicted or discarded, for whoever routes by cache content.

use std::collections::VecDeque;

use crate::key::Key;

/// Keys that became readable, were evicted, or were discarded together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The keys, in the order of the call that caused it.
    pub keys: Vec<Key>,
    /// Evicted or discarded; otherwise stored.
    pub removed: bool,
}

/// The events not yet taken. Bounded: a reader that never comes costs the oldest events, not memory.
#[derive(Debug)]
pub(super) struct Events {
    on: bool,
    waiting: VecDeque<Event>,
    keys: usize,
    dropped: u64,
}

/// Keys in untaken events; vLLM takes them once a step.
const KEYS_MAX: usize = 1 << 20;

impl Events {
    pub(super) fn new(on: bool) -> Self {
        Self {
            on,
            waiting: VecDeque::new(),
            keys: 0,
            dropped: 0,
        }
    }

    pub(super) fn on(&self) -> bool {
        self.on
    }

    pub(super) fn push(&mut self, keys: Vec<Key>, removed: bool) {
        if !self.on || keys.is_empty() {
            return;
        }
        self.keys += keys.len();
        self.waiting.push_back(Event { keys, removed });
        while self.keys > KEYS_MAX && self.waiting.len() > 1 {
            let oldest = self.waiting.pop_front().expect("more than one is waiting");
            self.keys -= oldest.keys.len();
            self.dropped += 1;
        }
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        self.keys = 0;
        std::mem::take(&mut self.waiting).into()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unread_queue_is_bounded_and_says_what_it_lost() {
        let mut events = Events::new(true);
        for _ in 0..5 {
            events.push(vec![Key::new(b"k"); KEYS_MAX / 2], false);
        }
        assert_eq!(events.take().len(), 2);
        assert_eq!(events.dropped(), 3);
        assert!(events.take().is_empty());
    }

    #[test]
    fn nothing_is_recorded_when_off() {
        let mut events = Events::new(false);
        events.push(vec![Key::new(b"k")], true);
        assert!(events.take().is_empty());
    }
}

//! What an operator should read, kept until somebody takes it: threads of ours never log, because a
//! logger may want a lock that their caller holds.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The most that is kept.
const MOST: usize = 64;

/// Texts in the order they came, each once.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    any: AtomicBool,
    texts: Mutex<Vec<String>>,
}

impl Notices {
    pub(crate) fn add(&self, text: String) {
        let mut texts = self.texts.lock();
        if texts.len() < MOST && !texts.contains(&text) {
            texts.push(text);
            self.any.store(true, Ordering::Relaxed);
        }
    }

    /// All texts since the last call. Costs next to nothing when there are none.
    pub(crate) fn take(&self) -> Vec<String> {
        if !self.any.swap(false, Ordering::Relaxed) {
            return Vec::new();
        }
        std::mem::take(&mut *self.texts.lock())
    }
}

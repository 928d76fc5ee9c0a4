//! GPU blocks as an engine hands them out: counted references, a queue of free blocks that still hold
//! what they held, and a prefix cache over all of them.

use std::collections::{HashMap, VecDeque};

/// What names a full block: its group, and the hash of all tokens up to its end.
type Name = (usize, u64);

pub(crate) struct Gpu {
    refs: Vec<u32>,
    names: Vec<Option<Name>>,
    cached: HashMap<Name, u32>,
    /// Least recently used first.
    free: VecDeque<u32>,
}

impl Gpu {
    /// The blocks `1..=blocks`; 0 is no block.
    pub(crate) fn new(blocks: u32) -> Self {
        Self {
            refs: vec![0; blocks as usize + 1],
            names: vec![None; blocks as usize + 1],
            cached: HashMap::new(),
            free: (1..=blocks).collect(),
        }
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn alloc(&mut self) -> u32 {
        let block = self.free.pop_front().expect("the caller has counted");
        self.refs[block as usize] = 1;
        if let Some(name) = self.names[block as usize].take() {
            self.cached.remove(&name);
        }
        block
    }

    /// One more request uses a block that is in the prefix cache.
    pub(crate) fn share(&mut self, block: u32) {
        if self.refs[block as usize] == 0 {
            self.free.retain(|&free| free != block);
        }
        self.refs[block as usize] += 1;
    }

    pub(crate) fn release(&mut self, block: u32) {
        self.refs[block as usize] -= 1;
        if self.refs[block as usize] == 0 {
            self.free.push_back(block);
        }
    }

    pub(crate) fn cache(&mut self, block: u32, name: Name) {
        if self.names[block as usize].is_none() && !self.cached.contains_key(&name) {
            self.names[block as usize] = Some(name);
            self.cached.insert(name, block);
        }
    }

    pub(crate) fn find(&self, name: Name) -> Option<u32> {
        self.cached.get(&name).copied()
    }

    /// Nothing computed before is found from now on.
    pub(crate) fn reset(&mut self) {
        self.cached.clear();
        self.names.fill(None);
    }
}

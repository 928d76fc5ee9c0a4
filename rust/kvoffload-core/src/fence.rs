//! Which live jobs read or write which resource (a device block, or a slot).
//!
//! A new job names its resources with [`Fence::enter`] and learns whom it has to wait for. Jobs that
//! conflict may be inside together: the fence reports, the caller orders.

use std::collections::HashMap;

use foldhash::fast::FixedState;

/// What a job does with a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Reads it: conflicts with writers.
    Read,
    /// Writes it: conflicts with everybody else.
    Write,
}

/// The uses of all live jobs. Its memory grows to the largest number of uses at one time.
///
/// Every use is an entry in two lists: that of its resource's readers or writers, doubly linked so
/// that leaving takes one step per entry, and that of its job.
#[derive(Debug, Default)]
pub struct Fence {
    resources: HashMap<u32, Resource, FixedState>,
    /// The newest entry of each job.
    jobs: HashMap<u64, u32, FixedState>,
    entries: Vec<Entry>,
    /// Unused entries, chained by `next`.
    unused: Link,
    live: usize,
}

/// An index into `entries`.
type Link = Option<u32>;

/// The newest reader and the newest writer of a resource; no resource is kept without one.
#[derive(Debug, Default)]
struct Resource {
    readers: Link,
    writers: Link,
}

impl Resource {
    fn list(&mut self, mode: Use) -> &mut Link {
        match mode {
            Use::Read => &mut self.readers,
            Use::Write => &mut self.writers,
        }
    }
}

#[derive(Debug)]
struct Entry {
    job: u64,
    id: u32,
    mode: Use,
    /// Newer and older entry of the same resource and mode.
    prev: Link,
    next: Link,
    /// Older entry of the same job.
    older_of_job: Link,
}

impl Fence {
    /// A fence with no jobs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes that `job` uses resource `id` until it leaves, and adds to `blockers` the other live jobs
    /// that conflict with that, as [`Fence::blockers`] does.
    ///
    /// A job may name the same resource many times, for the same or another use.
    pub fn enter(&mut self, job: u64, id: u32, mode: Use, blockers: &mut Vec<u64>) {
        self.blockers(job, id, mode, blockers);
        let index = match self.unused {
            Some(index) => {
                self.unused = self.entries[index as usize].next;
                index
            }
            None => self.entries.len() as u32,
        };
        let head = self.resources.entry(id).or_default().list(mode);
        let next = head.replace(index);
        let older_of_job = self.jobs.insert(job, index);
        let entry = Entry {
            job,
            id,
            mode,
            prev: None,
            next,
            older_of_job,
        };
        match self.entries.get_mut(index as usize) {
            Some(unused) => *unused = entry,
            None => self.entries.push(entry),
        }
        if let Some(next) = next {
            self.entries[next as usize].prev = Some(index);
        }
        self.live += 1;
    }

    /// Adds to `blockers` the live jobs other than `job` that a use of resource `id` conflicts with.
    ///
    /// `blockers` is sorted and holds each job once: pass the same vector for all uses of a job, empty
    /// at first.
    pub fn blockers(&self, job: u64, id: u32, mode: Use, blockers: &mut Vec<u64>) {
        let Some(resource) = self.resources.get(&id) else {
            return;
        };
        let readers = if mode == Use::Write {
            resource.readers
        } else {
            None
        };
        for list in [resource.writers, readers] {
            let mut link = list;
            while let Some(index) = link {
                let entry = &self.entries[index as usize];
                if entry.job != job
                    && let Err(at) = blockers.binary_search(&entry.job)
                {
                    blockers.insert(at, entry.job);
                }
                link = entry.next;
            }
        }
    }

    /// Removes every use of `job`. Returns false if it has none.
    pub fn leave(&mut self, job: u64) -> bool {
        let mut link = self.jobs.remove(&job);
        let known = link.is_some();
        while let Some(index) = link {
            link = self.entries[index as usize].older_of_job;
            self.unlink(index);
        }
        known
    }

    /// Number of jobs inside.
    pub fn num_jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Number of uses, each naming counted.
    pub fn num_uses(&self) -> usize {
        self.live
    }

    /// Whether no job is inside.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    fn unlink(&mut self, index: u32) {
        let Entry {
            id,
            mode,
            prev,
            next,
            ..
        } = self.entries[index as usize];
        if let Some(next) = next {
            self.entries[next as usize].prev = prev;
        }
        match prev {
            Some(prev) => self.entries[prev as usize].next = next,
            None => {
                // The head of its list. Without a next one the resource may have become unused.
                if let Some(resource) = self.resources.get_mut(&id) {
                    *resource.list(mode) = next;
                    if resource.readers.is_none() && resource.writers.is_none() {
                        self.resources.remove(&id);
                    }
                }
            }
        }
        self.entries[index as usize].next = self.unused;
        self.unused = Some(index);
        self.live -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blockers(fence: &mut Fence, job: u64, id: u32, mode: Use) -> Vec<u64> {
        let mut found = Vec::new();
        fence.enter(job, id, mode, &mut found);
        found
    }

    #[test]
    fn writers_conflict_with_everybody_and_readers_with_writers() {
        let mut fence = Fence::new();
        assert_eq!(blockers(&mut fence, 1, 7, Use::Read), []);
        assert_eq!(blockers(&mut fence, 2, 7, Use::Read), []);
        assert_eq!(blockers(&mut fence, 3, 7, Use::Write), [1, 2]);
        assert_eq!(blockers(&mut fence, 4, 7, Use::Write), [1, 2, 3]);
        assert_eq!(blockers(&mut fence, 5, 7, Use::Read), [3, 4]);
        assert_eq!(blockers(&mut fence, 6, 8, Use::Write), []);
    }

    /// A15: two groups share a block, so one job names it twice; leaving removes both at once.
    #[test]
    fn a_job_may_name_a_resource_twice_and_never_blocks_itself() {
        let mut fence = Fence::new();
        assert_eq!(blockers(&mut fence, 1, 7, Use::Read), []);
        assert_eq!(blockers(&mut fence, 1, 7, Use::Read), []);
        assert_eq!(blockers(&mut fence, 1, 7, Use::Write), []);
        assert_eq!(blockers(&mut fence, 2, 7, Use::Write), [1], "each job once");
        assert!(fence.leave(1));
        assert!(
            !fence.leave(1),
            "a second removal finds nothing and harms nobody"
        );
        assert_eq!(blockers(&mut fence, 3, 7, Use::Read), [2]);
        assert!(fence.leave(2) && fence.leave(3));
        assert!(fence.is_empty());
        assert_eq!(fence.num_uses(), 0);
        assert!(fence.resources.is_empty());
    }

    #[test]
    fn memory_is_used_again() {
        let mut fence = Fence::new();
        for job in 0..1000 {
            for id in 0..10 {
                assert_eq!(blockers(&mut fence, job, id, Use::Write), []);
            }
            fence.leave(job);
        }
        assert_eq!(fence.entries.len(), 10);
    }
}

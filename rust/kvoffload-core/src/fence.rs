//! Who has to wait for whom: which live jobs read or write which resource (a device block, or a slot).
//!
//! A new job gets a ticket, names its resources with [`Fence::enter`] and learns whom it has to wait
//! for. Jobs that conflict may be inside together: the fence reports, the caller orders. It reports no
//! more than is needed: of each resource the last writer, and to a writer those who read since. They
//! in turn wait for whoever was there before, so **a job must not leave before those it waits for**. One
//! that gives up nevertheless hides them no longer: whoever lets it out names them again with
//! [`Fence::restore`].

/// What a job does with a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Reads it: conflicts with writers.
    Read,
    /// Writes it: conflicts with everybody else.
    Write,
}

/// A job's place in a [`Fence`], from [`Fence::join`] to [`Fence::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u32);

/// 0, so that all of an unused resource is zeroes.
const NOBODY: u32 = 0;

/// No entry.
const NONE: u32 = u32::MAX;

/// The uses of all live jobs.
///
/// A resource has room for its last writer and one reader. Further readers have entries in two lists,
/// that of the resource and that of the job; they are rare, so their memory grows as needed.
#[derive(Debug)]
pub struct Fence {
    resources: Box<[Resource]>,
    /// By ticket; that of number 0 belongs to nobody.
    jobs: Vec<Job>,
    unused_tickets: Vec<u32>,
    entries: Vec<Entry>,
    unused_entries: Vec<u32>,
}

/// Tickets of those who use a resource.
#[derive(Clone, Copy, Debug, Default)]
struct Resource {
    writer: u32,
    /// Somebody who has read since the last writer came.
    reader: u32,
    /// The newest entry of the others who did, plus 1.
    others: u32,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    id: u64,
    /// Its newest entry.
    entries: u32,
}

/// One reader more of a resource.
#[derive(Clone, Copy, Debug)]
struct Entry {
    ticket: u32,
    /// The resource; `None` when a writer has come.
    resource: Option<usize>,
    /// Newer and older entry of the same resource.
    newer: u32,
    older: u32,
    /// Older entry of the same job.
    older_of_job: u32,
}

impl Fence {
    /// A fence for resources `0..resources`.
    pub fn new(resources: usize) -> Self {
        let nobody = Job {
            id: 0,
            entries: NONE,
        };
        Self {
            resources: vec![Resource::default(); resources].into(),
            jobs: vec![nobody],
            unused_tickets: Vec::new(),
            entries: Vec::new(),
            unused_entries: Vec::new(),
        }
    }

    /// Lets a job in.
    pub fn join(&mut self, id: u64) -> Ticket {
        let entries = NONE;
        let ticket = self.unused_tickets.pop().unwrap_or_else(|| {
            self.jobs.push(Job { id, entries });
            self.jobs.len() as u32 - 1
        });
        self.jobs[ticket as usize] = Job { id, entries };
        Ticket(ticket)
    }

    /// Notes that a job uses these resources until it leaves, and adds to `blockers` the live jobs it
    /// has to wait for.
    ///
    /// A job may name a resource many times, but for one use only. `blockers` is sorted and holds each
    /// job once: pass the same vector for all uses of a job, empty at first.
    pub fn enter(
        &mut self,
        ticket: Ticket,
        mode: Use,
        ids: impl IntoIterator<Item = usize>,
        blockers: &mut Vec<u64>,
    ) {
        let me = ticket.0;
        let mut last = NOBODY;
        let mut note = |jobs: &[Job], other: u32| {
            // Neighbours were often used by the same job.
            if other != NOBODY && other != me && other != last {
                last = other;
                let job = jobs[other as usize].id;
                if let Err(at) = blockers.binary_search(&job) {
                    blockers.insert(at, job);
                }
            }
        };
        for id in ids {
            let resource = self.resources[id];
            note(&self.jobs, resource.writer);
            match mode {
                Use::Write => {
                    note(&self.jobs, resource.reader);
                    let mut link = resource.others.wrapping_sub(1);
                    while link != NONE {
                        let entry = &mut self.entries[link as usize];
                        entry.resource = None;
                        note(&self.jobs, entry.ticket);
                        link = entry.older;
                    }
                    self.resources[id] = Resource {
                        writer: me,
                        ..Resource::default()
                    };
                }
                Use::Read => self.enter_reader(me, id),
            }
        }
    }

    /// Notes a reader of a resource.
    fn enter_reader(&mut self, me: u32, id: usize) {
        let resource = &mut self.resources[id];
        if resource.reader == NOBODY {
            resource.reader = me;
        } else if resource.reader != me {
            self.enter_other(me, id);
        }
    }

    /// Notes a reader for which the resource has no room.
    fn enter_other(&mut self, me: u32, id: usize) {
        let older = self.resources[id].others.wrapping_sub(1);
        if older != NONE && self.entries[older as usize].ticket == me {
            return; // Nobody has come in since, so its entry is the newest.
        }
        let job = &mut self.jobs[me as usize];
        let entry = Entry {
            ticket: me,
            resource: Some(id),
            newer: NONE,
            older,
            older_of_job: job.entries,
        };
        let index = match self.unused_entries.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        job.entries = index;
        if older != NONE {
            self.entries[older as usize].newer = index;
        }
        self.resources[id].others = index + 1;
    }

    /// Lets a job out. `ids` are all resources that it named.
    pub fn leave(&mut self, ticket: Ticket, ids: impl IntoIterator<Item = usize>) {
        let me = ticket.0;
        for id in ids {
            let resource = &mut self.resources[id];
            if resource.writer == me {
                resource.writer = NOBODY;
            }
            if resource.reader == me {
                resource.reader = NOBODY;
            }
        }
        let mut link = std::mem::replace(&mut self.jobs[me as usize].entries, NONE);
        while link != NONE {
            let entry = self.entries[link as usize];
            if let Some(id) = entry.resource {
                match entry.newer {
                    NONE => self.resources[id].others = entry.older.wrapping_add(1),
                    newer => self.entries[newer as usize].older = entry.older,
                }
                if entry.older != NONE {
                    self.entries[entry.older as usize].newer = entry.newer;
                }
            }
            self.unused_entries.push(link);
            link = entry.older_of_job;
        }
        self.unused_tickets.push(me);
    }

    /// Whether a job is the last that writes a resource.
    pub fn is_last_writer(&self, ticket: Ticket, id: usize) -> bool {
        self.resources[id].writer == ticket.0
    }

    /// Notes again that a job uses a resource: the last writer, whose coming hid this job, has left
    /// before it. Those who read the resource since stay noted. If several jobs are to be noted, they come
    /// in the order in which they entered, so that the last writer of them is the last one.
    pub fn restore(&mut self, ticket: Ticket, mode: Use, id: usize) {
        match mode {
            Use::Write => self.resources[id].writer = ticket.0,
            Use::Read => self.enter_reader(ticket.0, id),
        }
    }

    /// Number of jobs inside.
    pub fn num_jobs(&self) -> usize {
        self.jobs.len() - 1 - self.unused_tickets.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a job in that uses one resource.
    fn join(fence: &mut Fence, job: u64, id: usize, mode: Use) -> (Ticket, Vec<u64>) {
        let (ticket, mut found) = (fence.join(job), Vec::new());
        fence.enter(ticket, mode, [id], &mut found);
        (ticket, found)
    }

    fn unused(fence: &Fence) -> bool {
        let used = |r: &Resource| (r.writer, r.reader, r.others) != (0, 0, 0);
        fence.num_jobs() == 0
            && !fence.resources.iter().any(used)
            && fence.unused_entries.len() == fence.entries.len()
    }

    #[test]
    fn writers_wait_for_all_since_the_last_one_and_readers_for_that_one() {
        let mut fence = Fence::new(9);
        let mut tickets = Vec::new();
        for (job, id, mode, expected) in [
            (1, 7, Use::Read, &[][..]),
            (2, 7, Use::Read, &[]),
            (3, 7, Use::Read, &[]),
            (4, 7, Use::Write, &[1, 2, 3]),
            (5, 7, Use::Write, &[4]),
            (6, 7, Use::Read, &[5]),
            (7, 7, Use::Read, &[5]),
            (8, 8, Use::Write, &[]),
            (9, 7, Use::Write, &[5, 6, 7]),
        ] {
            let (ticket, found) = join(&mut fence, job, id, mode);
            assert_eq!(found, expected, "job {job}");
            tickets.push((ticket, id));
        }
        for (ticket, id) in tickets {
            fence.leave(ticket, [id]);
        }
        assert!(unused(&fence));
    }

    #[test]
    fn those_who_have_left_are_not_waited_for() {
        let mut fence = Fence::new(1);
        let readers = [1, 2, 3, 4].map(|job| join(&mut fence, job, 0, Use::Read).0);
        for at in [2, 0] {
            fence.leave(readers[at], [0]);
        }
        let (fifth, found) = join(&mut fence, 5, 0, Use::Read);
        assert_eq!(found, []);
        let (writer, found) = join(&mut fence, 6, 0, Use::Write);
        assert_eq!(found, [2, 4, 5]);
        for ticket in [readers[1], readers[3], fifth, writer] {
            fence.leave(ticket, [0]);
        }
        assert!(unused(&fence));
    }

    /// A15: two groups share a block, so one job names it twice; leaving removes both at once.
    #[test]
    fn a_job_may_name_a_resource_twice_and_never_blocks_itself() {
        for mode in [Use::Read, Use::Write] {
            let mut fence = Fence::new(8);
            let (first, mut found) = (fence.join(1), Vec::new());
            fence.enter(first, mode, [7, 7, 6, 7], &mut found);
            let second = fence.join(2);
            fence.enter(second, Use::Read, [5, 5], &mut found);
            assert_eq!(found, []);
            fence.enter(second, mode, [7, 6, 7], &mut found);
            let waits = if mode == Use::Write { &[1][..] } else { &[] };
            assert_eq!(found, waits, "each job once");
            fence.leave(first, [7, 7, 6, 7]);
            fence.leave(second, [5, 5, 7, 6, 7]);
            assert!(unused(&fence));
        }
    }

    #[test]
    fn whom_a_writer_has_hidden_is_found_again_when_it_gives_up() {
        let mut fence = Fence::new(1);
        let (first, _) = join(&mut fence, 1, 0, Use::Write);
        let (second, found) = join(&mut fence, 2, 0, Use::Read);
        assert_eq!(found, [1]);
        let (third, found) = join(&mut fence, 3, 0, Use::Write);
        assert_eq!(found, [1, 2]);
        let (fourth, found) = join(&mut fence, 4, 0, Use::Read);
        assert_eq!(found, [3]);
        assert!(fence.is_last_writer(third, 0) && !fence.is_last_writer(first, 0));
        fence.leave(third, [0]);
        fence.restore(first, Use::Write, 0);
        fence.restore(second, Use::Read, 0);
        let (fifth, found) = join(&mut fence, 5, 0, Use::Read);
        assert_eq!(found, [1]);
        let (sixth, found) = join(&mut fence, 6, 0, Use::Write);
        assert_eq!(found, [1, 2, 4, 5]);
        for ticket in [first, second, fourth, fifth, sixth] {
            fence.leave(ticket, [0]);
        }
        assert!(unused(&fence));
    }

    #[test]
    fn memory_is_used_again() {
        let mut fence = Fence::new(10);
        for round in 0..1000 {
            let jobs = [0, 1, 2].map(|job| {
                let (ticket, mut found) = (fence.join(round * 3 + job), Vec::new());
                fence.enter(ticket, Use::Read, 0..10, &mut found);
                assert_eq!(found, []);
                ticket
            });
            for ticket in jobs {
                fence.leave(ticket, 0..10);
            }
        }
        assert_eq!((fence.entries.len(), fence.jobs.len()), (20, 4));
    }
}

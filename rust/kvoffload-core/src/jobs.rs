//! Transfers under way: what each is about, and which ranks have not yet reported it.
//!
//! A job carries what its completion needs (its body), so that nothing has to be looked up again.
//! It is over when every rank has reported exactly once, in whatever order, and it has failed if one
//! rank failed. A reset voids the jobs begun before it: they stay until every rank has reported them,
//! because until then somebody copies.
//!
//! This is for a connector of our own. With `KvOffloadSpec`, vLLM's connector counts the ranks.

use std::collections::HashMap;
use std::fmt;

use foldhash::fast::FixedState;
use thiserror::Error;

/// A job's name: unique for the life of its table, counting from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Direction of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum JobKind {
    /// Device to host: the slots are written.
    Store,
    /// Host to device: the slots are read.
    Load,
}

/// A transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job<B> {
    /// Its name.
    pub id: JobId,
    /// Its direction.
    pub kind: JobKind,
    /// A reset has voided it: its end changes nothing but that it is over.
    pub void: bool,
    /// What it is about.
    pub body: B,
}

/// One rank's report that its part of a job went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank.
    pub rank: u32,
    /// Its reason, for people.
    pub reason: String,
}

/// A job that every rank has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished<B> {
    /// The job.
    pub job: Job<B>,
    /// The ranks that failed, in the order of their reports. Empty: every byte is there.
    pub failures: Vec<Failure>,
}

/// What a report led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report<B> {
    /// Other ranks have still to report.
    Pending {
        /// How many.
        ranks_left: u32,
    },
    /// This was the last one; the job has left the table.
    Finished(Finished<B>),
}

/// Why a call was refused. The table is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum JobError {
    /// A table for nobody.
    #[error("num_ranks is 0, a job needs at least one rank to report it")]
    NoRanks,
    /// Every place for a job is taken.
    #[error("{limit} jobs are under way, the most there may be; begin it after one has finished")]
    Full {
        /// The table's limit.
        limit: usize,
    },
    /// Never begun, or finished already.
    #[error("job {job} is not under way: it was never begun, or every rank has reported it")]
    UnknownJob {
        /// The job.
        job: JobId,
    },
    /// A rank that does not exist.
    #[error("job {job}: rank {rank} is unknown, ranks are 0..{num_ranks}")]
    UnknownRank {
        /// The job.
        job: JobId,
        /// The rank.
        rank: u32,
        /// Number of ranks.
        num_ranks: u32,
    },
    /// A second report by the same rank.
    #[error("job {job}: rank {rank} has reported already; a rank reports each job once")]
    AlreadyReported {
        /// The job.
        job: JobId,
        /// The rank.
        rank: u32,
    },
}

/// The jobs under way, at most a fixed number.
#[derive(Debug)]
pub struct JobTable<B> {
    live: HashMap<JobId, Live<B>, FixedState>,
    limit: usize,
    num_ranks: u32,
    /// The name of the next job.
    next: u64,
}

#[derive(Debug)]
struct Live<B> {
    job: Job<B>,
    waiting: RankSet,
    failures: Vec<Failure>,
}

impl<B> JobTable<B> {
    /// A table for at most `limit` jobs at a time, each to be reported by the ranks `0..num_ranks`.
    pub fn new(num_ranks: u32, limit: usize) -> Result<Self, JobError> {
        if num_ranks == 0 {
            return Err(JobError::NoRanks);
        }
        Ok(Self {
            live: HashMap::with_hasher(FixedState::default()),
            limit,
            num_ranks,
            next: 0,
        })
    }

    /// Adds a job, and names it.
    pub fn begin(&mut self, kind: JobKind, body: B) -> Result<JobId, JobError> {
        if self.is_full() {
            return Err(JobError::Full { limit: self.limit });
        }
        let id = JobId(self.next);
        self.next += 1;
        let job = Job {
            id,
            kind,
            void: false,
            body,
        };
        let waiting = RankSet::all(self.num_ranks);
        let failures = Vec::new();
        self.live.insert(
            id,
            Live {
                job,
                waiting,
                failures,
            },
        );
        Ok(id)
    }

    /// Notes that `rank` is done with its part of job `id`, with this outcome.
    pub fn report(
        &mut self,
        id: JobId,
        rank: u32,
        outcome: Result<(), String>,
    ) -> Result<Report<B>, JobError> {
        if rank >= self.num_ranks {
            return Err(JobError::UnknownRank {
                job: id,
                rank,
                num_ranks: self.num_ranks,
            });
        }
        let live = self
            .live
            .get_mut(&id)
            .ok_or(JobError::UnknownJob { job: id })?;
        if !live.waiting.remove(rank) {
            return Err(JobError::AlreadyReported { job: id, rank });
        }
        if let Err(reason) = outcome {
            live.failures.push(Failure { rank, reason });
        }
        if live.waiting.len > 0 {
            return Ok(Report::Pending {
                ranks_left: live.waiting.len,
            });
        }
        match self.live.remove(&id) {
            Some(Live { job, failures, .. }) => Ok(Report::Finished(Finished { job, failures })),
            None => Err(JobError::UnknownJob { job: id }),
        }
    }

    /// Voids every job under way.
    pub fn void_all(&mut self) {
        for live in self.live.values_mut() {
            live.job.void = true;
        }
    }

    /// A job under way.
    pub fn get(&self, id: JobId) -> Option<&Job<B>> {
        self.live.get(&id).map(|live| &live.job)
    }

    /// The jobs under way, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Job<B>> {
        self.live.values().map(|live| &live.job)
    }

    /// Whether no other job can begin now.
    pub fn is_full(&self) -> bool {
        self.live.len() >= self.limit
    }

    /// Number of jobs under way.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Whether no job is under way.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// The most jobs that may be under way.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Number of ranks that report each job.
    pub fn num_ranks(&self) -> u32 {
        self.num_ranks
    }
}

/// Ranks that have still to report.
#[derive(Debug)]
struct RankSet {
    words: Box<[u64]>,
    len: u32,
}

impl RankSet {
    /// The ranks `0..len`.
    fn all(len: u32) -> Self {
        let mut words = vec![u64::MAX; len.div_ceil(64) as usize];
        if let (Some(last), rest @ 1..) = (words.last_mut(), len % 64) {
            *last = (1 << rest) - 1;
        }
        Self {
            words: words.into(),
            len,
        }
    }

    /// Removes `rank`; false if it is not in the set.
    fn remove(&mut self, rank: u32) -> bool {
        let bit = 1 << (rank % 64);
        match self.words.get_mut((rank / 64) as usize) {
            Some(word) if *word & bit != 0 => {
                *word &= !bit;
                self.len -= 1;
                true
            }
            _ => false,
        }
    }
}

//! What the workers say became of jobs.

use crate::jobs::{Finished, JobId, JobKind, Report};

use super::config::RequestError;
use super::{JobOrder, Requests};

/// A job that every rank has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its name.
    pub id: JobId,
    /// Its direction.
    pub kind: JobKind,
    /// The request it was for; `None`: that is over.
    pub request: Option<Box<str>>,
    /// Its chunks.
    pub chunks: usize,
    /// Why it failed, by rank, if it did.
    pub failures: Vec<(u32, String)>,
    /// A reset voided it. What a void load has brought is not to be used, even if no rank failed.
    pub void: bool,
}

impl Requests {
    /// A rank has done its part of a job. Answers the job if it was the last rank.
    ///
    /// A store that failed on any rank leaves nothing behind: its keys miss. A load that failed takes
    /// its chunks out of the pool, so that its request, which asks again, does not run into the same
    /// failure for ever; the blocks are named by the worker, and the engine recomputes.
    ///
    /// # Errors
    /// A job that is over, or a rank that does not exist or has reported this job: counted, and
    /// nothing has changed.
    pub fn report(
        &mut self,
        job: JobId,
        rank: u32,
        outcome: Result<(), String>,
    ) -> Result<Option<Ended>, RequestError> {
        let finished = match self.jobs.report(job, rank, outcome) {
            Ok(Report::Finished(finished)) => finished,
            Ok(Report::Pending { .. }) => return Ok(None),
            Err(error) => {
                self.stats.stray_reports += 1;
                return Err(error.into());
            }
        };
        self.end(finished).map(Some)
    }

    fn end(
        &mut self,
        Finished { job, failures }: Finished<super::orders::JobBody>,
    ) -> Result<Ended, RequestError> {
        let body = &job.body;
        let failed = !failures.is_empty();
        let counts = match job.kind {
            JobKind::Store => &mut self.stats.stores,
            JobKind::Load => &mut self.stats.loads,
        };
        if job.void && job.kind == JobKind::Load {
            self.void_loads -= 1;
        }
        let chunks = body.keys().count();
        match (job.void, failed) {
            (true, _) => counts.voided += 1,
            (false, true) => counts.failed += 1,
            (false, false) => {
                counts.done += 1;
                counts.chunks += chunks as u64;
            }
        }
        if job.kind == JobKind::Store {
            self.blocks.end_store(&body.blocks);
            if !job.void && !failed {
                let took = self.config.clock.elapsed().saturating_sub(body.began);
                self.pace.store_took(took.as_secs_f64());
            }
        }
        let mut request = None;
        if let Some(state) = self.table.get_mut(body.request) {
            state.jobs -= 1;
            request = (!state.finished).then(|| state.name.clone());
            state.hollow |= body.hollow;
            // A reset has taken back what a void job held.
            if !job.void && !body.hollow {
                match job.kind {
                    JobKind::Store => {
                        self.manager
                            .complete_store(body.keys(), &mut state.record, !failed)?;
                    }
                    JobKind::Load if failed => {
                        self.manager.discard_load(body.keys(), &mut state.record)?;
                    }
                    JobKind::Load => self.manager.complete_load(body.keys(), &mut state.record)?,
                }
            }
            if job.kind == JobKind::Load && (failed || job.void) {
                // What was to be loaded is computed, and stored then.
                for (known, group) in state.groups.iter_mut().zip(&self.groups) {
                    let local = (state.computed / group.tokens_per_chunk) as usize;
                    known.stored = known.stored.min(local);
                }
            }
        }
        self.table.bury(body.request);
        Ok(Ended {
            id: job.id,
            kind: job.kind,
            request,
            chunks,
            failures: failures
                .into_iter()
                .map(|failure| (failure.rank, failure.reason))
                .collect(),
            void: job.void,
        })
    }
}

impl JobOrder {
    /// Whether the job cannot be made and only its failure is to be reported.
    pub fn is_hollow(&self) -> bool {
        self.slots.is_empty() && !self.blocks.is_empty()
    }
}

//! Jobs that nobody wants any more.
//!
//! The caller only notes that. A job that has started is its backend's business. One that has not ends
//! at once, on whichever thread is free first, even if it waits for a job that never ends: it gives up its
//! place, and those who waited for it wait for those it was in front of, as far as they conflict with them
//! (see [`Order::withdraw`](super::order::Order::withdraw)).

use std::sync::Arc;

use kvoffload_core::fence::Ticket;
use kvoffload_core::jobs::JobKind;

use super::job::{JobIds, Live, Phase};
use super::state::{State, lane};
use super::{Engine, Shared};
use crate::backend::Mark;
use crate::error::CopyError;

/// A live job, and its place among those who use slots and blocks.
pub(super) struct Party {
    pub(super) job: u64,
    pub(super) kind: JobKind,
    pub(super) ids: Arc<JobIds>,
    /// `None` as long as it is in the inbox.
    pub(super) ticket: Option<Ticket>,
}

impl Party {
    fn new(job: u64, live: &Live) -> Self {
        Self {
            job,
            kind: live.kind,
            ids: Arc::clone(&live.ids),
            ticket: live.ticket,
        }
    }
}

/// A job that is given up before it has started.
pub(super) struct Withdrawal {
    party: Party,
    /// Position in the order of submits.
    order: u64,
    /// The live jobs it waits for, in the order of their submits.
    before: Vec<Party>,
    /// Those that wait for it.
    after: Vec<Party>,
    /// Kept until no lock is held: it is the caller's.
    _mark: Option<Mark>,
}

impl Engine {
    /// Asks that these jobs be given up. Each still ends once: with [`CopyError::Cancelled`], or well if
    /// all its copies were made already. One that has not started ends soon, without a copy,
    /// whatever it waits for; of one that has, no further copy is begun, and it ends once none touches
    /// memory any more. What a cancelled store was to write counts as not stored, for all loads that are
    /// submitted after it. Unknown ids are ignored.
    ///
    /// Never waits for a copy, nor for the jobs to end: [`Engine::wait`] does.
    pub fn cancel(&self, jobs: &[u64]) {
        let mut state = self.shared.state.lock();
        state.cancel(jobs);
        self.shared.unlock_and_wake(state);
    }
}

impl Shared {
    /// Ends the next job that was cancelled before it had started.
    pub(super) fn withdraw_next(&self) {
        // Until it is free nobody gets a place or ends, so that all of these jobs stay as they are, save
        // that those before may start.
        let mut order = self.order.lock();
        let Some(withdrawal) = self.state.lock().next_withdrawal() else {
            return;
        };
        let Withdrawal {
            party,
            before,
            after,
            ..
        } = &withdrawal;
        let (job, layout) = (party.job, &*self.layout);
        if party.kind == JobKind::Store {
            let geometry = party.ids.geometry();
            let chunks = geometry.chunks(layout);
            self.verifier.cancelled(withdrawal.order, chunks);
        }
        let waits = order.withdraw(party, before, after, layout);
        let mut state = self.state.lock();
        state.withdrawn(&withdrawal, &waits);
        state.finish(job, 0, 0.0, Err(CopyError::Cancelled { job }));
        self.unlock_and_wake(state);
        drop(order);
        self.ended.notify_all();
        self.recycle(withdrawal.party.ids);
    }
}

impl State {
    /// Notes that nobody wants these jobs any more; those that are not live are ignored.
    pub(super) fn cancel(&mut self, jobs: &[u64]) {
        for &job in jobs {
            let Some(live) = self.live.get_mut(&job) else {
                continue;
            };
            if std::mem::replace(&mut live.cancelled, true) {
                continue;
            }
            match live.phase {
                Phase::Submitted | Phase::Held | Phase::Ready => {
                    self.to_withdraw.push_back((live.order, job));
                }
                Phase::Started => {
                    let queue = &mut self.queues[lane(live.kind)];
                    queue.to_cancel.push((live.order, job));
                }
                // No copy is left to be made.
                Phase::Enqueued => {}
            }
        }
    }

    /// The next started job of a direction that its backend is to give up.
    pub(super) fn next_cancel(&mut self, kind: JobKind) -> Option<u64> {
        while let Some((order, job)) = self.queues[lane(kind)].to_cancel.pop() {
            if self.live.get(&job).is_some_and(|live| live.order == order) {
                return Some(job);
            }
        }
        None
    }

    /// The next job to give up that has not started: it will not.
    fn next_withdrawal(&mut self) -> Option<Withdrawal> {
        loop {
            let (order, job) = self.to_withdraw.pop_front()?;
            let Some(live) = self.live.get_mut(&job).filter(|live| live.order == order) else {
                continue;
            };
            if live.phase == Phase::Ready {
                self.queues[lane(live.kind)].jobs -= 1;
            }
            let mark = live.mark.take();
            let live = &self.live[&job];
            // The id of one that is over may be that of a later job now.
            let mut before: Vec<_> = of(&live.blockers, self)
                .filter(|(_, blocker)| blocker.order < order)
                .collect();
            before.sort_unstable_by_key(|(_, blocker)| blocker.order);
            return Some(Withdrawal {
                party: Party::new(job, live),
                order,
                before: before
                    .into_iter()
                    .map(|(b, live)| Party::new(b, live))
                    .collect(),
                after: of(&live.dependents, self)
                    .map(|(d, live)| Party::new(d, live))
                    .collect(),
                _mark: mark,
            });
        }
    }

    /// A job has given its place up before those it waited for: `waits` names, of those that waited for
    /// it, who has to wait for whom instead.
    fn withdrawn(&mut self, withdrawal: &Withdrawal, waits: &[(u64, u64)]) {
        let Withdrawal {
            party,
            before,
            after,
            ..
        } = withdrawal;
        // Nobody may take a later job of its id for it.
        for Party { job, .. } in before {
            if let Some(live) = self.live.get_mut(job) {
                live.dependents.retain(|&dependent| dependent != party.job);
            }
        }
        for Party { job, .. } in after {
            if let Some(live) = self.live.get_mut(job) {
                live.blockers.retain(|&blocker| blocker != party.job);
            }
        }
        for &(later, earlier) in waits {
            let Some(live) = self.live.get_mut(&later) else {
                continue;
            };
            if live.blockers.contains(&earlier) {
                continue;
            }
            live.blockers.push(earlier);
            live.blocked_by += 1;
            let rushed = live.rushed;
            if let Some(live) = self.live.get_mut(&earlier) {
                live.dependents.push(later);
            }
            if rushed {
                self.rush(&[earlier]);
            }
        }
    }
}

/// Those of these jobs that are live.
fn of<'a>(jobs: &'a [u64], state: &'a State) -> impl Iterator<Item = (u64, &'a Live)> {
    jobs.iter()
        .filter_map(|&job| state.live.get(&job).map(|live| (job, live)))
}

//! How much of a request is in the pool, and whether it is worth waiting for more.

use crate::manager::{Found, Manager};

use super::config::Span;
use super::group::Group;
use super::hit::{Lengths, longest};
use super::stats::{Deferral, MissReason};
use super::table::{RequestId, State};
use super::{RequestStats, Requests};

/// The answer to a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// So many tokens beyond the computed ones can be loaded, possibly none; and why not more.
    Tokens(u64, Option<MissReason>),
    /// Ask again with the next step.
    Later(Deferral),
}

impl Requests {
    /// How many tokens of a request with `total` tokens, of which the GPU has the first `computed`,
    /// can be loaded. The request starts again: what it had of blocks is forgotten, and all its chunks
    /// will be offered for stores again.
    ///
    /// Putting off has an end: the deadline counts from the first time and is not set back before the
    /// request gets blocks, not even by an answer of which the engine made nothing.
    pub fn lookup(&mut self, id: RequestId, computed: u64, total: u64) -> Lookup {
        let now = self.config.clock.elapsed();
        let Some(state) = self.table.get_mut(id) else {
            return Lookup::Tokens(0, None);
        };
        state.forget_blocks();
        for group in &mut state.groups {
            group.stored = 0;
        }
        let same = std::mem::replace(&mut state.computed, computed) == computed;
        state.tainted = false;
        state.answer = None;
        if state.about.skip_load {
            return decided(state, computed, total, Some(MissReason::Policy));
        }
        let changes = self.manager.changes();
        let overdue = state
            .deferred_since
            .is_some_and(|since| now.saturating_sub(since) >= self.config.defer_deadline);
        // Nothing has changed since: no need to look again.
        if let Some(why) = state.deferred
            && !overdue
            && same
            && state.seen_changes == changes
        {
            self.stats.defer(why);
            return Lookup::Later(why);
        }
        let state = &*state;
        let lengths = Lengths::new(&self.groups, computed, total, state.about.max_load_tokens);
        let mut view = View::new(&self.manager, &self.groups, state, computed);
        let (ready, blame) = longest(&self.groups, &lengths, |group, chunk| {
            view.found(group, chunk) >= Seen::Loading
        });
        let mut put_off = None;
        let mut slow = false;
        if view.any_writing && !overdue {
            // Once more, as if all that is being written were there.
            let (soon, _) = longest(&self.groups, &lengths, |group, chunk| {
                view.found(group, chunk) >= Seen::Writing
            });
            if soon > ready {
                if self.pace.worth_waiting(soon - ready) {
                    put_off = Some(Deferral::Writing);
                } else {
                    slow = true;
                }
            }
        }
        let shares = self.config.share_loads && !overdue && put_off.is_none();
        if shares && ready > computed && view.any_loading(&self.groups, computed, ready) {
            put_off = Some(Deferral::Loading);
        }
        let reason = blame.map(|(group, chunk)| {
            if view.found(group, chunk) == Seen::Writing {
                return MissReason::TooSlow;
            }
            match state.key(group, chunk) {
                Some(key) => MissReason::Missed(self.manager.why_missed(key)),
                None => MissReason::Policy,
            }
        });
        let any_writing = view.any_writing;
        let Some(state) = self.table.get_mut(id) else {
            return Lookup::Tokens(0, None);
        };
        if let Some(why) = put_off {
            state.deferred_since.get_or_insert(now);
            state.deferred = Some(why);
            state.seen_changes = changes;
            self.stats.defer(why);
            return Lookup::Later(why);
        }
        // Once for a request, however often the answer is asked for again.
        self.stats.deadlines += u64::from(overdue && state.deferred.is_some());
        // The last chunk of a request has no key; that is no reason worth telling.
        let whole = lengths_covered(&self.groups, ready, total);
        let reason = match reason {
            _ if whole => None,
            Some(MissReason::Policy) => None,
            reason if slow || (overdue && any_writing) => reason.or(Some(MissReason::TooSlow)),
            None if lengths.most < total.saturating_sub(1) => Some(MissReason::Policy),
            reason => reason,
        };
        decided(state, ready, total, reason)
    }
}

/// Whether nothing but the rest of a chunk, or the last token, is left over.
fn lengths_covered(groups: &[Group], ready: u64, total: u64) -> bool {
    let chunk = groups.iter().map(|group| group.tokens_per_chunk).max();
    total.saturating_sub(ready) < chunk.unwrap_or(1)
}

fn decided(state: &mut State, ready: u64, total: u64, reason: Option<MissReason>) -> Lookup {
    state.deferred = None;
    let tokens = ready - state.computed;
    state.answer = Some(Answered {
        asked: total.saturating_sub(state.computed),
        found: tokens,
        reason,
    });
    Lookup::Tokens(tokens, reason)
}

/// An answer that counts once the engine makes something of it: it asks with every step until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    asked: u64,
    found: u64,
    reason: Option<MissReason>,
}

impl State {
    /// The engine gave it blocks: what the last lookup answered counts, and putting off begins anew.
    pub(super) fn admitted(&mut self, stats: &mut RequestStats) {
        self.deferred_since = None;
        let Some(answer) = self.answer.take() else {
            return;
        };
        stats.lookups += 1;
        stats.hits += u64::from(answer.found > 0);
        stats.tokens_asked += answer.asked;
        stats.tokens_hit += answer.found;
        if let Some(reason) = answer.reason {
            stats.miss_reasons[reason.number()] += 1;
        }
    }
}

/// What a chunk is, from bad to good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Seen {
    Unasked,
    Missing,
    Writing,
    Loading,
    Ready,
}

impl From<Found> for Seen {
    fn from(found: Found) -> Self {
        match found {
            Found::Nothing => Self::Missing,
            Found::Writing => Self::Writing,
            Found::Loading => Self::Loading,
            Found::Ready => Self::Ready,
        }
    }
}

/// A request's chunks as the manager has them, each asked for once.
struct View<'a> {
    manager: &'a Manager,
    state: &'a State,
    groups: Vec<Known>,
    any_writing: bool,
    any_loading: bool,
    scratch: Vec<Found>,
}

struct Known {
    full: bool,
    /// Chunks before this one are on the GPU.
    first: usize,
    seen: Vec<Seen>,
}

impl<'a> View<'a> {
    fn new(manager: &'a Manager, groups: &[Group], state: &'a State, computed: u64) -> Self {
        let known = |group: &Group| Known {
            full: group.span == Span::Full,
            first: (computed / group.tokens_per_chunk) as usize,
            seen: Vec::new(),
        };
        Self {
            manager,
            state,
            groups: groups.iter().map(known).collect(),
            any_writing: false,
            any_loading: false,
            scratch: Vec::new(),
        }
    }

    fn found(&mut self, group: usize, chunk: usize) -> Seen {
        let known = &mut self.groups[group];
        let at = chunk - known.first;
        if let Some(seen) = known.seen.get(at).filter(|seen| **seen != Seen::Unasked) {
            return *seen;
        }
        self.scratch.clear();
        if known.full {
            // One pass over all keys: a prefix is needed from its start.
            if known.seen.is_empty() {
                let keys = self.state.keys(group, known.first);
                self.manager.probe(keys, &mut self.scratch);
                known
                    .seen
                    .extend(self.scratch.iter().map(|&found| Seen::from(found)));
            }
        } else if let Some(key) = self.state.key(group, chunk) {
            self.manager.probe([key], &mut self.scratch);
            if known.seen.len() <= at {
                known.seen.resize(at + 1, Seen::Unasked);
            }
            known.seen[at] = self
                .scratch
                .first()
                .map_or(Seen::Missing, |&found| found.into());
        }
        self.any_writing |= self.scratch.contains(&Found::Writing);
        self.any_loading |= self.scratch.contains(&Found::Loading);
        known.seen.get(at).copied().unwrap_or(Seen::Missing)
    }

    /// Whether somebody is loading a chunk that a prefix of `tokens` tokens needs.
    fn any_loading(&mut self, groups: &[Group], computed: u64, tokens: u64) -> bool {
        self.any_loading
            && groups.iter().enumerate().any(|(at, group)| {
                let needed = group.needed(tokens);
                let first = (computed / group.tokens_per_chunk) as usize;
                (needed.start.max(first)..needed.end)
                    .any(|chunk| self.found(at, chunk) == Seen::Loading)
            })
    }
}

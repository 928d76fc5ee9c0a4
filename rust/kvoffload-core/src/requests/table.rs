//! The requests themselves.

use std::collections::HashMap;
use std::time::Duration;

use foldhash::fast::FixedState;

use crate::jobs::JobTable;
use crate::manager::{Request as Record, Room};

use super::blocks::Stamp;
use super::lookup::Answered;
use super::orders::JobBody;
use super::stats::Deferral;
use super::{RequestError, Requests};

/// A request's place in the table. Void once the request and its jobs are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(u32);

/// What is known of a request when it arrives.
#[derive(Clone, Copy, Debug, Default)]
pub struct NewRequest {
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// The most tokens to load for it.
    pub max_load_tokens: Option<u64>,
    /// The most tokens to store of it.
    pub max_store_tokens: Option<u64>,
    /// Never load for it.
    pub skip_load: bool,
    /// Never store for it.
    pub skip_store: bool,
    /// Its chunks take free slots only, and make no others go.
    pub low_priority: bool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) name: Box<str>,
    pub(super) about: NewRequest,
    /// Accesses and pins.
    pub(super) record: Record,
    pub(super) groups: Box<[GroupState]>,
    /// Hashes taken over from the engine.
    pub(super) hashes: usize,
    pub(super) key_bytes: usize,
    /// Tokens that were on the GPU at the last lookup.
    pub(super) computed: u64,
    /// When it was put off first since it last had blocks.
    pub(super) deferred_since: Option<Duration>,
    /// Why, if the last lookup put it off.
    pub(super) deferred: Option<Deferral>,
    /// What the last lookup answered, until it is counted.
    pub(super) answer: Option<Answered>,
    /// The manager's changes at the last lookup that put it off.
    pub(super) seen_changes: u64,
    /// A load for it could not be made from what the engine gave it, and would not another time.
    pub(super) hollow: bool,
    /// Its KV was computed before a reset.
    pub(super) tainted: bool,
    /// Some of what was offered last found no room.
    pub(super) refused: bool,
    pub(super) jobs: u32,
    pub(super) finished: bool,
}

/// What a request has in one KV group.
#[derive(Debug, Default)]
pub(super) struct GroupState {
    /// The keys of its chunks, back to back.
    pub(super) keys: Vec<u8>,
    /// Its GPU blocks; 0: none, or none any more.
    pub(super) blocks: Vec<(u32, Stamp)>,
    /// Chunks that need not be offered again.
    pub(super) stored: usize,
}

impl State {
    /// Which slots its chunks may have.
    pub(super) fn room(&self) -> Room {
        match self.about.low_priority {
            true => Room::Free,
            false => Room::Evict,
        }
    }

    pub(super) fn num_keys(&self, group: usize) -> usize {
        match self.key_bytes {
            0 => 0,
            bytes => self.groups[group].keys.len() / bytes,
        }
    }

    pub(super) fn key(&self, group: usize, chunk: usize) -> Option<&[u8]> {
        let bytes = self.key_bytes;
        self.groups[group]
            .keys
            .get(chunk * bytes..(chunk + 1) * bytes)
            .filter(|key| !key.is_empty())
    }

    /// Keys of a range of chunks, as many as there are.
    pub(super) fn keys(&self, group: usize, first: usize) -> impl Iterator<Item = &[u8]> + Clone {
        let bytes = self.key_bytes.max(1);
        let keys = &self.groups[group].keys;
        keys[(first * bytes).min(keys.len())..].chunks_exact(bytes)
    }

    /// The engine starts it again from its first token, or goes on after a load.
    pub(super) fn forget_blocks(&mut self) {
        for group in &mut self.groups {
            group.blocks.clear();
        }
    }
}

/// Requests by name and by number.
#[derive(Debug, Default)]
pub(super) struct Table {
    names: HashMap<Box<str>, RequestId, FixedState>,
    states: Vec<Option<State>>,
    free: Vec<RequestId>,
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.states.len() - self.free.len()
    }

    pub(super) fn find(&self, name: &str) -> Option<RequestId> {
        self.names.get(name).copied()
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&State> {
        self.states.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut State> {
        self.states.get_mut(id.0 as usize)?.as_mut()
    }

    fn add(&mut self, state: State) -> RequestId {
        let name = state.name.clone();
        let id = match self.free.pop() {
            Some(id) => {
                self.states[id.0 as usize] = Some(state);
                id
            }
            None => {
                self.states.push(Some(state));
                RequestId((self.states.len() - 1) as u32)
            }
        };
        self.names.insert(name, id);
        id
    }

    /// The request's name is free for another one from now on.
    pub(super) fn unname(&mut self, id: RequestId) {
        if let Some(state) = self.get(id) {
            let name = state.name.clone();
            self.names.remove(&name);
        }
    }

    /// Forgets a request that has finished and has no jobs left.
    pub(super) fn bury(&mut self, id: RequestId) {
        let over = self
            .get(id)
            .is_some_and(|state| state.finished && state.jobs == 0);
        if over {
            self.states[id.0 as usize] = None;
            self.free.push(id);
        }
    }

    /// What is computed by now must not be stored.
    pub(super) fn taint(&mut self) {
        for state in self.states.iter_mut().flatten() {
            state.tainted = true;
        }
    }

    pub(super) fn validate(&self, jobs: &JobTable<JobBody>) {
        let mut counts: HashMap<RequestId, u32> = HashMap::new();
        for job in jobs.iter() {
            *counts.entry(job.body.request).or_default() += 1;
        }
        for (at, state) in self.states.iter().enumerate() {
            let id = RequestId(at as u32);
            let Some(state) = state else {
                assert!(!counts.contains_key(&id), "a job of a request that is over");
                continue;
            };
            assert_eq!(state.jobs, counts.remove(&id).unwrap_or(0));
            assert_eq!(
                self.find(&state.name) == Some(id),
                !state.finished,
                "a request is found by its name until it ends"
            );
        }
        assert!(counts.is_empty());
    }
}

impl Requests {
    /// A request arrives.
    ///
    /// # Errors
    /// [`RequestError::Duplicate`].
    pub fn add(&mut self, name: &str, about: NewRequest) -> Result<RequestId, RequestError> {
        if self.table.find(name).is_some() {
            return Err(RequestError::Duplicate {
                name: name.to_owned(),
            });
        }
        let groups = self.groups.iter().map(|_| GroupState::default()).collect();
        Ok(self.table.add(State {
            name: name.into(),
            about,
            record: self.manager.new_request(),
            groups,
            hashes: 0,
            key_bytes: 0,
            computed: 0,
            deferred_since: None,
            deferred: None,
            answer: None,
            seen_changes: 0,
            hollow: false,
            tainted: false,
            refused: false,
            jobs: 0,
            finished: false,
        }))
    }

    /// The live request of this name.
    ///
    /// # Errors
    /// [`RequestError::Unknown`].
    pub fn find(&self, name: &str) -> Result<RequestId, RequestError> {
        self.table.find(name).ok_or_else(|| RequestError::Unknown {
            name: name.to_owned(),
        })
    }

    /// Block hashes of this request that [`Requests::add_hashes`] has been given.
    pub fn num_hashes(&self, id: RequestId) -> usize {
        self.table.get(id).map_or(0, |state| state.hashes)
    }

    /// The request's next block hashes.
    ///
    /// # Errors
    /// [`RequestError::HashLength`]; the hashes before that one are kept.
    pub fn add_hashes<'h>(
        &mut self,
        id: RequestId,
        hashes: impl IntoIterator<Item = &'h [u8]>,
    ) -> Result<(), RequestError> {
        let Some(state) = self.table.get_mut(id) else {
            return Ok(());
        };
        for hash in hashes {
            let bytes = hash.len() + size_of::<u32>();
            if state.hashes == 0 {
                state.key_bytes = bytes;
            } else if state.key_bytes != bytes {
                return Err(RequestError::HashLength {
                    name: state.name.to_string(),
                    bytes: hash.len(),
                    expected: state.key_bytes - size_of::<u32>(),
                });
            }
            state.hashes += 1;
            for (known, group) in state.groups.iter_mut().zip(&self.groups) {
                let every = group.hashes_per_chunk;
                if every == 1 || state.hashes.is_multiple_of(every) {
                    known.keys.extend_from_slice(hash);
                    known.keys.extend_from_slice(&group.id.to_be_bytes());
                }
            }
        }
        Ok(())
    }

    /// The request's next block hash; as [`Requests::add_hashes`].
    ///
    /// # Errors
    /// [`RequestError::HashLength`].
    pub fn add_hash(&mut self, id: RequestId, hash: &[u8]) -> Result<(), RequestError> {
        self.add_hashes(id, [hash])
    }

    /// The request's hashes have changed: a session that goes on after its tokens were cut. They will
    /// be given again from the first.
    pub fn clear_hashes(&mut self, id: RequestId) {
        if let Some(state) = self.table.get_mut(id) {
            state.hashes = 0;
            for group in &mut state.groups {
                group.keys.clear();
                group.stored = 0;
            }
        }
    }

    /// Number of hashes that cover the first `tokens` tokens in whole chunks of the smallest group:
    /// more would not be used.
    pub fn hashes_for(&self, tokens: u64) -> usize {
        (tokens / u64::from(self.config.tokens_per_hash)) as usize
    }

    /// The request lost its blocks; it will be looked up again.
    pub fn preempted(&mut self, id: RequestId) {
        if let Some(state) = self.table.get_mut(id) {
            state.forget_blocks();
        }
    }
}

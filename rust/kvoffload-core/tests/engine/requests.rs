//! Requests of the simulated engine: tokens, block tables, and what becomes of them.

use kvoffload_core::jobs::JobId;
use kvoffload_core::requests::{NewRequest, RequestError, RequestId, Span};

use super::{Content, Engine};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Waiting,
    Loading,
    /// Loaded, and to be scheduled.
    Loaded,
    Running,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) uid: u64,
    pub(crate) id: RequestId,
    name: String,
    pub(crate) about: NewRequest,
    /// The hash of each prefix, from the empty one on.
    pub(crate) hashes: Vec<u64>,
    family: u64,
    outputs_left: u64,
    pub(crate) computed: u64,
    /// Tokens that the prefix cache had at its admission.
    pub(crate) local: u64,
    /// Tokens that are there once it is loaded.
    pub(crate) target: u64,
    /// The job that loads it.
    pub(crate) job: u64,
    /// The first job that can be its.
    first_job: u64,
    pub(crate) status: Status,
    pub(crate) tables: Vec<Vec<u32>>,
    /// Of the weights with which all of its KV was computed; `None`: of several.
    pub(crate) epoch: Option<u32>,
    /// It got a load that cannot be made, so it loads nothing any more.
    pub(crate) hollow: bool,
}

impl Request {
    pub(crate) fn known(&self) -> u64 {
        self.hashes.len() as u64 - 1
    }
}

/// The first token that the one after the first `tokens` needs.
pub(crate) fn skipped(span: Span, tokens: u64) -> u64 {
    match span {
        Span::Full => 0,
        Span::Window(window) => (tokens + 1).saturating_sub(window.into()),
        Span::Local(local) => tokens / u64::from(local) * u64::from(local),
        Span::State => tokens.saturating_sub(1),
    }
}

impl Engine {
    pub(crate) fn at(&self, uid: u64) -> usize {
        let mut requests = self.requests.iter();
        requests.position(|request| request.uid == uid).unwrap()
    }

    /// A request arrives. Families share their first tokens with one another, some more, some less.
    pub(crate) fn add(&mut self, name: u64, family: u64, prompt: u64, outputs: u64, flags: u64) {
        let name = format!("request {name}");
        let limit = |bit: u64| (flags >> bit & 1 == 1).then_some(flags % 97);
        let about = NewRequest {
            prompt_tokens: prompt,
            max_load_tokens: limit(8),
            max_store_tokens: limit(9),
            skip_load: flags >> 10 & 7 == 0,
            skip_store: flags >> 13 & 7 == 0,
            low_priority: flags >> 16 & 3 == 0,
        };
        let taken = self.requests.iter().any(|request| request.name == name);
        let id = match self.offload.add(&name, about) {
            Err(RequestError::Duplicate { .. }) if taken => return,
            other => other.unwrap(),
        };
        assert!(!taken);
        let uid = self.next;
        self.next += 1;
        self.requests.push(Request {
            uid,
            id,
            name,
            about,
            hashes: vec![0],
            family,
            outputs_left: outputs.max(1),
            computed: 0,
            local: 0,
            target: 0,
            job: 0,
            first_job: self.next_job(),
            status: Status::Waiting,
            tables: vec![Vec::new(); self.groups.len()],
            epoch: None,
            hollow: false,
        });
        let at = self.requests.len() - 1;
        for position in 0..prompt {
            let shared = position < 16 * family * 2 / 3;
            self.append(at, if shared { 0 } else { 1 + family });
        }
        self.waiting.push_back(uid);
        self.offload.validate();
    }

    fn append(&mut self, at: usize, token: u64) {
        let unit = self.unit();
        let hashes = &mut self.requests[at].hashes;
        let last = hashes[hashes.len() - 1];
        let mixed = (last ^ (token + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hashes.push(mixed ^ (mixed >> 29));
        let length = hashes.len() as u64 - 1;
        if length.is_multiple_of(unit) {
            let before = hashes[(length - unit) as usize];
            self.prefixes
                .insert(hashes[length as usize], (before, length));
        }
    }

    /// Tells the hashes of the first `tokens` tokens, if so many are known.
    pub(crate) fn tell_hashes(&mut self, at: usize, tokens: u64) {
        let request = &self.requests[at];
        let tokens = tokens.min(request.known());
        for nth in self.offload.num_hashes(request.id)..self.offload.hashes_for(tokens) {
            let hash = request.hashes[(nth + 1) * self.unit() as usize];
            self.offload
                .add_hash(request.id, &hash.to_le_bytes())
                .unwrap();
        }
    }

    /// What block `nth` of a group holds once the first `tokens` tokens are computed.
    pub(crate) fn content(&self, at: usize, group: usize, nth: usize, tokens: u64) -> Content {
        let request = &self.requests[at];
        let start = nth as u64 * self.size(group);
        let end = tokens.min(start + self.size(group));
        Content {
            group,
            end: request.hashes[end as usize],
            filled: end - start,
            epoch: request.epoch.unwrap_or(u32::MAX),
        }
    }

    pub(crate) fn release(&mut self, tables: &mut [Vec<u32>]) {
        for table in tables {
            for block in table.drain(..).rev().filter(|&block| block != 0) {
                self.gpu.release(block);
            }
        }
    }

    pub(crate) fn preempt(&mut self, uid: u64) {
        self.preemptions += 1;
        self.running.retain(|&running| running != uid);
        self.restart(uid);
        self.preempted.push(uid);
    }

    /// It starts again from nothing.
    fn restart(&mut self, uid: u64) {
        let at = self.at(uid);
        let mut tables = std::mem::take(&mut self.requests[at].tables);
        self.release(&mut tables);
        let request = &mut self.requests[at];
        request.tables = tables;
        request.status = Status::Waiting;
        request.computed = 0;
        self.waiting.retain(|&waiting| waiting != uid);
        self.waiting.push_front(uid);
    }

    /// The client goes away.
    pub(crate) fn abort(&mut self, uid: u64) {
        let at = self.at(uid);
        let mut request = self.requests.remove(at);
        self.running.retain(|&running| running != uid);
        self.waiting.retain(|&waiting| waiting != uid);
        self.preempted.retain(|&preempted| preempted != uid);
        self.offload.finish(request.id, request.computed).unwrap();
        if request.status == Status::Loading {
            self.held.insert(request.job, request.tables);
        } else {
            self.release(&mut request.tables);
        }
        self.offload.validate();
    }

    /// Tokens to guess beyond the known ones, all of which are computed.
    pub(crate) fn guess(&mut self, uid: u64, tokens: u64) -> u64 {
        let request = &self.requests[self.at(uid)];
        let state = self.groups.iter().any(|group| group.span == Span::State);
        if state || request.computed + tokens < request.known() {
            return 0;
        }
        let most = request.outputs_left.min(5);
        self.random.below(most)
    }

    /// How many of the guessed tokens were right; the KV of the others means nothing.
    pub(crate) fn accept(&mut self, at: usize, guessed: u64) -> u64 {
        let right = self.random.below(guessed + 1);
        for _ in 0..right {
            let token = self.random.below(2) * self.requests[at].family;
            self.append(at, token);
        }
        self.requests[at].outputs_left -= right;
        right
    }

    /// Tokens were computed; the last one known gives the next.
    pub(crate) fn advance(&mut self, uid: u64, tokens: u64) {
        let at = self.at(uid);
        self.requests[at].computed += tokens;
        if self.requests[at].computed < self.requests[at].known() {
            return;
        }
        let token = self.random.below(2) * self.requests[at].family;
        self.append(at, token);
        self.requests[at].outputs_left -= 1;
        if self.requests[at].outputs_left == 0 {
            self.abort(uid);
        }
    }

    pub(crate) fn loaded(&mut self, job: JobId, name: Option<&str>, failed: bool) {
        if let Some(mut tables) = self.held.remove(&job.0) {
            assert_eq!(name, None, "a request that was aborted is not named");
            return self.release(&mut tables);
        }
        let found = |request: &&Request| request.status == Status::Loading && request.job == job.0;
        let request = self.requests.iter().find(found).expect("it waits for this");
        assert_eq!(name, Some(&*request.name));
        let (uid, at, local) = (request.uid, self.at(request.uid), request.local);
        if failed {
            // Blocks of a window that it left are gone: only full attention goes on where it is.
            let goes_on = self.groups.len() == 1 && self.groups[0].span == Span::Full && local > 0;
            if !goes_on {
                return self.restart(uid);
            }
            self.requests[at].computed = local;
        } else {
            self.check_blocks(at, true);
            self.cache_blocks(at, self.requests[at].target);
        }
        self.requests[at].status = Status::Loaded;
    }

    /// Every block that the next token needs holds what it should.
    pub(crate) fn check_blocks(&self, at: usize, loaded: bool) {
        let request = &self.requests[at];
        let tokens = if loaded {
            request.target
        } else {
            request.computed
        };
        for (group, config) in self.groups.iter().enumerate() {
            let first = skipped(config.span, tokens) / self.size(group);
            for nth in first as usize..tokens.div_ceil(self.size(group)) as usize {
                let block = request.tables[group][nth];
                for worker in &self.workers {
                    let held = worker.gpu[block as usize].expect("KV that is there");
                    let end = nth as u64 * self.size(group) + held.filled;
                    assert!(end >= tokens.min((nth as u64 + 1) * self.size(group)));
                    if config.span == Span::State {
                        assert_eq!(end, tokens, "a state cannot go back");
                    }
                    if request.epoch.is_some() {
                        assert_eq!(held, self.content(at, group, nth, end.min(request.known())));
                    }
                }
            }
        }
    }

    /// Full blocks of the first `tokens` tokens can be found by others.
    pub(crate) fn cache_blocks(&mut self, at: usize, tokens: u64) {
        let request = &self.requests[at];
        if request.epoch != Some(self.epoch) {
            return;
        }
        let tokens = tokens.min(request.known());
        for (group, table) in request.tables.iter().enumerate() {
            let size = u64::from(self.groups[group].tokens_per_block);
            for nth in 0..(tokens / size) as usize {
                if let Some(&block) = table.get(nth).filter(|&&block| block != 0) {
                    let end = request.hashes[(nth + 1) * size as usize];
                    self.gpu.cache(block, (group, end));
                }
            }
        }
    }

    /// A request got a load that cannot be made.
    pub(crate) fn hollowed(&mut self, job: JobId, name: &str) {
        let mut requests = self.requests.iter_mut();
        if let Some(request) = requests.find(|request| request.name == name)
            && job.0 >= request.first_job
        {
            request.hollow = true;
        }
    }

    /// A chunk of the request that ends here is stored: it may be.
    pub(crate) fn stored(&self, job: JobId, name: &str, end: u64) {
        let mut requests = self.requests.iter();
        if let Some(request) = requests.find(|request| request.name == name)
            && job.0 >= request.first_job
        {
            let about = &request.about;
            assert!(!about.skip_store && end <= about.max_store_tokens.unwrap_or(u64::MAX));
            assert!(!self.setup.prompt_only || end <= about.prompt_tokens);
        }
    }
}

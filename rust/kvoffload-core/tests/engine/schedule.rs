//! One step of the simulated engine.

use std::sync::atomic::Ordering;

use kvoffload_core::jobs::JobId;
use kvoffload_core::requests::{GivenBlocks, Lookup, Span};

use super::Engine;
use super::requests::{Status, skipped};

/// What a request does in a step.
struct Plan {
    uid: u64,
    tokens: u64,
    /// Tokens that are guessed and computed besides.
    guessed: u64,
    /// Blocks it was given in addition, or all that it has.
    blocks: Vec<Vec<u32>>,
    all: bool,
}

impl Engine {
    pub(crate) fn step(&mut self) {
        let pause = self.random.below(1500);
        self.clock.fetch_add(pause, Ordering::Relaxed);
        let mut budget = 16 + self.random.below(100);
        let mut plans = Vec::new();
        let before = self.preempted.len();
        self.schedule_running(&mut budget, &mut plans);
        if self.preempted.len() == before {
            self.admit(&mut budget, &mut plans);
        }
        self.announce(&plans);
        let first_store = JobId(self.next_job());
        for plan in &plans {
            self.store(plan);
        }
        let orders = self.offload.take_orders();
        self.begun(&orders);
        for worker in &mut self.workers {
            worker.begin_step(&orders, &mut self.random, self.setup.failures);
        }
        for plan in &mut plans {
            self.compute(plan, first_store);
        }
        self.workers.iter_mut().for_each(|worker| worker.progress());
        if self.random.chance(50) {
            self.take_reports();
        }
        for plan in &plans {
            self.advance(plan.uid, plan.tokens);
        }
        self.take_reports();
        self.check();
    }

    fn schedule_running(&mut self, budget: &mut u64, plans: &mut Vec<Plan>) {
        let mut nth = 0;
        while nth < self.running.len() {
            let uid = self.running[nth];
            nth += 1;
            let tokens = self.tokens(uid, *budget);
            if tokens == 0 {
                continue;
            }
            let guessed = self.guess(uid, tokens);
            let blocks = loop {
                if let Some(blocks) = self.grow(uid, tokens + guessed) {
                    break Some(blocks);
                }
                let last = self.running[self.running.len() - 1];
                self.preempt(last);
                if last == uid {
                    break None;
                }
            };
            if let Some(blocks) = blocks {
                *budget -= tokens;
                plans.push(Plan {
                    uid,
                    tokens,
                    guessed,
                    blocks,
                    all: false,
                });
            }
        }
    }

    /// Tokens of a request that a step may compute. A state is kept where a block ends.
    fn tokens(&self, uid: u64, budget: u64) -> u64 {
        let at = self.at(uid);
        let request = &self.requests[at];
        let left = request.known() - request.computed;
        let mut end = request.computed + left.min(budget);
        let mut groups = self.groups.iter();
        let state = groups.find(|group| group.span == Span::State);
        if let Some(state) = state
            && end < request.known()
        {
            end -= end % u64::from(state.tokens_per_block);
        }
        end.saturating_sub(request.computed)
    }

    /// Gives a request blocks for so many more tokens, or nothing. Blocks that it left behind are free
    /// before that.
    fn grow(&mut self, uid: u64, tokens: u64) -> Option<Vec<Vec<u32>>> {
        let at = self.at(uid);
        let computed = self.requests[at].computed;
        for group in 0..self.groups.len() {
            let gone = skipped(self.groups[group].span, computed) / self.size(group);
            let table = &mut self.requests[at].tables[group];
            let gone = table.len().min(gone as usize);
            for block in table[..gone].iter_mut().rev().filter(|block| **block != 0) {
                self.gpu.release(std::mem::take(block));
            }
        }
        self.allocate(at, computed, computed + tokens)
    }

    /// Blocks for the first `end` tokens; states and windows have none for those before `kept`.
    fn allocate(&mut self, at: usize, kept: u64, end: u64) -> Option<Vec<Vec<u32>>> {
        let mut wanted: Vec<Vec<bool>> = Vec::new();
        for (group, config) in self.groups.iter().enumerate() {
            let have = self.requests[at].tables[group].len();
            let count = end.div_ceil(self.size(group)) as usize;
            let gone = (skipped(config.span, kept) / self.size(group)) as usize;
            let state = config.span == Span::State;
            let real = |nth: usize| if state { nth + 1 == count } else { nth >= gone };
            wanted.push((have..count).map(real).collect());
        }
        let count = wanted.iter().flatten().filter(|real| **real).count();
        if count > self.gpu.num_free() {
            return None;
        }
        let mut given = Vec::new();
        for (group, wanted) in wanted.iter().enumerate() {
            let blocks = wanted.iter();
            let blocks = blocks.map(|real| if *real { self.gpu.alloc() } else { 0 });
            let blocks: Vec<u32> = blocks.collect();
            self.requests[at].tables[group].extend(&blocks);
            given.push(blocks);
        }
        self.cache_blocks(at, end);
        Some(given)
    }

    fn admit(&mut self, budget: &mut u64, plans: &mut Vec<Plan>) {
        for uid in Vec::from_iter(self.waiting.iter().copied()) {
            if *budget == 0 || self.running.len() >= 8 {
                return;
            }
            let at = self.at(uid);
            match self.requests[at].status {
                Status::Loading | Status::Running => continue,
                Status::Waiting => match self.look_up(uid) {
                    None => continue,
                    Some(0) => {}
                    Some(external) => {
                        if !self.load(uid, external) {
                            return;
                        }
                        continue;
                    }
                },
                Status::Loaded => {}
            }
            let tokens = self.tokens(uid, *budget);
            if tokens == 0 {
                self.give_up(at);
                continue;
            }
            if self.grow(uid, tokens).is_none() {
                return self.give_up(at);
            }
            let fresh = self.requests[at].status == Status::Waiting;
            if fresh && (self.offload.watches_blocks() || self.random.chance(50)) {
                self.tell_blocks(at, 0);
            }
            self.waiting.retain(|&waiting| waiting != uid);
            self.running.push(uid);
            self.requests[at].status = Status::Running;
            *budget -= tokens;
            plans.push(Plan {
                uid,
                tokens,
                guessed: 0,
                blocks: self.requests[at].tables.clone(),
                all: true,
            });
        }
    }

    /// A request that was looked up is not admitted after all.
    fn give_up(&mut self, at: usize) {
        if self.requests[at].status == Status::Waiting {
            let mut tables = std::mem::take(&mut self.requests[at].tables);
            self.release(&mut tables);
            self.requests[at].tables = tables;
            self.requests[at].computed = 0;
        }
    }

    /// Takes what the prefix cache has of it, and asks for more.
    fn look_up(&mut self, uid: u64) -> Option<u64> {
        let at = self.at(uid);
        self.tell_hashes(at, u64::MAX);
        let (local, tables) = self.prefix(at);
        let total = self.requests[at].known();
        let answer = self.offload.lookup(self.requests[at].id, local, total);
        self.offload.validate();
        let Lookup::Tokens(external, _) = answer else {
            return None;
        };
        let about = self.requests[at].about;
        assert!(local + external <= total);
        assert_eq!(local + external, self.longest(at, local), "{about:?}");
        assert!(external <= about.max_load_tokens.unwrap_or(u64::MAX));
        assert!(external == 0 || !about.skip_load);
        for &block in tables.iter().flatten().filter(|&&block| block != 0) {
            self.gpu.share(block);
        }
        let request = &mut self.requests[at];
        request.tables = tables;
        (request.local, request.computed) = (local, local);
        request.epoch = Some(self.epoch);
        Some(external)
    }

    /// The longest prefix in the prefix cache of which every group has what it needs.
    fn prefix(&self, at: usize) -> (u64, Vec<Vec<u32>>) {
        let request = &self.requests[at];
        let most = (0..self.groups.len()).map(|group| self.size(group)).max();
        let unit = most.unwrap();
        let mut tokens = (request.known() - 1) / unit * unit;
        loop {
            let find = |group: usize| -> Option<Vec<u32>> {
                let size = self.size(group);
                let gone = skipped(self.groups[group].span, tokens) / size;
                let block = |nth: u64| match nth < gone {
                    true => Some(0),
                    false => self
                        .gpu
                        .find((group, request.hashes[((nth + 1) * size) as usize])),
                };
                (0..tokens / size).map(block).collect()
            };
            if let Some(tables) = (0..self.groups.len()).map(find).collect() {
                return (tokens, tables);
            }
            tokens -= unit;
        }
    }

    /// Gives a request blocks to load into; false: there are not enough.
    fn load(&mut self, uid: u64, external: u64) -> bool {
        let at = self.at(uid);
        let local = self.requests[at].local;
        let mut target = local + external;
        let unit = (0..self.groups.len()).map(|group| self.size(group)).max();
        let unit = unit.unwrap() * u64::from(self.setup.blocks_per_chunk);
        let less = (target - 1) / unit * unit;
        if less > local && self.random.chance(5) {
            target = less;
            self.shrunk.insert(self.next_job());
        }
        for group in 0..self.groups.len() {
            let gone = skipped(self.groups[group].span, target) / self.size(group);
            let table = &mut self.requests[at].tables[group];
            let gone = table.len().min(gone as usize);
            for block in table[..gone].iter_mut().filter(|block| **block != 0) {
                self.gpu.release(std::mem::take(block));
            }
        }
        // Nothing of it can be found before it is loaded.
        let epoch = self.requests[at].epoch.take();
        let allocated = self.allocate(at, target, target);
        self.requests[at].epoch = epoch;
        if allocated.is_none() {
            self.give_up(at);
            return false;
        }
        let job = self.next_job();
        self.tell_blocks(at, target - local);
        assert_eq!(
            self.next_job(),
            job + 1,
            "one load for one that is asked for"
        );
        let request = &mut self.requests[at];
        request.job = job;
        request.status = Status::Loading;
        request.target = target;
        request.computed = target.min(request.known() - 1);
        true
    }

    fn tell_blocks(&mut self, at: usize, external: u64) {
        let request = &self.requests[at];
        let given: Vec<GivenBlocks<'_>> = (0..self.groups.len())
            .map(|group| {
                let table = &request.tables[group];
                let first = self.offload.first_given(request.id, group).min(table.len());
                let fresh = table[first..].iter().position(|&block| block != 0);
                GivenBlocks {
                    ids: &table[first..],
                    first,
                    fresh: first + fresh.unwrap_or(table.len() - first),
                }
            })
            .collect();
        self.offload
            .allocated(request.id, &given, external)
            .unwrap();
        self.offload.validate();
    }

    fn announce(&mut self, plans: &[Plan]) {
        for uid in std::mem::take(&mut self.preempted) {
            let id = self.requests[self.at(uid)].id;
            self.offload.preempted(id);
        }
        for plan in plans {
            let request = &self.requests[self.at(plan.uid)];
            let blocks: Vec<&[u32]> = plan.blocks.iter().map(Vec::as_slice).collect();
            self.offload
                .scheduled(request.id, &blocks, plan.all, request.computed)
                .unwrap();
            self.offload.validate();
        }
        self.offload
            .step(plans.iter().map(|plan| plan.tokens).sum());
    }

    fn store(&mut self, plan: &Plan) {
        let at = self.at(plan.uid);
        let (id, computed) = (self.requests[at].id, self.requests[at].computed);
        let computed = computed + plan.tokens + plan.guessed;
        let storable = self.offload.storable(id, computed);
        self.tell_hashes(at, storable);
        let evicted = self.offload.manager().stats().evicted;
        self.offload.store(id, computed).unwrap();
        if self.requests[at].about.low_priority {
            assert_eq!(self.offload.manager().stats().evicted, evicted);
        }
        self.offload.validate();
    }

    /// Reads what the tokens need, and writes their KV.
    fn compute(&mut self, plan: &mut Plan, first_store: JobId) {
        let at = self.at(plan.uid);
        self.check_blocks(at, false);
        let computed = self.requests[at].computed;
        let reach = computed + plan.tokens + plan.guessed;
        plan.tokens += self.accept(at, plan.guessed);
        let end = computed + plan.tokens;
        for (group, config) in self.groups.iter().enumerate() {
            let last = reach.div_ceil(self.size(group)) as usize;
            let first = match config.span {
                Span::State => last - 1,
                _ => (computed / self.size(group)) as usize,
            };
            for nth in first..last {
                let block = self.requests[at].tables[group][nth];
                assert_ne!(block, 0);
                let right = end > nth as u64 * self.size(group);
                let content = right.then(|| self.content(at, group, nth, end));
                for worker in &mut self.workers {
                    let reader = worker.reader(block, first_store);
                    assert_eq!(reader, None, "a step writes block {block}");
                    worker.gpu[block as usize] = content;
                }
            }
        }
    }
}

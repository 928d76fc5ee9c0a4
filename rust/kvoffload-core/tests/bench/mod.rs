//! A requests table with a clock that stands still, and short ways to say what an engine says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvoffload_core::manager::{Clock, Config, Manager};
use kvoffload_core::requests::{
    Ended, GivenBlocks, GroupConfig, JobOrder, Lookup, NewRequest, Orders, RequestId, Requests,
    RequestsConfig, Span,
};

pub(crate) const FULL: GroupConfig = GroupConfig {
    id: 0,
    tokens_per_block: 16,
    span: Span::Full,
    draft: false,
};

pub(crate) struct Bench {
    pub(crate) requests: Requests,
    millis: Arc<AtomicU64>,
}

impl Bench {
    /// One group of full attention, 16 tokens a chunk.
    pub(crate) fn new(slots: u32) -> Self {
        Self::with(slots, &[FULL], |_, _| {})
    }

    pub(crate) fn with(
        slots: u32,
        groups: &[GroupConfig],
        change: impl FnOnce(&mut RequestsConfig, &mut Config),
    ) -> Self {
        let millis = Arc::new(AtomicU64::new(0));
        let now = Arc::clone(&millis);
        let clock = Clock::new(move || Duration::from_millis(now.load(Ordering::Relaxed)));
        let mut manager = Config {
            partial_admission: true,
            reasons: true,
            clock: clock.clone(),
            ..Config::new(slots)
        };
        let mut config = RequestsConfig {
            groups: groups.to_vec(),
            tokens_per_hash: 16,
            clock,
            ..RequestsConfig::new(FULL)
        };
        change(&mut config, &mut manager);
        let requests = Requests::new(config, Manager::new(manager).unwrap()).unwrap();
        Self { requests, millis }
    }

    pub(crate) fn wait(&self, millis: u64) {
        self.millis.fetch_add(millis, Ordering::Relaxed);
    }

    /// A request whose prompt has so many hashes, with tokens that begin as all of this `text` do.
    pub(crate) fn add(&mut self, name: &str, text: u8, hashes: u8) -> RequestId {
        self.add_as(name, text, hashes, NewRequest::default())
    }

    pub(crate) fn add_as(
        &mut self,
        name: &str,
        text: u8,
        hashes: u8,
        about: NewRequest,
    ) -> RequestId {
        let prompt_tokens = u64::from(hashes) * 16;
        let id = self
            .requests
            .add(
                name,
                NewRequest {
                    prompt_tokens,
                    ..about
                },
            )
            .unwrap();
        self.hashes(id, text, 0..hashes);
        id
    }

    pub(crate) fn hashes(&mut self, id: RequestId, text: u8, range: std::ops::Range<u8>) {
        for nth in range {
            self.requests.add_hash(id, &[text, nth, 7, 7]).unwrap();
        }
        self.requests.validate();
    }

    pub(crate) fn lookup(&mut self, id: RequestId, total: u64) -> Lookup {
        self.requests.lookup(id, 0, total)
    }

    /// A step computes the first `tokens` tokens of a request in these blocks.
    pub(crate) fn run(&mut self, id: RequestId, blocks: &[&[u32]], tokens: u64) {
        self.requests.scheduled(id, blocks, true, 0).unwrap();
        self.requests.store(id, tokens).unwrap();
        self.requests.validate();
    }

    /// Blocks for a load, from the first on, in a table without shared ones.
    pub(crate) fn load(&mut self, id: RequestId, blocks: &[&[u32]], external: u64) {
        let given: Vec<GivenBlocks<'_>> = blocks
            .iter()
            .map(|ids| GivenBlocks {
                ids,
                first: 0,
                fresh: ids
                    .iter()
                    .position(|&block| block != 0)
                    .unwrap_or(ids.len()),
            })
            .collect();
        self.requests.allocated(id, &given, external).unwrap();
        self.requests.validate();
    }

    pub(crate) fn orders(&mut self) -> Orders {
        self.requests.take_orders()
    }

    /// The one store that was ordered.
    pub(crate) fn one_store(&mut self) -> JobOrder {
        let orders = self.orders();
        let [store] = &*orders.stores else {
            panic!("one store, not {:?}", orders.stores);
        };
        store.clone()
    }

    pub(crate) fn one_load(&mut self) -> JobOrder {
        let orders = self.orders();
        let [load] = &*orders.loads else {
            panic!("one load, not {:?}", orders.loads);
        };
        load.clone()
    }

    /// The only rank reports.
    pub(crate) fn end(&mut self, order: &JobOrder, good: bool) -> Ended {
        let outcome = if good { Ok(()) } else { Err("broken".into()) };
        let ended = self.requests.report(order.id, 0, outcome).unwrap();
        self.requests.validate();
        ended.expect("the only rank")
    }

    /// Puts a text of so many chunks into the pool, by a request that ends.
    pub(crate) fn fill(&mut self, text: u8, chunks: u8) {
        let id = self.add("filler", text, chunks);
        let blocks: Vec<u32> = (0..chunks).map(|nth| 200 + u32::from(nth)).collect();
        let tokens = u64::from(chunks) * 16;
        self.run(id, &[&blocks], tokens);
        let store = self.one_store();
        self.end(&store, true);
        self.requests.finish(id, tokens).unwrap();
    }

    /// After everything has ended.
    pub(crate) fn check_idle(&self) {
        assert_eq!(self.requests.num_jobs(), 0);
        let stats = self.requests.manager().stats();
        assert_eq!((stats.pinned, stats.writing), (0, 0));
        assert_eq!(stats.free + stats.ready, stats.slots);
        self.requests.validate();
    }
}

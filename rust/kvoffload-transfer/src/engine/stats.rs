//! Counters of an engine.

/// Counters of one direction since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KindStats {
    /// Jobs that ended well.
    pub jobs: u64,
    /// Bytes they copied.
    pub bytes: u64,
    /// Jobs that ended with an error, save those that were cancelled.
    pub failures: u64,
    /// Jobs that ended because they were cancelled.
    pub cancelled: u64,
    /// Microseconds that all started jobs together spent between submit and start.
    pub queued_us: u64,
    /// Jobs that are live now: queued, held back or running.
    pub live: u64,
    /// The most jobs that were live at once.
    pub live_peak: u64,
}

/// A snapshot of an engine's counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Of stores.
    pub stores: KindStats,
    /// Of loads.
    pub loads: KindStats,
    /// Jobs that were held back by an earlier job on the same slot or block.
    pub fence_waits: u64,
    /// Waits whose deadline passed.
    pub wait_timeouts: u64,
    /// Slots that may not be used now, because a copy on them missed a deadline.
    pub quarantined_slots: u64,
    /// Slots that have left quarantine, because such a copy ended.
    pub quarantine_released: u64,
    /// Slots compared before a load.
    pub verify_checks: u64,
    /// Slots that did not hold what was stored.
    pub verify_failures: u64,
    /// Panics caught on the engine's threads.
    pub panics: u64,
}

impl Stats {
    /// All counters with their names.
    #[must_use]
    pub fn entries(&self) -> [(&'static str, u64); 21] {
        let Self { stores, loads, .. } = self;
        [
            ("stores", stores.jobs),
            ("store_bytes", stores.bytes),
            ("store_failures", stores.failures),
            ("stores_cancelled", stores.cancelled),
            ("store_queued_us", stores.queued_us),
            ("live_stores", stores.live),
            ("live_stores_peak", stores.live_peak),
            ("loads", loads.jobs),
            ("load_bytes", loads.bytes),
            ("load_failures", loads.failures),
            ("loads_cancelled", loads.cancelled),
            ("load_queued_us", loads.queued_us),
            ("live_loads", loads.live),
            ("live_loads_peak", loads.live_peak),
            ("fence_waits", self.fence_waits),
            ("wait_timeouts", self.wait_timeouts),
            ("quarantined_slots", self.quarantined_slots),
            ("quarantine_released", self.quarantine_released),
            ("verify_checks", self.verify_checks),
            ("verify_failures", self.verify_failures),
            ("panics", self.panics),
        ]
    }
}

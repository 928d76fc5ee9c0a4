//! Keeps a thread near a device, so that the pages it touches first are near the device, too.

use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps the calling thread on the CPUs of a PCI device's NUMA node, where the system names one.
///
/// Everything that cannot be read or set leaves the thread where it is: this is about speed only.
pub(super) fn stay_near(pci: &str) {
    let read = |path: &str| fs::read_to_string(Path::new("/sys").join(path)).unwrap_or_default();
    let Ok(node) = read(&format!("bus/pci/devices/{pci}/numa_node"))
        .trim()
        .parse::<u32>()
    else {
        return; // -1 where the machine has one node, or no file.
    };
    let cpus = parse_list(&read(&format!("devices/system/node/node{node}/cpulist")));
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let mut set = CpuSet::new();
    for cpu in cpus.into_iter().filter(|&cpu| cpu < CpuSet::MAX_CPU) {
        if allowed.is_set(cpu) {
            set.set(cpu);
        }
    }
    if set.count() > 0 {
        sched_setaffinity(None, &set).ok();
    }
}

/// Numbers out of a list such as `0-3,8,10-11`; empty if it is no such list.
fn parse_list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    let parts: Option<Vec<std::ops::RangeInclusive<usize>>> =
        text.trim().split(',').map(range).collect();
    parts.into_iter().flatten().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(parse_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("7"), [7]);
        assert!(parse_list("").is_empty() && parse_list("a-b").is_empty());
    }

    #[test]
    fn a_device_that_is_not_there_changes_nothing() {
        stay_near("ffff:ff:ff.f");
    }
}

//! How much memory this process may use: the machine's, and that of every cgroup it lives in.
//!
//! A container often has far less than `/proc/meminfo` says, and going over its limit ends the
//! process without a word; so both versions of cgroups are read, at every level up to the root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Total memory of this machine or the tightest cgroup limit above this process, whichever is less.
///
/// A static figure: it does not depend on what is in use, so every process of one engine computes
/// the same capacity from it.
///
/// # Errors
/// `/proc/meminfo` cannot be read or has no total.
pub fn machine_memory() -> io::Result<Limit> {
    Machine::new("/").total()
}

/// An amount of memory, and what limits it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// The amount in bytes.
    pub bytes: u64,
    /// The file whose figure is the smallest.
    pub limited_by: String,
}

/// A machine as its files describe it; the root differs in tests.
pub(crate) struct Machine {
    root: PathBuf,
}

/// File names of one cgroup version.
struct Version {
    /// How a line of `/proc/self/cgroup` names it.
    controller: &'static str,
    limit: &'static str,
    usage: &'static str,
    reclaimable: &'static str,
}

const V1: Version = Version {
    controller: "memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};
const V2: Version = Version {
    controller: "",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: "inactive_file",
};

impl Machine {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(crate) fn total(&self) -> io::Result<Limit> {
        let mut least = Limit {
            bytes: self.meminfo("MemTotal:")?,
            limited_by: "MemTotal in /proc/meminfo".to_owned(),
        };
        self.each_cgroup(|directory, version| {
            let file = directory.join(version.limit);
            if let Some(bytes) = read_number(&file).filter(|bytes| *bytes < least.bytes) {
                least = Limit {
                    bytes,
                    limited_by: file.display().to_string(),
                };
            }
        });
        Ok(least)
    }

    pub(crate) fn available(&self) -> io::Result<Limit> {
        let mut least = Limit {
            bytes: self.meminfo("MemAvailable:")?,
            limited_by: "MemAvailable in /proc/meminfo".to_owned(),
        };
        self.each_cgroup(|directory, version| {
            let file = directory.join(version.limit);
            let Some(limit) = read_number(&file) else {
                return;
            };
            let usage = read_number(&directory.join(version.usage)).unwrap_or(0);
            // The kernel gives up clean file pages before it refuses anything.
            let reclaimable = stat(&directory.join("memory.stat"), version.reclaimable);
            let bytes = limit.saturating_sub(usage.saturating_sub(reclaimable.unwrap_or(0)));
            if bytes < least.bytes {
                least = Limit {
                    bytes,
                    limited_by: file.display().to_string(),
                };
            }
        });
        Ok(least)
    }

    /// One figure of `/proc/meminfo`, which counts in KiB.
    fn meminfo(&self, field: &str) -> io::Result<u64> {
        let path = self.path("/proc/meminfo");
        let text = fs::read_to_string(&path)?;
        let kib = text
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse::<u64>().ok());
        kib.map(|kib| kib.saturating_mul(1024)).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} has no readable line {field}", path.display()),
            )
        })
    }

    /// Calls `visit` for this process's cgroup directory and every one above it.
    ///
    /// A machine without cgroups, or files that cannot be read, mean that no limit is known.
    fn each_cgroup(&self, mut visit: impl FnMut(&Path, &Version)) {
        let read = |path: &str| fs::read_to_string(self.path(path)).unwrap_or_default();
        let membership = read("/proc/self/cgroup");
        for line in read("/proc/self/mountinfo").lines() {
            let Some(mount) = Mount::parse(line) else {
                continue;
            };
            let top = self.path(mount.point);
            let own = mount.own_path(&membership).unwrap_or_default();
            let mut directory = top.join(own);
            loop {
                visit(&directory, mount.version);
                if directory == top || !directory.pop() {
                    break;
                }
            }
        }
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }
}

/// A mounted cgroup hierarchy that controls memory.
struct Mount<'a> {
    /// The part of the hierarchy that is mounted.
    root: &'a str,
    point: &'a str,
    version: &'static Version,
}

impl<'a> Mount<'a> {
    /// Reads one line of `mountinfo`: `id parent device root point options .. - type source super`.
    fn parse(line: &'a str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let (root, point) = (before.next()?, before.next()?);
        let mut after = after.split(' ');
        let version = match after.next()? {
            "cgroup2" => &V2,
            "cgroup" if after.nth(1)?.split(',').any(|option| option == "memory") => &V1,
            _ => return None,
        };
        Some(Self {
            root,
            point,
            version,
        })
    }

    /// This process's place below the mount point, from the lines `id:controllers:path` of
    /// `/proc/self/cgroup`; none when the mount does not show it.
    fn own_path<'b>(&self, membership: &'b str) -> Option<&'b str> {
        let path = membership.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let ours = controllers
                .split(',')
                .any(|name| name == self.version.controller);
            ours.then_some(path)
        })?;
        let below = path.strip_prefix(self.root.trim_end_matches('/'))?;
        // A path that leaves the mount (`/../x`, or a sibling with the same start) is not below it.
        let inside = below.is_empty() || below.starts_with('/');
        (inside && !below.contains("..")).then(|| below.trim_start_matches('/'))
    }
}

/// A file that holds one number; `max` and anything unreadable mean none.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// One line `name value` of a `memory.stat`.
fn stat(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:    1000 kB\nMemFree:  10 kB\nMemAvailable:   800 kB\n";
    const KIB: u64 = 1024;

    /// A made-up machine in a directory of its own, removed at the end.
    struct Fake(PathBuf);

    impl Fake {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root =
                std::env::temp_dir().join(format!("kvoffload-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("a file has a directory")).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }

        fn machine(&self) -> Machine {
            Machine::new(&self.0)
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn without_cgroups_the_machine_is_the_limit() {
        let fake = Fake::new("none", &[("proc/meminfo", MEMINFO)]);
        assert_eq!(fake.machine().total().unwrap().bytes, 1000 * KIB);
        let available = fake.machine().available().unwrap();
        assert_eq!(available.bytes, 800 * KIB);
        assert!(available.limited_by.contains("MemAvailable"));
    }

    #[test]
    fn version_2_takes_the_tightest_level_and_counts_clean_file_pages() {
        let fake = Fake::new(
            "v2",
            &[
                ("proc/meminfo", MEMINFO),
                ("proc/self/cgroup", "0::/pod/box\n"),
                (
                    "proc/self/mountinfo",
                    "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                ),
                ("sys/fs/cgroup/pod/memory.max", "409600\n"),
                ("sys/fs/cgroup/pod/memory.current", "204800\n"),
                (
                    "sys/fs/cgroup/pod/memory.stat",
                    "anon 7\ninactive_file 102400\n",
                ),
                ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ],
        );
        assert_eq!(fake.machine().total().unwrap().bytes, 409_600);
        let available = fake.machine().available().unwrap();
        assert_eq!(available.bytes, 409_600 - 204_800 + 102_400);
        assert!(available.limited_by.ends_with("pod/memory.max"));
    }

    #[test]
    fn version_1_in_a_container_that_sees_only_its_own_part() {
        let fake = Fake::new(
            "v1",
            &[
                ("proc/meminfo", MEMINFO),
                (
                    "proc/self/cgroup",
                    "4:cpu:/x\n3:memory,hugetlb:/docker/abc\n0::/\n",
                ),
                (
                    "proc/self/mountinfo",
                    "9 1 0:9 / /proc rw - proc proc rw\n\
                     35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
                ),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000"),
            ],
        );
        assert_eq!(fake.machine().total().unwrap().bytes, 300_000);
        assert_eq!(fake.machine().available().unwrap().bytes, 200_000);
    }

    #[test]
    fn a_place_outside_the_mount_falls_back_to_the_mount_point() {
        for outside in ["/../other", "/docker/abcd", "/docker/abc/../x"] {
            let mount = Mount {
                root: "/docker/abc",
                point: "/m",
                version: &V2,
            };
            assert_eq!(
                mount.own_path(&format!("0::{outside}\n")),
                None,
                "{outside}"
            );
        }
        let mount = Mount {
            root: "/",
            point: "/m",
            version: &V2,
        };
        assert_eq!(mount.own_path("0::/a/b\n"), Some("a/b"));
        assert_eq!(mount.own_path("0::/\n"), Some(""));
    }

    #[test]
    fn a_file_without_the_total_is_an_error() {
        let fake = Fake::new("bad", &[("proc/meminfo", "MemTotal: lots\n")]);
        assert!(
            fake.machine()
                .total()
                .unwrap_err()
                .to_string()
                .contains("MemTotal")
        );
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(machine_memory().unwrap().bytes > 64 << 20);
        assert!(Machine::new("/").available().unwrap().bytes > 1 << 20);
    }
}

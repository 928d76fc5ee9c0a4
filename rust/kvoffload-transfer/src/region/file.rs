//! Memory that several processes map: a `memfd`, whose size is sealed before anybody else knows it.
//!
//! It has no name, and whoever maps it was given its descriptor. The seal is what makes it safe to map
//! a file that another process has: one that shrank would kill whoever reads what is no longer there.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::StartError;

/// Where a region's memory comes from.
#[derive(Debug, Default)]
pub enum Backing {
    /// Memory of this process alone.
    #[default]
    Private,
    /// Memory that others may join, with [`Region::take_file`](super::Region::take_file).
    Shared,
    /// The memory of somebody else's shared region, which is only read.
    Joined(OwnedFd),
}

/// A new file of zeroes whose size stays as it is.
pub(super) fn create(bytes: u64) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("kvoffload", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Sees to it that a file is one of [`create`]'s, with this many bytes.
pub(super) fn check(file: &OwnedFd, bytes: u64) -> Result<(), StartError> {
    let failed = |source: Errno| StartError::System {
        what: "look at the memory to join",
        source: io::Error::from(source),
    };
    let wrong = |reason| StartError::Setting {
        field: "join_region",
        reason,
    };
    // What is no `memfd` has no seals.
    let seals = rustix::fs::fcntl_get_seals(file)
        .map_err(|_| wrong("it is no memory that ranks share: pass what took its region's file"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(wrong(
            "its size can still change: pass what took its region's file",
        ));
    }
    let size = rustix::fs::fstat(file).map_err(failed)?.st_size;
    if u64::try_from(size) != Ok(bytes) {
        return Err(wrong(
            "it has another size: give all ranks the same slots, or set share_replicated_kv to false",
        ));
    }
    Ok(())
}

/// Maps all of a file.
pub(super) fn map(file: &OwnedFd, length: usize) -> Result<NonNull<u8>, Errno> {
    // SAFETY: a new mapping at an address the kernel chooses touches no existing memory.
    let start = unsafe {
        rustix::mm::mmap(
            ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file,
            0,
        )
    }?;
    Ok(NonNull::new(start.cast()).expect("mmap never answers the null page"))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::Region;
    use super::*;

    fn shared() -> (Region, OwnedFd) {
        let region = Region::with(Backing::Shared, 8, 4096).unwrap();
        let file = region.take_file().unwrap();
        (region, file)
    }

    #[test]
    fn what_the_owner_writes_is_what_others_read_also_when_it_is_gone() {
        let (owner, file) = shared();
        assert!(owner.take_file().is_none(), "given out twice");
        let reader = Region::with(Backing::Joined(file), 8, 4096).unwrap();
        assert!(owner.is_shared() && !owner.is_joined());
        assert!(reader.is_shared() && reader.is_joined());
        owner.touch(0, u64::MAX).unwrap();
        // SAFETY: nobody else knows the regions.
        unsafe {
            owner.address(4096).write(7);
            reader.touch(0, u64::MAX).unwrap();
            assert_eq!(reader.hash(4096..8192), owner.hash(4096..8192));
            drop(owner);
            assert_eq!(*reader.address(4096), 7);
        }
    }

    #[test]
    fn only_sealed_memory_of_the_right_size_is_joined() {
        let reason = |file, slots| {
            let error = Region::with(Backing::Joined(file), slots, 4096).unwrap_err();
            error.to_string()
        };
        assert!(reason(shared().1, 9).contains("another size"));
        let null = File::open("/dev/null").unwrap();
        assert!(reason(null.into(), 8).contains("no memory that ranks share"));
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 8 * 4096).unwrap();
        assert!(reason(unsealed, 8).contains("can still change"));
    }

    #[test]
    fn nobody_changes_the_size() {
        let (_region, file) = shared();
        for bytes in [4096, 9 * 4096] {
            assert_eq!(rustix::fs::ftruncate(&file, bytes), Err(Errno::PERM));
        }
    }
}

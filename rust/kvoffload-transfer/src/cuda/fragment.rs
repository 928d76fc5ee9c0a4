//! What the staging kernel works on.

/// Bytes that a warp copies at a time; the same number is in `fragments.cu`.
pub(super) const PART_BYTES: u32 = 4096;
/// Longer fragments are cut, so that short ones beside them leave few warps without work.
pub(super) const LONGEST: u32 = 16 * PART_BYTES;
/// What the kernel reads about a fragment; laid out as in `fragments.cu`.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fragment {
    /// Address in the KV cache.
    pub(super) device: u64,
    /// Bytes from the staging chunk's start.
    pub(super) staging: u32,
    /// Length, at most [`LONGEST`].
    pub(super) bytes: u32,
}

/// Which way fragments go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Pack,
    Unpack,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_suits_old_drivers_and_devices() {
        let text = include_str!("fragments.ptx");
        assert!(text.contains("\n.version 7.0\n") && text.contains("\n.target sm_75\n"));
        assert!(text.contains("kvoffload_copy_fragments") && !text.contains('\0'));
        assert_eq!(size_of::<Fragment>(), 16);
    }
}

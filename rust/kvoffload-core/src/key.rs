//! Names of chunks: byte strings of any length, held in place when they are short.

use std::fmt;
use std::hash::{BuildHasher, Hasher};

use foldhash::fast::FixedState;

/// 32 bits of a key's hash: where the index starts to look, and what it compares first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHash(pub(crate) u32);

impl KeyHash {
    /// Hashes `key`. Same bytes, same value, in every process.
    pub fn of(key: &[u8]) -> Self {
        const STATE: FixedState = FixedState::with_seed(0x6b76_6f66_666c_6f61);
        let mut hasher = STATE.build_hasher();
        hasher.write(key);
        // The low half of foldhash's output is as well mixed as the high one; one half is enough
        // because the index compares the key itself before it believes a match.
        Self(hasher.finish() as u32)
    }
}

/// An owned key. Up to [`Key::INLINE`] bytes live inside the value, longer ones on the heap.
///
/// vLLM's keys are a block hash and a 4-byte group index: 36 bytes with SHA-256.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Repr);

#[derive(Clone, PartialEq, Eq)]
enum Repr {
    Inline { len: u8, bytes: [u8; Key::INLINE] },
    Heap(Box<[u8]>),
}

impl Key {
    /// The longest key that needs no allocation, in bytes.
    pub const INLINE: usize = 38;

    /// Copies `bytes`.
    pub fn new(bytes: &[u8]) -> Self {
        if bytes.len() <= Self::INLINE {
            let mut inline = [0; Self::INLINE];
            inline[..bytes.len()].copy_from_slice(bytes);
            Self(Repr::Inline {
                len: bytes.len() as u8,
                bytes: inline,
            })
        } else {
            Self(Repr::Heap(bytes.into()))
        }
    }

    /// The key's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Heap(bytes) => bytes,
        }
    }
}

impl Default for Key {
    fn default() -> Self {
        Self::new(&[])
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(")?;
        for byte in self.as_bytes() {
            write!(f, "{byte:02x}")?;
        }
        f.write_str(")")
    }
}

const _: () = assert!(
    size_of::<Key>() == 40,
    "a key is 40 bytes of every slot's metadata"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_every_length_keep_their_bytes_and_identity() {
        for len in 0..100usize {
            let bytes: Vec<u8> = (0..len as u8).collect();
            let key = Key::new(&bytes);
            assert_eq!(key.as_bytes(), bytes);
            assert_eq!(key, Key::new(&bytes));
            assert_eq!(KeyHash::of(key.as_bytes()), KeyHash::of(&bytes));
        }
        assert_ne!(
            Key::new(b"a"),
            Key::new(b"a\0"),
            "padding is not part of a key"
        );
    }
}

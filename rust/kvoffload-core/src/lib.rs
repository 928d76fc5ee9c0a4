//! The bookkeeping of kvoffload-rs: which chunk is where, who uses it, and which goes next.
//!
//! Nothing here moves a byte. Follow one chunk: its [`key`] enters the [`manager`], which takes a
//! slot from the [`pool`] and asks the [`policy`] for victims; a [`jobs`] entry lives while the bytes
//! move; [`plan`] says which copies move them.
#![forbid(unsafe_code)]

mod keylist;
mod sync;

pub mod admission;
pub mod fence;
pub mod index;
pub mod jobs;
pub mod key;
pub mod layout;
pub mod manager;
pub mod plan;
pub mod policy;
pub mod pool;
pub mod requests;

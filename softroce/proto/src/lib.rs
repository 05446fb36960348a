//! The RoCEv2 reliable transport without I/O: datagrams, time and posted work go in; datagrams, completions and deadlines come out.
#![forbid(unsafe_code)]

mod time;
mod types;

pub use time::Instant;
pub use types::{Gid, LKey, Mtu, Psn, Qpn, RKey};

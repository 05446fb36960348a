//! The RoCEv2 reliable transport without I/O: datagrams, time and posted work go in; datagrams, completions and deadlines come out.
#![forbid(unsafe_code)]

mod endpoint;
pub mod icrc;
pub mod ident;
pub mod memory;
pub mod qp;
mod time;
mod types;
pub mod wire;
pub mod work;

pub use endpoint::{AsyncEvent, Datagram, Endpoint, Ident, Transmit};
pub use time::Instant;
pub use types::{Gid, LKey, Mtu, Psn, Qpn, RKey};

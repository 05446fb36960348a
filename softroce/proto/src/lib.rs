//! The RoCEv2 transports RC, UC and UD without I/O: datagrams, time and posted work go in; datagrams, completions and deadlines come out. And communication management
//! ([`cm`]), which connects their queue pairs.
#![forbid(unsafe_code)]

pub mod cm;
mod counters;
mod endpoint;
mod gsi;
pub mod icrc;
pub mod ident;
pub mod memory;
mod outbox;
pub mod qp;
mod qpn;
mod shm_links;
mod srq;
mod table;
mod time;
mod timer;
mod types;
pub mod wire;
pub mod work;

pub use counters::Counters;
pub use endpoint::{AsyncEvent, Datagram, Endpoint, EndpointConfig, Ident, LanePacket, Short, Transmit};
pub use gsi::{ReceivedMad, mad_of};
pub use qpn::Block;
pub use srq::{SrqAttributes, SrqError, SrqInit};
pub use time::Instant;
pub use types::{Gid, LKey, Mtu, Psn, Qpn, RKey};

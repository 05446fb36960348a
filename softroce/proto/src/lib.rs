//! The RoCEv2 transport services RC, UC and UD, and connection management ([`cm`]), without I/O:
//! datagrams, time and work requests go in; datagrams, work completions and deadlines come out.
//!
//! - [`Endpoint`]: the queue pairs of one device, demultiplexing, retransmission timers.
//! - [`wire`]: one file per header; [`icrc`] and [`ident`]: the invariant CRC.
//! - [`qp`]: states, requester (window, go-back-N retransmission, retry counts), responder (ACK,
//!   NAK, RNR NAK, duplicates, replay of atomics).
//! - [`congestion`]: ECN, CNPs, and the rate of a queue pair by a controller.
//! - [`memory`]: the trait through which the engine accesses registered memory; [`direct`]: the one
//!   through which it accesses a peer's.
#![forbid(unsafe_code)]

pub mod cm;
pub mod congestion;
mod counters;
pub mod direct;
mod endpoint;
mod full_links;
mod gsi;
pub mod icrc;
pub mod ident;
pub mod memory;
mod outbox;
pub mod qp;
mod qpn;
mod random;
mod srq;
mod table;
mod time;
mod timer;
mod types;
pub mod wire;
pub mod work;

pub use counters::Counters;
pub use endpoint::{
    AsyncEvent, AttachError, Datagram, Endpoint, EndpointConfig, FastPathSend, Ident, LinkCapabilities, LinkPacket,
    MULTICAST_QPN, Transmit,
};
pub use gsi::{ReceivedMad, mad_of};
pub use qpn::QpnBlock;
pub use random::NumberKey;
pub use srq::{SrqAttributes, SrqError, SrqInit, XrcSrq};
pub use time::Instant;
pub use types::{Gid, LKey, Mtu, Psn, Qpn, RKey};

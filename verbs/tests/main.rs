//! The safe API over a provider in memory.
//!
//! All but the modules excluded below runs under Miri too (`cargo xtask sanitize miri`), with the
//! provenance of registered memory exposed: devices know memory by number.

mod abandoned;
mod alias;
mod allocation;
mod basics;
mod cache;
// Miri loads no libraries.
#[cfg(not(miri))]
mod cm;
mod datagrams;
// Miri has no poll(2).
#[cfg(not(miri))]
mod events;
// Miri has no sockets.
#[cfg(not(miri))]
mod exchange;
mod extended_cq;
#[cfg(feature = "ibverbs")]
mod ibverbs;
mod lifetime;
mod memory;
// Miri runs no compiler.
#[cfg(not(miri))]
mod misuse;
mod model;
mod raw;
mod refusal;
mod rig;
mod shared;
mod split;
mod stub;
mod threads;
mod transports;
mod windows;
mod work_requests;

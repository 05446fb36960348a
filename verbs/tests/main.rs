//! The safe API over a provider in memory.

mod allocation;
mod basics;
mod cache;
mod cm;
mod datagrams;
mod events;
mod exchange;
mod extended_cq;
mod lifetime;
mod memory;
mod misuse;
mod model;
mod refusal;
mod rig;
mod shared;
mod stub;
mod threads;
mod transports;
mod windows;
mod work_requests;

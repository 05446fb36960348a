//! The safe API over a provider in memory.

mod allocation;
mod basics;
mod cm;
mod datagrams;
mod events;
mod exchange;
mod lifetime;
mod misuse;
mod model;
mod refusal;
mod rig;
mod stub;
mod threads;
mod transports;

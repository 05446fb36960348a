//! The safe API over a provider in memory.

mod allocation;
mod basics;
mod events;
mod lifetime;
mod misuse;
mod model;
mod refusal;
mod rig;
mod stub;
mod threads;

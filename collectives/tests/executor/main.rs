//! The executor on soft devices: many ranks in one thread, driven round-robin; every algorithm,
//! protocol and way of cutting against the definition of the collective.

mod world;

mod agrees;
mod allocation;
mod failures;
mod long;
mod overlap;
mod types;

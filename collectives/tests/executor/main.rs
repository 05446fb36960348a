//! The executor on soft devices: many ranks in one thread, driven in turn, every algorithm, protocol and way of cutting, against what the collective is to give.

mod world;

mod agrees;
mod allocation;
mod failures;
mod long;
mod overlap;
mod types;

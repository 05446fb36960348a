//! Collectives on GPUs: results, failures of ranks, and ranks without a GPU. On the CPU stand-in
//! with immediate execution.

#[path = "../communicator/world.rs"]
mod world;

mod collectives;
mod experts;
mod failures;
mod faults;
mod first;
mod gpus;
mod graphs;
mod groups;
mod many;
mod sharing;
mod split;

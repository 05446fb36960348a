//! Collectives on GPUs: what they give, what is left when ranks go, and ranks that have none. On the CPU stand-in for a GPU, whose streams work at once.

#[path = "../communicator/world.rs"]
mod world;

mod collectives;
mod failures;
mod faults;
mod gpus;
mod graphs;
mod many;
mod split;

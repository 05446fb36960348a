//! The communicator on a soft device: all collectives by all kinds of memory, requests, groups, and what is left after failures.

mod collectives;
mod failures;
mod messages;
mod places;
mod ragged;
mod repeats;
mod requests;
mod wire;
mod world;

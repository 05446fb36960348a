//! The communicator on a soft device: all collectives on all kinds of memory, requests, groups, and
//! shrink.

mod collectives;
mod failures;
mod messages;
mod moe;
mod places;
mod ragged;
mod repeats;
mod requests;
mod wire;
mod world;

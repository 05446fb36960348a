//! Hostile input: packets that no requester may send ([`sequence`]) and random datagrams
//! ([`datagrams`]). Refusals of single requests are tested in `softroce/proto/tests/refusals.rs`
//! and in the conformance suite.

mod datagrams;
mod sequence;
mod victim;

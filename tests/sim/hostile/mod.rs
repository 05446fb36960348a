//! Hostile input from the peer or any other sender. Single requests that a responder must refuse
//! are tested in `softroce/proto/tests/refusals.rs` and in the conformance suite.
//!
//! - [`sequence`]: packets that no requester may send.
//! - [`datagrams`]: a million random datagrams.

mod datagrams;
mod sequence;
mod victim;

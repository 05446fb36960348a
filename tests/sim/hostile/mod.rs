//! What a peer, or anybody, may send and must not get away with.
//!
//! - [`requests`]: requests that a verbs program can post and its peer must refuse, seen from both ends.
//! - [`sequence`]: packets that no requester may send.
//! - [`datagrams`]: a million of anything.

mod datagrams;
mod requests;
mod sequence;
mod victim;

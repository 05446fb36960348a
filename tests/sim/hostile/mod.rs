//! Hostile input from the peer or any other sender.
//!
//! - [`requests`]: requests that a verbs program can post and its peer must refuse, observed at
//!   both ends.
//! - [`sequence`]: packets that no requester may send.
//! - [`datagrams`]: a million random datagrams.

mod datagrams;
mod requests;
mod sequence;
mod victim;

//! Latency tests: one message in flight at a time.
//!
//! Write and send are a ping-pong ([`pingpong`]): the server answers the client's message with one
//! of the same size, and the result is half of the round trip between two sends of the client. Read
//! and atomic are timed from the post to the completion ([`single`]); the server is passive, as in
//! `bw`.

pub(crate) mod pingpong;
pub(crate) mod single;

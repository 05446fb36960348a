//! Latency tests: one message in flight at a time.
//!
//! Write and send are a ping-pong ([`pingpong`]), whose result is half of the round trip. Read and
//! atomic are timed from the post to the completion ([`single`]); their server is passive.

pub(crate) mod pingpong;
pub(crate) mod single;

//! Latency: one message on its way at a time.
//!
//! Write and send are a ping-pong of equals ([`pingpong`]): the client's message makes the server answer with one of the same size, and half of
//! the time between two sends of the client is the figure. Read and atomic are timed from the post to the completion ([`single`]); the server
//! only lends memory, as in `bw`.

pub(crate) mod pingpong;
pub(crate) mod single;

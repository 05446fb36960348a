//! The loops of every test, under the native commands and the classic names.
//!
//! [`setup`] creates the queue pairs of a [`test_end`] and connects them, also by the connection
//! manager ([`cm`]); a [`requester`] is an operation on one of them.
//! [`bw`] is the loop of bandwidth tests; [`lat`] that of latency tests, over one end of a
//! [`pingpong`] or over [`one_sided`] requests, with [`samples`]. What an end does between tests
//! (control protocol, output) is its caller's.

pub(crate) mod bw;
pub(crate) mod cm;
pub(crate) mod gpu;
pub(crate) mod lat;
pub(crate) mod message;
pub(crate) mod one_sided;
pub(crate) mod pattern;
pub(crate) mod pingpong;
pub(crate) mod receiver;
pub(crate) mod requester;
pub(crate) mod samples;
pub(crate) mod setup;
pub(crate) mod test_end;
pub(crate) mod transport;

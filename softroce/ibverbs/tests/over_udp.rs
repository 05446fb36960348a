//! The tests of `api` again, with everything over UDP, as between hosts. There the two ends of a
//! test, which are on one host, have ways of their own.

#[path = "api/main.rs"]
mod api;

pub(crate) use api::{common, setup};

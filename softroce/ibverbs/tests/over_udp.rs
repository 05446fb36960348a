//! The tests of `api` over UDP only, as between hosts; there, both ends use the shm link.

#[path = "api/main.rs"]
mod api;

pub(crate) use api::{common, setup};

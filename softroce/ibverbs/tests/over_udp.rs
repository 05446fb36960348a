//! The tests of `api` over UDP only, as between hosts. There, both ends of a test are on one host
//! and use the shm link.

#[path = "api/main.rs"]
mod api;

pub(crate) use api::{common, setup};

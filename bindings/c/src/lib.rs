//! The C library `libdoorbell`, whose header is `doorbell.h`: devices by one string, connections by
//! one call, communicators on host memory, and why something failed. Verbs themselves have a C ABI
//! already, libibverbs', which Doorbell's drop-in library serves.
//!
//! Each function checks its arguments, calls the safe API and turns its error into a status and a
//! text ([`status`]); no panic leaves it. `tests/header.rs` makes the header of these sources.

// Of C: types, values and functions have the names that they have in the header.
#![allow(non_camel_case_types)]
#![allow(
    clippy::missing_safety_doc,
    reason = "what C promises of all arguments is at the top of the header, cbindgen.toml"
)]

mod argument;
pub mod communicator;
pub mod connection;
pub mod device;
mod elements;
pub mod memory;
pub mod status;

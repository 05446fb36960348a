//! The libibverbs ABI as a value.
//!
//! [`Api`] is a table of the library's functions, filled from the system's `libibverbs.so.1` by
//! [`Api::load`], or supplied by the userspace device. The data path (post, poll, arm) goes through
//! the function pointers of [`ibv_context`], by the functions of [`inline`].
//!
//! The types of `<infiniband/verbs.h>` (rdma-core 44), generated; `tests/abi` compares them with C.
//!
//! FFI only: safe wrappers are in `doorbell-verbs`.

mod api;
// Generated: its names are C's, and its items are documented by the man pages.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all
)]
mod bindings;
pub mod inline;
pub mod rdmacm;
pub mod work_requests;

/// The vendor of the userspace device, as an OUI: locally administered (IEEE 802, 8.4).
pub const SOFT_VENDOR_ID: u32 = 0x02_db00;

pub use api::{Api, LoadError, Promise};
pub use bindings::*;

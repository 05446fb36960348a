//! The committed bindings of verbs-sys against independent sources: the C compiler with rdma-core's
//! own headers, the system's library, and (feature `rdma-sys`) bindings that another crate
//! generates. And the inline functions of those headers against the soft device.
//!
//! A check that cannot run here is reported and skipped; under `CI=true`, where it can be
//! installed, it is a failure.

mod headers;
mod inlines;
mod layout;
#[cfg(feature = "rdma-sys")]
mod rdma_sys;
mod symbols;

/// Reports why a check cannot run here.
///
/// # Panics
/// Under `CI=true`.
fn missing(what: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "missing under CI: {what}");
    eprintln!("skipped: {what}");
}

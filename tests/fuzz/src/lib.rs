//! Fuzz targets: what a peer, another process of the host or a file can say, against the code that
//! reads it.
//!
//! A target is a function from bytes to nothing that panics on a defect. `cargo xtask fuzz` runs
//! them coverage-guided (`fuzz_targets/`, decision 075); `tests/corpus.rs` replays their corpora in
//! plain tests.

mod connection_manager;
mod endpoint;
#[path = "../../../softroce/proto/tests/util/memory.rs"]
mod memory;
mod parsers;
mod shared_tables;
mod shm_ring;
mod verbs;

pub use connection_manager::connection_manager;
pub use endpoint::endpoint;
pub use parsers::{bootstrap, classic, plan, result};
pub use shared_tables::shared_tables;
pub use shm_ring::shm_ring;
pub use verbs::verbs;

/// A target.
pub type Target = fn(&[u8]);

/// Every target, with the name of its program and of its corpus.
pub const TARGETS: [(&str, Target); 9] = [
    ("endpoint", endpoint),
    ("connection_manager", connection_manager),
    ("shm_ring", shm_ring),
    ("shared_tables", shared_tables),
    ("bootstrap", bootstrap),
    ("classic", classic),
    ("plan", plan),
    ("result", result),
    ("verbs", verbs),
];

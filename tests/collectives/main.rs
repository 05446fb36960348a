//! Every collective by every algorithm, protocol, type and operator, among few and many ranks, with
//! counts that do not divide, compared with a naive computation. The ranks are engines of one
//! process, driven round-robin by one thread.
//!
//! `DOORBELL_COLLECTIVES_COUNTS`: counts run of each case (default 1). Samples run over UDP, also
//! with losses; `DOORBELL_COLLECTIVES_WHOLE` runs all, `DOORBELL_COLLECTIVES_RANKS` only these
//! numbers of ranks (as `8,16`).

#[path = "../../collectives/tests/executor/world.rs"]
mod world;

mod bits;
mod matrix;

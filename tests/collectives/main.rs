//! Every collective by every algorithm and protocol, of every type and operator, among few and many
//! ranks, with counts that do not divide, compared with a naive computation.
//!
//! The ranks are engines of one process, driven round-robin by one thread.
//! `DOORBELL_COLLECTIVES_COUNTS` is how many counts of each case run (default 1, a different one in
//! each case). Over UDP, and over UDP with one packet in fifty lost, samples run; with
//! `DOORBELL_COLLECTIVES_WHOLE` all, and with `DOORBELL_COLLECTIVES_RANKS` only these numbers of
//! ranks (as `8,16`).

#[path = "../../collectives/tests/executor/world.rs"]
mod world;

mod bits;
mod matrix;

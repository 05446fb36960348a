//! Collectives, all of them: every collective by every algorithm and protocol, of every type and operator, among few and many ranks, with counts that do not divide, against what they give by the simplest computation.
//!
//! The ranks are engines of one process, driven in turn by one thread. `DOORBELL_COLLECTIVES_COUNTS` is how many counts of each case are run (default 1, another in each case). Over UDP, and over UDP with one packet in fifty lost,
//! samples are run; with `DOORBELL_COLLECTIVES_WHOLE` all, and with `DOORBELL_COLLECTIVES_RANKS` among so many ranks alone (as `8,16`).

#[path = "../../collectives/tests/executor/world.rs"]
mod world;

mod bits;
mod matrix;

//! The unsafe edge of the `doorbell` command, which forbids `unsafe` itself: measurements of the
//! machine's limits, and children that are killed with their parent.

pub mod limits;
pub mod orphan;

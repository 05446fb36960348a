//! Queue pairs.

mod attributes;

pub use attributes::{Attributes, Modify, ModifyError, Path, QpInit, RemoteAccess, State, ack_timeout};

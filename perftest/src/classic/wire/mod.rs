//! The wire protocol of the C tools: what the two ends of a test exchange over the control
//! connection.
//!
//! Both ends send the same messages in the same order, the client first. `message` is the short
//! ones, `qp_info` the longest; `control_connection` exchanges them over TCP (`connect`) or over a
//! queue pair (`qp_channel`, `cm`). docs/CLASSIC.md is the reference.

mod cm;
mod connect;
mod control_connection;
pub(crate) mod fuzzing;
mod message;
mod qp_channel;
mod qp_info;

pub(crate) use cm::{accept_by_cm, connect_by_cm};
pub(crate) use connect::{accept, connect, listen, listening_address};
pub(crate) use control_connection::{ControlConnection, PeerMonitor, REPLY_TIMEOUT};
pub(crate) use message::{BwReport, SharedParameters};
pub(crate) use qp_channel::PreparedChannel;
pub(crate) use qp_info::QpInfo;

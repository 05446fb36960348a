//! The wire protocol of the C tools: what the two ends of a test exchange over the control
//! connection.
//!
//! Both ends send the same messages in the same order, the client first, and each is answered by
//! its counterpart before the next. `message` is the short messages as bytes, `qp_info` the longest
//! of them, which describes a queue pair; `control_connection` exchanges them, and `connect` sets
//! it up over TCP. `qp_channel` carries the messages over a queue pair instead, which `cm`
//! connects. docs/CLASSIC.md is the reference.

mod cm;
mod connect;
mod control_connection;
mod message;
mod qp_channel;
mod qp_info;

pub(crate) use cm::{CmEndpoint, PendingConnection};
pub(crate) use connect::{Listener, connect};
pub(crate) use control_connection::{ControlConnection, PeerMonitor, REPLY_TIMEOUT};
pub(crate) use message::{BwReport, SharedParameters};
pub(crate) use qp_channel::QpChannel;
pub(crate) use qp_info::QpInfo;

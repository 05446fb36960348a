//! The wire protocol of the C tools: what the two ends of a test exchange over the control
//! connection.
//!
//! Both ends send the same messages in the same order, the client first, and each is answered by
//! its counterpart before the next. `message` is the short messages as bytes, `qp_info` the longest
//! of them, which describes a queue pair; `control_connection` exchanges them, and `connect` sets
//! it up over TCP. `qp_channel` carries the messages over a queue pair instead, which `cm`
//! connects. docs/CLASSIC.md is the reference.

mod connect;
mod conversation;
mod key;
mod line;
mod managed;
mod message;

pub(crate) use connect::{Listener, connect};
pub(crate) use conversation::{ANSWER, Conversation, Watch};
pub(crate) use key::Key;
pub(crate) use line::Line;
pub(crate) use managed::{Half, Managed};
pub(crate) use message::{Figures, Greeting};

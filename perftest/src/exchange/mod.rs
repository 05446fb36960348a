//! The control protocol of a test, over TCP.
//!
//! # Format
//! Each side first sends the 8 bytes `DOORBELL`, then [frames](doorbell_rendezvous::frame), each
//! one JSON object, a [`Message`]. The client sends first:
//!
//! | client | server | |
//! |---|---|---|
//! | `hello` | `hello` | protocol version, program version |
//! | `plan` | `accepted` | the test parameters; the server names its device, or answers `failed` |
//! | `setup` | `setup` | per size: the queue pairs' endpoints and memory keys |
//! | `ready` | `ready` | every queue pair is connected, every receive posted |
//! | `finish` | `outcome` | messages sent per queue pair; the server has received, and with `--verify` checked, them all; where both ends send, each sends both |
//! | `bye` | | after the last size |
//!
//! Either side may send `failed` with a reason at any time, and then closes.
//!
//! A server reads up to the plan from many connections at once, and serves the first whose plan it
//! accepts. A frame is at most 1 MiB, every awaited message has a deadline, and
//! what a peer sends is validated before it is used: an unauthenticated peer can end a test, never
//! crash it or make it allocate without bounds. TCP keepalive detects a host that vanishes.

mod control;
mod handshake;
mod message;
pub(crate) mod tcp;

pub(crate) use control::{Control, Listener, REPLY_TIMEOUT, connect};
pub(crate) use handshake::{ExpectedTest, introduce};
pub(crate) use message::{Accepted, Finish, GpuEnd, Hello, Message, Outcome, QpSetup, Setup};

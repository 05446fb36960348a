//! How the two ends of a test agree, meet and part, over TCP.
//!
//! # Format
//! Each side first sends the 8 bytes `DOORBELL`, then frames: a 32-bit big-endian length and so many bytes of one JSON object, a
//! [`Message`]. The client speaks first:
//!
//! | client | server | |
//! |---|---|---|
//! | `hello` | `hello` | protocol version, program version |
//! | `plan` | `accepted` | the whole test; the server names its device, or answers `failed` |
//! | `setup` | `setup` | per size: where the queue pairs are and the keys of memory |
//! | `ready` | `ready` | every queue pair is connected, every receive posted |
//! | `finish` | `outcome` | messages sent per queue pair; the server has seen, and if asked checked, them all |
//! | `bye` | | after the last size |
//!
//! Either side may send `failed` with a reason at any time, and then closes.
//!
//! A frame is at most [`frame::LIMIT`] bytes, every awaited message has a deadline, and what a peer sends is judged before it is used: a
//! stranger can end a test, never crash it or make it allocate without bounds. A host that vanishes is noticed through TCP keepalive.

mod control;
pub(crate) mod frame;
mod message;

pub(crate) use control::{ANSWER, Control, Listener, connect};
pub(crate) use message::{Accepted, Finish, GpuEnd, Hello, Lane, Message, Outcome, Setup, check_hello};

//! The C tools' conversation: what the two ends of a test tell each other over TCP.
//!
//! Both ends send the same messages in the same order, each answered by its like before the next: the client writes first. `message` is the messages as bytes, with no socket about them; `key` the
//! longest of them, which describes one end's queue pair; `conversation` takes turns over a connection, and `connect` makes that. `line` has messages go over a queue pair instead, which `managed` gets
//! from the connection manager. docs/CLASSIC.md has the whole of it as a reference.

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

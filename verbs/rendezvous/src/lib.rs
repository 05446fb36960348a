//! How processes meet before they have queue pairs: connections with deadlines, frames, and
//! authentication by a secret. The exchange of `doorbell-verbs`, the symmetric heap, the test
//! server of the command and the bootstrap of collectives are protocols over it.
//!
//! - [`connect`] retries while nothing listens; an [`Acceptor`] takes many connections through
//!   their handshakes at once, so that none that is silent delays another.
//! - [`Limited`] reads and writes up to a [`Deadline`], whatever the peer sends; [`frame`] gives a
//!   stream its messages, whose length is bounded before memory is taken.
//! - A [`HelloListener`] and [`Connection::greet`] are the two ends of a handshake in which both
//!   prove a [`Secret`]; each later frame of the [`Connection`] carries its MAC.
//!
//! Nothing here chooses an address to listen on: the caller does.
#![cfg_attr(not(test), forbid(unsafe_code))]

mod acceptor;
mod auth;
mod connect;
mod connection;
mod deadline;
pub mod frame;
mod hello;
mod limited;
mod secret;

pub use acceptor::{Acceptor, Arrival, Limits, accept};
pub use auth::{Forged, FrameMac, NONCE, Nonce, TAG};
pub use connect::{connect, set_keepalive};
pub use connection::{Connection, Protocol, ReceiveError};
pub use deadline::{Deadline, readable};
pub use hello::{Hello, HelloListener};
pub use limited::{Limited, describe};
pub use secret::{Secret, SecretError, random};

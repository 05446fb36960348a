//! Bandwidth tests: as many messages in flight as the window allows.
//!
//! All operations share the client's loop ([`bw_loop`]); each has a [`bw_loop::BwRequester`]:
//! [`write_send`], [`read`], [`atomic`]. The server is passive where the operation allows it
//! ([`passive`]), reposts receives for send ([`receive`]), and checks every message of a verified
//! write ([`verify`]).

pub(crate) mod atomic;
pub(crate) mod bw_loop;
mod credit;
pub(crate) mod passive;
pub(crate) mod read;
pub(crate) mod receive;
pub(crate) mod verify;
pub(crate) mod write_send;

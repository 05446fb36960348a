//! Bandwidth tests: as many messages in flight as the window allows.
//!
//! All operations share the client's loop ([`bw_loop`]); [`client`] has its memory. The server is
//! passive where the operation allows it ([`passive`]), reposts receives for send ([`receive`]),
//! and checks every message of a verified write ([`verify`]).

pub(crate) mod bw_loop;
pub(crate) mod client;
mod credit;
pub(crate) mod passive;
pub(crate) mod receive;
pub(crate) mod verify;

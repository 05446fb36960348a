//! Bandwidth tests: as many messages in flight as the window allows.
//!
//! All operations and both ends share one loop ([`bw_loop`]). An end that sends, reads or does
//! atomics has the memory of [`client`]; the other is passive where the operation allows it
//! ([`passive`]), reposts receives for send ([`receive`]), and checks every message of a verified
//! write ([`verify`]). An end of a bidirectional test has both ([`memory`]).

pub(crate) mod bw_loop;
pub(crate) mod client;
pub(crate) mod credit;
pub(crate) mod memory;
pub(crate) mod passive;
pub(crate) mod receive;
pub(crate) mod verify;

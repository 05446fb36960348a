//! Bandwidth: as many messages in flight as the window allows.
//!
//! The client's loop is one for all operations ([`stream`]); what differs is a [`stream::Flow`]: [`push`] for write and send, [`pull`] for
//! read, [`atomic`]. The server is passive where the operation lets it be ([`passive`]), receives and posts again for send ([`receive`]),
//! and looks at every message in a verified write ([`inspect`]).

pub(crate) mod atomic;
mod credit;
pub(crate) mod inspect;
pub(crate) mod passive;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod receive;
pub(crate) mod stream;

//! Which of the processes at an address a message is for, told by its bytes alone.

use super::message::Message;
use super::{ID_BITS, Mad, ServiceId};

/// Whom a message is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// Whoever listens at this service. Who gets a request for one that nobody offers refuses it.
    Service(ServiceId),
    /// The process with this slot, as it is in communication ids.
    Slot(u16),
}

/// Whom a management datagram is for; `None` when it is none of this class.
pub fn route(mad: &Mad) -> Option<Route> {
    let (_, message) = Message::parse(mad)?;
    let id = match message {
        Message::Req(req) => return Some(Route::Service(req.service)),
        Message::SidrReq(req) => return Some(Route::Service(req.service)),
        Message::Mra(mra) => mra.remote_id,
        Message::Rej(rej) => rej.remote_id,
        Message::Rep(rep) => rep.remote_id,
        Message::Rtu(ids_only) | Message::Drep(ids_only) => ids_only.remote_id,
        Message::Dreq(dreq) => dreq.remote_id,
        Message::SidrRep(rep) => rep.request_id,
        Message::Lap(lap) => lap.remote_id,
        Message::Apr(apr) => apr.remote_id,
    };
    // 10 bits.
    Some(Route::Slot((id >> ID_BITS) as u16))
}

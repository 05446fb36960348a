//! Resolves the process of a shared address that a message is for, by its bytes alone.

use super::message::Message;
use super::{ID_BITS, Mad, ServiceId};

/// The process that a message is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The one that listens for this service; one without a listener rejects the request.
    Service(ServiceId),
    /// The one with this slot, from the communication id.
    Slot(u16),
}

/// The destination of a management datagram; `None` when it is not of this class.
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

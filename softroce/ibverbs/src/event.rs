//! Asynchronous events: ibv_get_async_event(3).

use core::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;

use doorbell_softroce::{Event, PortEvent, QpEvent, Token};
use doorbell_verbs_sys::{
    IBV_EVENT_COMM_EST, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_LAST_WQE_REACHED,
    IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SQ_DRAINED, IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED, ibv_async_event,
    ibv_async_event_element, ibv_context, ibv_event_type,
};

use crate::completion::SoftCq;
use crate::context::{Context, acknowledge};
use crate::errno;
use crate::query::PORT;
use crate::queue_pair::SoftQp;
use crate::shared_receive::SoftSrq;

/// The token of an object in its events: its address.
pub(crate) fn token_of<T>(object: *mut T) -> Token {
    object.expose_provenance() as Token
}

/// The object with a token of this process, as itself or as its first field.
pub(crate) fn from_token<T>(token: Token) -> *mut T {
    ptr::with_exposed_provenance_mut(token as usize)
}

pub(crate) unsafe extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    // SAFETY: `context` is live by contract.
    let context = unsafe { Context::from_ptr(context) };
    let count = |event: &Event| {
        // SAFETY: an event's object is live: destroying it removes its events first, which is
        // excluded while this runs.
        let events = unsafe {
            match *event {
                Event::CqOverrun(token) => &(*from_token::<SoftCq>(token)).async_events,
                Event::Qp(token, _) => &(*from_token::<SoftQp>(token)).async_events,
                Event::SrqLimit(token) => &(*from_token::<SoftSrq>(token)).async_events,
                Event::Port(_) | Event::DeviceFatal => return,
            }
        };
        events.fetch_add(1, Ordering::Relaxed);
    };
    match context.events.wait(count) {
        Ok(taken) => {
            // SAFETY: writable by contract (man page).
            unsafe { event.write(to_event(taken)) };
            0
        }
        Err(error) => errno::minus_one(errno::of(&error)),
    }
}

fn to_event(event: Event) -> ibv_async_event {
    match event {
        Event::CqOverrun(token) => ibv_async_event {
            element: ibv_async_event_element { cq: from_token(token) },
            event_type: IBV_EVENT_CQ_ERR,
        },
        Event::Qp(token, what) => ibv_async_event {
            element: ibv_async_event_element { qp: from_token(token) },
            event_type: match what {
                QpEvent::Fatal => IBV_EVENT_QP_FATAL,
                QpEvent::RequestError => IBV_EVENT_QP_REQ_ERR,
                QpEvent::AccessError => IBV_EVENT_QP_ACCESS_ERR,
                QpEvent::CommunicationEstablished => IBV_EVENT_COMM_EST,
                QpEvent::SendQueueDrained => IBV_EVENT_SQ_DRAINED,
                QpEvent::LastWqeReached => IBV_EVENT_QP_LAST_WQE_REACHED,
            },
        },
        Event::SrqLimit(token) => ibv_async_event {
            element: ibv_async_event_element { srq: from_token(token) },
            event_type: IBV_EVENT_SRQ_LIMIT_REACHED,
        },
        Event::Port(what) => of_port(match what {
            PortEvent::Active => IBV_EVENT_PORT_ACTIVE,
            PortEvent::Error => IBV_EVENT_PORT_ERR,
            PortEvent::GidChange => IBV_EVENT_GID_CHANGE,
        }),
        Event::DeviceFatal => of_port(IBV_EVENT_DEVICE_FATAL),
    }
}

fn of_port(event_type: ibv_event_type) -> ibv_async_event {
    ibv_async_event {
        element: ibv_async_event_element {
            port_num: c_int::from(PORT),
        },
        event_type,
    }
}

pub(crate) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event that `get_async_event` filled: its type determines the element, and that
    // object is live until this acknowledges.
    unsafe {
        match (*event).event_type {
            IBV_EVENT_CQ_ERR => {
                let cq = (*event).element.cq;
                let (mutex, cond) = (&raw mut (*cq).mutex, &raw mut (*cq).cond);
                acknowledge(mutex, cond, &raw mut (*cq).async_events_completed, 1);
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                let qp = (*event).element.qp;
                let (mutex, cond) = (&raw mut (*qp).mutex, &raw mut (*qp).cond);
                acknowledge(mutex, cond, &raw mut (*qp).events_completed, 1);
            }
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                let srq = (*event).element.srq;
                let (mutex, cond) = (&raw mut (*srq).mutex, &raw mut (*srq).cond);
                acknowledge(mutex, cond, &raw mut (*srq).events_completed, 1);
            }
            _ => {}
        }
    }
}

//! The transport services as types: which requests a queue pair takes is known to the compiler (IBTA vol 1, 9.7.1 and table 39: READ and atomics need RC, WRITE
//! needs a connection, UD has SEND alone).

use core::fmt::Debug;

use doorbell_verbs_sys as sys;

use super::endpoint::Endpoint;
use crate::types::Mtu;

/// The transport service of a queue pair: [`Rc`], [`Uc`] or [`Ud`].
pub trait Transport: sealed::Service {}

/// Transports that have one peer, to which all requests go: [`Rc`] and [`Uc`].
pub trait Connected: Transport + sealed::Service<Link = Link> {}

/// Transports on which the peer answers, so that READ and atomics are possible: [`Rc`].
pub trait Reliable: Connected {}

/// Reliable connection: every request arrives, once and in order, or completes in error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rc;

/// Unreliable connection: SENDs and WRITEs to one peer; a message of which a packet is lost is dropped whole, and nobody is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uc;

/// Unreliable datagram: SENDs of one packet each, to any peer of which there is an address handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ud;

/// What a connected queue pair knows of its connection.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    pub(crate) peer: Endpoint,
    pub(crate) mtu: Mtu,
}

pub(crate) mod sealed {
    use super::{Debug, sys};

    pub trait Service: Send + Sync + 'static {
        /// What ibv_create_qp(3) calls it.
        const TYPE: sys::ibv_qp_type;
        /// What a queue pair in use knows of whom it talks to.
        type Link: Debug + Send + Sync;
    }
}

impl sealed::Service for Rc {
    const TYPE: sys::ibv_qp_type = sys::IBV_QPT_RC;
    type Link = Link;
}

impl sealed::Service for Uc {
    const TYPE: sys::ibv_qp_type = sys::IBV_QPT_UC;
    type Link = Link;
}

impl sealed::Service for Ud {
    const TYPE: sys::ibv_qp_type = sys::IBV_QPT_UD;
    type Link = ();
}

impl Transport for Rc {}
impl Transport for Uc {}
impl Transport for Ud {}
impl Connected for Rc {}
impl Connected for Uc {}
impl Reliable for Rc {}

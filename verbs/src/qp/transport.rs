//! The transport services as types, with their operations (IBTA vol 1, 9.7.1 and table 39).

use core::fmt::{self, Debug};
use core::marker::PhantomData;

use doorbell_verbs_sys as sys;

use super::endpoint::{Endpoint, UdEndpoint};
use crate::types::{Gid, Lid, Mtu, QKey};

/// The transport service of a queue pair, as a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "ibv_qp_type")]
pub enum TransportKind {
    /// Reliable connection: see [`ReliableConnection`].
    #[doc(alias = "IBV_QPT_RC")]
    Rc,
    /// Unreliable connection: see [`UnreliableConnection`].
    #[doc(alias = "IBV_QPT_UC")]
    Uc,
    /// Unreliable datagram: see [`UnreliableDatagram`].
    #[doc(alias = "IBV_QPT_UD")]
    Ud,
}

impl TransportKind {
    pub(crate) fn to_sys(self) -> sys::ibv_qp_type {
        match self {
            Self::Rc => sys::IBV_QPT_RC,
            Self::Uc => sys::IBV_QPT_UC,
            Self::Ud => sys::IBV_QPT_UD,
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
        })
    }
}

/// The transport service of a queue pair, as a type.
pub trait Transport: sealed::Service {}

/// Transports with one peer, to which all requests go.
pub trait Connected: Transport + sealed::Service<Link = Link> {}

/// Transports with acknowledgements, hence READ and atomics: [`ReliableConnection`].
pub trait Reliable: Connected {}

/// Transports without a connection, where each request names its destination.
pub trait Connectionless: Transport + sealed::Service<Link = UdEndpoint> {}

/// Queue pairs with a receive queue of their own: all but those of [`WithSrq`] and [`SendHalf`].
pub trait HasReceiveQueue: Transport {}

/// `T` with a [`SharedReceiveQueue`](crate::SharedReceiveQueue) instead of a receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "ibv_srq")]
pub struct WithSrq<T>(PhantomData<T>);

/// `T`, with its receive queue in a [`ReceiveHalf`](crate::ReceiveHalf): the transport of the send
/// half of a queue pair that was [`split`](crate::QueuePair::split).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendHalf<T>(PhantomData<T>);

/// Reliable connection (RC): every request arrives, once and in order, or fails (IBTA vol 1, 9.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("IBV_QPT_RC", "RC"))]
pub struct ReliableConnection;

/// Unreliable connection (UC): SENDs and WRITEs; a loss drops the message (IBTA vol 1, 9.8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("IBV_QPT_UC", "UC"))]
pub struct UnreliableConnection;

/// Unreliable datagram (UD): SENDs of one packet, to any address handle (IBTA vol 1, 9.8.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("IBV_QPT_UD", "UD"))]
pub struct UnreliableDatagram;

/// The connection of a connected queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    pub(crate) peer: Endpoint,
    pub(crate) mtu: Mtu,
}

impl Link {
    fn apply(&mut self, attr: &sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) {
        if mask & sys::IBV_QP_AV != 0 {
            self.peer.gid = Gid::from_sys(&attr.ah_attr.grh.dgid);
            self.peer.lid = Lid(attr.ah_attr.dlid);
        }
    }
}

/// The bytes before every received datagram: its global route header (GRH), or space for one (IBTA
/// vol 1, 11.4.1.2). A receive needs as many more than the longest message.
#[doc(alias = "ibv_grh")]
pub const GRH_BYTES: usize = 40;

pub(crate) mod sealed {
    use super::{Debug, TransportKind, sys};

    pub trait Service: Send + Sync + 'static {
        const KIND: TransportKind;
        /// Bytes that a receive needs besides the message.
        const HEADROOM: u64 = 0;
        /// The remote end of a queue pair in use; for UD its own address.
        type Link: Debug + Send + Sync;
        fn apply(link: &mut Self::Link, attr: &sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask);
    }
}

impl sealed::Service for ReliableConnection {
    const KIND: TransportKind = TransportKind::Rc;
    type Link = Link;

    fn apply(link: &mut Link, attr: &sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) {
        link.apply(attr, mask);
    }
}

impl sealed::Service for UnreliableConnection {
    const KIND: TransportKind = TransportKind::Uc;
    type Link = Link;

    fn apply(link: &mut Link, attr: &sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) {
        link.apply(attr, mask);
    }
}

impl sealed::Service for UnreliableDatagram {
    const KIND: TransportKind = TransportKind::Ud;
    const HEADROOM: u64 = GRH_BYTES as u64;
    type Link = UdEndpoint;

    fn apply(own: &mut UdEndpoint, attr: &sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) {
        if mask & sys::IBV_QP_QKEY != 0 {
            own.qkey = QKey(attr.qkey);
        }
    }
}

/// Transports without a receive queue, otherwise as another.
macro_rules! without_receive_queue {
    ($($name:ident),+) => { $(
        impl<T: Transport> sealed::Service for $name<T> {
            const KIND: TransportKind = T::KIND;
            const HEADROOM: u64 = T::HEADROOM;
            type Link = T::Link;

            fn apply(link: &mut T::Link, attr: &sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) {
                T::apply(link, attr, mask);
            }
        }

        impl<T: Transport> Transport for $name<T> {}
        impl<T: Connected> Connected for $name<T> {}
        impl<T: Reliable> Reliable for $name<T> {}
        impl<T: Connectionless> Connectionless for $name<T> {}
    )+ };
}

without_receive_queue!(WithSrq, SendHalf);

impl Transport for ReliableConnection {}
impl Transport for UnreliableConnection {}
impl Transport for UnreliableDatagram {}
impl Connected for ReliableConnection {}
impl Connected for UnreliableConnection {}
impl Reliable for ReliableConnection {}
impl Connectionless for UnreliableDatagram {}
impl HasReceiveQueue for ReliableConnection {}
impl HasReceiveQueue for UnreliableConnection {}
impl HasReceiveQueue for UnreliableDatagram {}

//! What differs between transports, and between queue pairs with and without a shared receive
//! queue.

use std::fmt::Debug;

use doorbell_verbs::cm::Connection;
use doorbell_verbs::{
    AddressHandle, AddressHandleBuilder, Batch, Endpoint, PreparedQueuePair, Psn, QKey, Qpn, QueuePair,
    QueuePairBuilder, QueuePairError, Rc, Refused, SharedReceive, SharedReceiveQueue, Sink, Source, Transport, Uc, Ud,
    UdEndpoint,
};

use super::super::wire::Half;

/// A transport that a test can run on.
pub(crate) trait Service: Transport + Sized {
    /// Bytes before every received message: the GRH of UD.
    const HEADER: u64 = 0;
    /// A queue pair whose peer is not known yet.
    type Prepared: Debug;
    /// The destination of a SEND, on an unconnected transport.
    type To: Debug;

    /// Creates a queue pair.
    ///
    /// # Errors
    /// When the device refuses.
    fn prepare(
        builder: QueuePairBuilder<'_>,
        shared: Option<&SharedReceiveQueue>,
    ) -> Result<Self::Prepared, QueuePairError>;

    /// The endpoint to send to the peer.
    fn endpoint(prepared: &Self::Prepared) -> Endpoint;

    /// Connects it, or creates its address handle (UD).
    ///
    /// # Errors
    /// As text, when the device refuses.
    fn connect(
        prepared: Self::Prepared,
        peer: &Endpoint,
        route: AddressHandleBuilder<'_>,
    ) -> Result<(QueuePair<Self>, Self::To), String>;

    /// Connects it by the connection manager.
    ///
    /// # Errors
    /// As text, when the peer does not take part, the device refuses, or the manager does not
    /// connect this transport.
    fn join(prepared: Self::Prepared, half: Half) -> Result<(QueuePair<Self>, Self::To, Connection), String>;

    /// Adds a SEND to a post list.
    fn send<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d Self::To, message: impl Source, signal: bool);

    /// Adds an inline SEND.
    fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d Self::To, message: &'d [u8], signal: bool);

    /// Posts receives with one call, to the queue pair or to its shared receive queue.
    ///
    /// # Errors
    /// When they are refused.
    fn receive<S: Sink>(
        qp: &mut QueuePair<Self>,
        shared: Option<&mut SharedReceiveQueue>,
        buffers: impl Iterator<Item = S>,
    ) -> Result<(), Refused>;
}

/// The destination of datagrams.
#[derive(Debug)]
pub(crate) struct Far {
    ah: AddressHandle,
    qpn: Qpn,
}

macro_rules! sends {
    (connected) => {
        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: impl Source, signal: bool) {
            batch.send(message).signalled_if(signal);
        }

        fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: &'d [u8], signal: bool) {
            batch.send_inline(message).signalled_if(signal);
        }

        fn endpoint(prepared: &Self::Prepared) -> Endpoint {
            prepared.endpoint()
        }

        fn connect(
            prepared: Self::Prepared,
            peer: &Endpoint,
            _: AddressHandleBuilder<'_>,
        ) -> Result<(QueuePair<Self>, ()), String> {
            prepared
                .connect(peer)
                .map(|qp| (qp, ()))
                .map_err(|e| e.to_string())
        }
    };
    (datagrams) => {
        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d Far, message: impl Source, signal: bool) {
            batch
                .send_to(message, &to.ah, to.qpn, QKey::DEFAULT)
                .signalled_if(signal);
        }

        fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d Far, message: &'d [u8], signal: bool) {
            batch
                .send_to_inline(message, &to.ah, to.qpn, QKey::DEFAULT)
                .signalled_if(signal);
        }

        /// Datagrams have no PSN to agree on, so 0 is sent.
        fn endpoint(prepared: &Self::Prepared) -> Endpoint {
            let own = prepared.endpoint();
            Endpoint {
                gid: own.gid,
                lid: own.lid,
                qpn: own.qpn,
                psn: Psn::truncated(0),
                mtu: own.mtu,
                rd_atomic: 0,
            }
        }

        fn connect(
            prepared: Self::Prepared,
            peer: &Endpoint,
            route: AddressHandleBuilder<'_>,
        ) -> Result<(QueuePair<Self>, Far), String> {
            let to = UdEndpoint {
                gid: peer.gid,
                lid: peer.lid,
                qpn: peer.qpn,
                qkey: QKey::DEFAULT,
                mtu: peer.mtu,
            };
            let ah = route.to(&to).map_err(|e| e.to_string())?;
            Ok((prepared, Far { ah, qpn: peer.qpn }))
        }
    };
}

macro_rules! joins {
    (reliable) => {
        fn join(prepared: Self::Prepared, half: Half) -> Result<(QueuePair<Self>, (), Connection), String> {
            let (qp, connection) = half.connect(prepared).map_err(|e| e.to_string())?;
            Ok((qp, (), connection))
        }
    };
    (unreliable) => {
        fn join(_: Self::Prepared, _: Half) -> Result<(QueuePair<Self>, Self::To, Connection), String> {
            Err("the connection manager connects reliable queue pairs alone: leave -R out".to_owned())
        }
    };
}

macro_rules! receives {
    (own) => {
        fn receive<S: Sink>(
            qp: &mut QueuePair<Self>,
            _: Option<&mut SharedReceiveQueue>,
            buffers: impl Iterator<Item = S>,
        ) -> Result<(), Refused> {
            qp.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer)))
        }
    };
    (shared) => {
        fn receive<S: Sink>(
            _: &mut QueuePair<Self>,
            shared: Option<&mut SharedReceiveQueue>,
            buffers: impl Iterator<Item = S>,
        ) -> Result<(), Refused> {
            match shared {
                Some(queue) => queue.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer))),
                None => Ok(()),
            }
        }
    };
}

macro_rules! service {
    ($transport:ty, $header:expr, $prepared:ty, $to:ty, $sends:tt, $joins:tt, $receives:tt, |$builder:ident, $shared:ident| $make:expr) => {
        impl Service for $transport {
            const HEADER: u64 = $header;
            type Prepared = $prepared;
            type To = $to;

            fn prepare(
                $builder: QueuePairBuilder<'_>,
                $shared: Option<&SharedReceiveQueue>,
            ) -> Result<Self::Prepared, QueuePairError> {
                $make
            }

            sends!($sends);
            joins!($joins);
            receives!($receives);
        }
    };
}

/// The shared receive queue, which exists wherever a transport that shares one is used.
fn of(shared: Option<&SharedReceiveQueue>) -> Result<&SharedReceiveQueue, QueuePairError> {
    shared.ok_or(QueuePairError::ForeignSharedReceiveQueue)
}

/// Length of the GRH before a datagram.
const GRH: u64 = doorbell_verbs::GRH_BYTES as u64;

service!(
    Rc,
    0,
    PreparedQueuePair<Rc>,
    (),
    connected,
    reliable,
    own,
    |builder, _shared| builder.rc()
);
service!(
    Uc,
    0,
    PreparedQueuePair<Uc>,
    (),
    connected,
    unreliable,
    own,
    |builder, _shared| builder.uc()
);
service!(
    Ud,
    GRH,
    QueuePair<Ud>,
    Far,
    datagrams,
    unreliable,
    own,
    |builder, _shared| builder.ud()
);
service!(
    SharedReceive<Rc>,
    0,
    PreparedQueuePair<SharedReceive<Rc>>,
    (),
    connected,
    reliable,
    shared,
    |builder, shared| builder.shared_receive(of(shared)?).rc()
);
service!(
    SharedReceive<Uc>,
    0,
    PreparedQueuePair<SharedReceive<Uc>>,
    (),
    connected,
    unreliable,
    shared,
    |builder, shared| builder.shared_receive(of(shared)?).uc()
);
service!(
    SharedReceive<Ud>,
    GRH,
    QueuePair<SharedReceive<Ud>>,
    Far,
    datagrams,
    unreliable,
    shared,
    |builder, shared| builder.shared_receive(of(shared)?).ud()
);

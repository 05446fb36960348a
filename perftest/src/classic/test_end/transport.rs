//! What differs between transports, and between queue pairs with and without a shared receive
//! queue.

use std::fmt::Debug;

use doorbell_verbs::cm::Connection;
use doorbell_verbs::{
    AddressHandle, AddressHandleBuilder, Batch, CompletionQueue, Connectionless, Endpoint, Gid, Lid, PostError,
    PreparedQueuePair, ProtectionDomain, Psn, QKey, Qpn, QueuePair, QueuePairBuilder, QueuePairError,
    ReliableConnection, SharedReceiveQueue, Sink, Source, Transport, UdEndpoint, UnreliableConnection,
    UnreliableDatagram, WithSrq,
};

use super::super::wire::Pending;
use super::cm_connect::QpSetup;

pub(crate) trait TestTransport: Transport + Sized {
    /// Bytes before every received message: the GRH of UD.
    const HEADER: u64 = 0;
    /// A queue pair whose peer is not known yet.
    type Prepared: Debug;
    /// The destination of a SEND, on an unconnected transport.
    type Destination: Debug;

    fn prepare(
        builder: QueuePairBuilder<'_>,
        shared: Option<&SharedReceiveQueue>,
    ) -> Result<Self::Prepared, QueuePairError>;

    fn endpoint(prepared: &Self::Prepared) -> Endpoint;

    /// Attaches it to a multicast group (UD).
    ///
    /// # Errors
    /// As text, when the device refuses, or the transport has no groups.
    fn join(prepared: &mut Self::Prepared, group: Gid) -> Result<(), String>;

    /// Connects it, or creates its address handle (UD).
    fn connect(
        prepared: Self::Prepared,
        peer: &Endpoint,
        route: AddressHandleBuilder<'_>,
    ) -> Result<(QueuePair<Self>, Self::Destination), String>;

    /// Connects it by the connection manager, or exchanges its address (UD): where both ends send,
    /// the client then announces itself, with `announces` for its completion.
    ///
    /// # Errors
    /// As text, when the peer does not take part, the device refuses, or the manager does not
    /// connect this transport.
    fn connect_by_cm(
        prepared: Self::Prepared,
        pending: Pending,
        pd: &ProtectionDomain,
        announces: Option<&mut CompletionQueue>,
    ) -> Result<(QpSetup<Self>, Option<Connection>), String>;

    fn send<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d Self::Destination, message: impl Source, signal: bool);

    fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d Self::Destination, message: &'d [u8], signal: bool);

    /// Posts receives with one call, to the queue pair or to its shared receive queue.
    fn receive<S: Sink>(
        qp: &mut QueuePair<Self>,
        shared: Option<&mut SharedReceiveQueue>,
        buffers: impl Iterator<Item = S>,
    ) -> Result<(), PostError>;
}

#[derive(Debug)]
pub(crate) struct UdDestination {
    ah: AddressHandle,
    qpn: Qpn,
    qkey: QKey,
}

/// Sends what a C tool's server awaits before it is ready, an empty datagram with the sender's
/// queue pair number, and waits until it has left. To Doorbell's server it is of no use, and finds
/// no receive there.
fn announce<T: Connectionless>(
    qp: &mut QueuePair<T>,
    cq: &mut CompletionQueue,
    to: &UdDestination,
) -> Result<(), String> {
    let qpn = qp.qpn().get();
    qp.post(|batch| {
        batch.send_to_inline(&[], &to.ah, to.qpn, to.qkey).imm(qpn).signaled();
    })
    .map_err(|e| e.to_string())?;
    loop {
        if let Some(done) = cq.poll().map_err(|e| e.to_string())?.next() {
            return done.check().map_err(|e| e.to_string());
        }
        std::hint::spin_loop();
    }
}

macro_rules! sends {
    (connected) => {
        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: impl Source, signal: bool) {
            batch.send(message).signaled_if(signal);
        }

        fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: &'d [u8], signal: bool) {
            batch.send_inline(message).signaled_if(signal);
        }

        fn endpoint(prepared: &Self::Prepared) -> Endpoint {
            prepared.endpoint()
        }

        fn join(_: &mut Self::Prepared, _: Gid) -> Result<(), String> {
            Err("only datagrams reach a group: leave -g out".to_owned())
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
        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d UdDestination, message: impl Source, signal: bool) {
            batch
                .send_to(message, &to.ah, to.qpn, to.qkey)
                .signaled_if(signal);
        }

        fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d UdDestination, message: &'d [u8], signal: bool) {
            batch
                .send_to_inline(message, &to.ah, to.qpn, to.qkey)
                .signaled_if(signal);
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
                max_dest_rd_atomic: 0,
            }
        }

        fn connect(
            prepared: Self::Prepared,
            peer: &Endpoint,
            route: AddressHandleBuilder<'_>,
        ) -> Result<(QueuePair<Self>, UdDestination), String> {
            let to = UdEndpoint {
                gid: peer.gid,
                lid: peer.lid,
                qpn: peer.qpn,
                // Both ends have the same.
                qkey: prepared.endpoint().qkey,
                mtu: peer.mtu,
            };
            let ah = route.to(&to).map_err(|e| e.to_string())?;
            let UdEndpoint { qpn, qkey, .. } = to;
            Ok((prepared, UdDestination { ah, qpn, qkey }))
        }

        fn join(prepared: &mut Self::Prepared, group: Gid) -> Result<(), String> {
            prepared
                .attach_multicast(group, Lid(0))
                .map_err(|e| e.to_string())
        }
    };
}

const OTHER_TRANSPORT: &str = "the connection manager connects queue pairs of another transport: leave -R out";

macro_rules! cm_connects {
    (reliable) => {
        fn connect_by_cm(
            prepared: Self::Prepared,
            pending: Pending,
            _: &ProtectionDomain,
            _: Option<&mut CompletionQueue>,
        ) -> Result<(QpSetup<Self>, Option<Connection>), String> {
            let Pending::Connection(pending) = pending else {
                return Err(OTHER_TRANSPORT.to_owned());
            };
            let (qp, connection) = pending.connect(prepared).map_err(|e| e.to_string())?;
            Ok((QpSetup::Connected(Box::new((qp, ()))), Some(connection)))
        }
    };
    (unreliable) => {
        fn connect_by_cm(
            _: Self::Prepared,
            _: Pending,
            _: &ProtectionDomain,
            _: Option<&mut CompletionQueue>,
        ) -> Result<(QpSetup<Self>, Option<Connection>), String> {
            Err(OTHER_TRANSPORT.to_owned())
        }
    };
    (datagrams) => {
        fn connect_by_cm(
            mut prepared: Self::Prepared,
            pending: Pending,
            pd: &ProtectionDomain,
            announces: Option<&mut CompletionQueue>,
        ) -> Result<(QpSetup<Self>, Option<Connection>), String> {
            let service = match pending {
                Pending::Service(service) => service,
                Pending::ServiceRequest(request) => {
                    request.answer(&prepared, &[]).map_err(|e| e.to_string())?;
                    // The client's address is in its QP information.
                    return Ok((QpSetup::NotConnected(prepared), None));
                }
                Pending::Connection(_) => return Err(OTHER_TRANSPORT.to_owned()),
            };
            let ah = service.address_handle(pd).map_err(|e| e.to_string())?;
            let UdEndpoint { qpn, qkey, .. } = service.endpoint();
            let to = UdDestination { ah, qpn, qkey };
            if let Some(cq) = announces {
                announce(&mut prepared, cq, &to)?;
            }
            Ok((QpSetup::Connected(Box::new((prepared, to))), None))
        }
    };
}

macro_rules! receives {
    (own) => {
        fn receive<S: Sink>(
            qp: &mut QueuePair<Self>,
            _: Option<&mut SharedReceiveQueue>,
            buffers: impl Iterator<Item = S>,
        ) -> Result<(), PostError> {
            qp.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer)))
        }
    };
    (shared) => {
        fn receive<S: Sink>(
            _: &mut QueuePair<Self>,
            shared: Option<&mut SharedReceiveQueue>,
            buffers: impl Iterator<Item = S>,
        ) -> Result<(), PostError> {
            match shared {
                Some(queue) => queue.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer))),
                None => Ok(()),
            }
        }
    };
}

macro_rules! test_transport {
    ($transport:ty, $header:expr, $prepared:ty, $destination:ty, $sends:tt, $cm_connects:tt, $receives:tt, |$builder:ident, $shared:ident| $make:expr) => {
        impl TestTransport for $transport {
            const HEADER: u64 = $header;
            type Prepared = $prepared;
            type Destination = $destination;

            fn prepare(
                $builder: QueuePairBuilder<'_>,
                $shared: Option<&SharedReceiveQueue>,
            ) -> Result<Self::Prepared, QueuePairError> {
                $make
            }

            sends!($sends);
            cm_connects!($cm_connects);
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

test_transport!(
    ReliableConnection,
    0,
    PreparedQueuePair<ReliableConnection>,
    (),
    connected,
    reliable,
    own,
    |builder, _shared| builder.rc()
);
test_transport!(
    UnreliableConnection,
    0,
    PreparedQueuePair<UnreliableConnection>,
    (),
    connected,
    unreliable,
    own,
    |builder, _shared| builder.uc()
);
test_transport!(
    UnreliableDatagram,
    GRH,
    QueuePair<UnreliableDatagram>,
    UdDestination,
    datagrams,
    datagrams,
    own,
    |builder, _shared| builder.ud()
);
test_transport!(
    WithSrq<ReliableConnection>,
    0,
    PreparedQueuePair<WithSrq<ReliableConnection>>,
    (),
    connected,
    reliable,
    shared,
    |builder, shared| builder.shared_receive_queue(of(shared)?).rc()
);
test_transport!(
    WithSrq<UnreliableConnection>,
    0,
    PreparedQueuePair<WithSrq<UnreliableConnection>>,
    (),
    connected,
    unreliable,
    shared,
    |builder, shared| builder.shared_receive_queue(of(shared)?).uc()
);
test_transport!(
    WithSrq<UnreliableDatagram>,
    GRH,
    QueuePair<WithSrq<UnreliableDatagram>>,
    UdDestination,
    datagrams,
    datagrams,
    shared,
    |builder, shared| builder.shared_receive_queue(of(shared)?).ud()
);

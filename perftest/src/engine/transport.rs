//! What differs between transports, and between queue pairs with and without a shared receive
//! queue.

use std::fmt::Debug;

use doorbell_verbs::{
    AddressHandle, AddressHandleBuilder, Batch, Endpoint, PostError, PreparedQueuePair, Psn, QKey, Qpn, QueuePair,
    QueuePairBuilder, QueuePairError, ReliableConnection, SharedReceiveQueue, Sink, Source, Transport, UdEndpoint,
    UnreliableConnection, UnreliableDatagram, WithSrq,
};

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

    /// Connects it, or creates its address handle (UD).
    fn connect(
        prepared: Self::Prepared,
        peer: &Endpoint,
        route: AddressHandleBuilder<'_>,
    ) -> Result<(QueuePair<Self>, Self::Destination), String>;

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
    pub(crate) ah: AddressHandle,
    pub(crate) qpn: Qpn,
    pub(crate) qkey: QKey,
}

macro_rules! service {
    (connected) => {
        type Prepared = PreparedQueuePair<Self>;
        type Destination = ();

        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: impl Source, signal: bool) {
            batch.send(message).signaled_if(signal);
        }

        fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: &'d [u8], signal: bool) {
            batch.send_inline(message).signaled_if(signal);
        }

        fn endpoint(prepared: &Self::Prepared) -> Endpoint {
            prepared.endpoint()
        }

        fn connect(
            prepared: Self::Prepared,
            peer: &Endpoint,
            _: AddressHandleBuilder<'_>,
        ) -> Result<(QueuePair<Self>, ()), String> {
            let qp = prepared.connect(peer).map_err(|e| e.to_string())?;
            Ok((qp, ()))
        }
    };
    (datagrams) => {
        const HEADER: u64 = doorbell_verbs::GRH_BYTES as u64;
        type Prepared = QueuePair<Self>;
        type Destination = UdDestination;

        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d UdDestination, message: impl Source, signal: bool) {
            let request = batch.send_to(message, &to.ah, to.qpn, to.qkey);
            request.signaled_if(signal);
        }

        fn send_inline<'d>(batch: &mut Batch<'_, 'd, Self>, to: &'d UdDestination, message: &'d [u8], signal: bool) {
            let request = batch.send_to_inline(message, &to.ah, to.qpn, to.qkey);
            request.signaled_if(signal);
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
    };
}

macro_rules! receives {
    (own, $make:ident) => {
        fn prepare(
            builder: QueuePairBuilder<'_>,
            _: Option<&SharedReceiveQueue>,
        ) -> Result<Self::Prepared, QueuePairError> {
            builder.$make()
        }

        fn receive<S: Sink>(
            qp: &mut QueuePair<Self>,
            _: Option<&mut SharedReceiveQueue>,
            buffers: impl Iterator<Item = S>,
        ) -> Result<(), PostError> {
            qp.post_receives(|batch| buffers.for_each(|buffer| batch.receive(buffer)))
        }
    };
    (shared, $make:ident) => {
        fn prepare(
            builder: QueuePairBuilder<'_>,
            shared: Option<&SharedReceiveQueue>,
        ) -> Result<Self::Prepared, QueuePairError> {
            // It exists wherever a transport that shares one is used.
            let shared = shared.ok_or(QueuePairError::ForeignSharedReceiveQueue)?;
            builder.shared_receive_queue(shared).$make()
        }

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
    ($transport:ty, $service:ident, $receives:ident, $make:ident) => {
        impl TestTransport for $transport {
            service!($service);
            receives!($receives, $make);
        }
    };
}

test_transport!(ReliableConnection, connected, own, rc);
test_transport!(UnreliableConnection, connected, own, uc);
test_transport!(UnreliableDatagram, datagrams, own, ud);
test_transport!(WithSrq<ReliableConnection>, connected, shared, rc);
test_transport!(WithSrq<UnreliableConnection>, connected, shared, uc);
test_transport!(WithSrq<UnreliableDatagram>, datagrams, shared, ud);

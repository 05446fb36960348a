//! What differs between transports, and between queue pairs with and without a shared receive
//! queue.

use std::fmt::Debug;

use doorbell_verbs::{
    AddressHandle, AddressHandleBuilder, Batch, Endpoint, Gid, Lid, PostError, PreparedQueuePair, ProtectionDomain,
    Psn, QKey, Qpn, QueuePair, QueuePairBuilder, QueuePairError, ReliableConnection, SharedReceiveQueue, Sink, Source,
    Transport, UdEndpoint, UnreliableConnection, UnreliableDatagram, WithSrq,
};

use super::cm::{Managed, Pending};

const OTHER_TRANSPORT: &str = "the connection manager connects no queue pairs of this transport";

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

    /// Connects it by the connection manager, or finds its peer (UD).
    ///
    /// # Errors
    /// As text, when the peer does not take part, the device refuses, or the manager does not
    /// connect this transport.
    fn connect_by_cm(_: Self::Prepared, _: Pending, _: &ProtectionDomain) -> Result<Managed<Self>, String> {
        Err(OTHER_TRANSPORT.to_owned())
    }

    /// Attaches it to a multicast group (UD).
    ///
    /// # Errors
    /// As text, when the device refuses, or the transport has no groups.
    fn join(_: &mut Self::Prepared, _: Gid) -> Result<(), String> {
        Err("only datagrams reach a group: leave -g out".to_owned())
    }

    /// Posts, where the transport names its destinations, an empty datagram with `imm`.
    fn announce(_: &mut QueuePair<Self>, _: &Self::Destination, _imm: u32) -> Result<(), PostError> {
        Ok(())
    }

    fn send<'d>(
        batch: &mut Batch<'_, 'd, Self>,
        to: &'d Self::Destination,
        message: impl Source,
        imm: Option<u32>,
        signal: bool,
    );

    fn send_inline<'d>(
        batch: &mut Batch<'_, 'd, Self>,
        to: &'d Self::Destination,
        message: &'d [u8],
        imm: Option<u32>,
        signal: bool,
    );

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

macro_rules! stage {
    ($request:expr, $imm:ident, $signal:ident) => {
        match $imm {
            Some(imm) => drop($request.imm(imm).signaled_if($signal)),
            None => drop($request.signaled_if($signal)),
        }
    };
}

macro_rules! service {
    (connected) => {
        type Prepared = PreparedQueuePair<Self>;
        type Destination = ();

        #[inline]
        fn send<'d>(batch: &mut Batch<'_, 'd, Self>, _: &'d (), message: impl Source, imm: Option<u32>, signal: bool) {
            stage!(batch.send(message), imm, signal);
        }

        #[inline]
        fn send_inline<'d>(
            batch: &mut Batch<'_, 'd, Self>,
            _: &'d (),
            message: &'d [u8],
            imm: Option<u32>,
            signal: bool,
        ) {
            stage!(batch.send_inline(message), imm, signal);
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
    (managed) => {
        service!(connected);

        fn connect_by_cm(
            prepared: Self::Prepared,
            pending: Pending,
            _: &ProtectionDomain,
        ) -> Result<Managed<Self>, String> {
            let Pending::Connection(pending) = pending else {
                return Err(OTHER_TRANSPORT.to_owned());
            };
            let (qp, connection) = pending.connect(prepared).map_err(|e| e.to_string())?;
            Ok(Managed::Connected(Box::new((qp, ())), Some(connection)))
        }
    };
    (datagrams) => {
        const HEADER: u64 = doorbell_verbs::GRH_BYTES as u64;
        type Prepared = QueuePair<Self>;
        type Destination = UdDestination;

        #[inline]
        fn send<'d>(
            batch: &mut Batch<'_, 'd, Self>,
            to: &'d UdDestination,
            message: impl Source,
            imm: Option<u32>,
            signal: bool,
        ) {
            stage!(batch.send_to(message, &to.ah, to.qpn, to.qkey), imm, signal);
        }

        #[inline]
        fn send_inline<'d>(
            batch: &mut Batch<'_, 'd, Self>,
            to: &'d UdDestination,
            message: &'d [u8],
            imm: Option<u32>,
            signal: bool,
        ) {
            stage!(
                batch.send_to_inline(message, &to.ah, to.qpn, to.qkey),
                imm,
                signal
            );
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

        fn connect_by_cm(
            prepared: Self::Prepared,
            pending: Pending,
            pd: &ProtectionDomain,
        ) -> Result<Managed<Self>, String> {
            match pending {
                Pending::Service(service) => {
                    let ah = service.address_handle(pd).map_err(|e| e.to_string())?;
                    let UdEndpoint { qpn, qkey, .. } = service.endpoint();
                    Ok(Managed::Connected(
                        Box::new((prepared, UdDestination { ah, qpn, qkey })),
                        None,
                    ))
                }
                Pending::ServiceRequest(request) => {
                    request.answer(&prepared, &[]).map_err(|e| e.to_string())?;
                    // The client's address is in what the ends exchange.
                    Ok(Managed::NotConnected(prepared))
                }
                Pending::Connection(_) => Err(OTHER_TRANSPORT.to_owned()),
            }
        }

        fn join(prepared: &mut Self::Prepared, group: Gid) -> Result<(), String> {
            prepared
                .attach_multicast(group, Lid(0))
                .map_err(|e| e.to_string())
        }

        fn announce(qp: &mut QueuePair<Self>, to: &UdDestination, imm: u32) -> Result<(), PostError> {
            qp.post(|batch| {
                batch
                    .send_to_inline(&[], &to.ah, to.qpn, to.qkey)
                    .imm(imm)
                    .signaled();
            })
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

test_transport!(ReliableConnection, managed, own, rc);
test_transport!(UnreliableConnection, connected, own, uc);
test_transport!(UnreliableDatagram, datagrams, own, ud);
test_transport!(WithSrq<ReliableConnection>, managed, shared, rc);
test_transport!(WithSrq<UnreliableConnection>, connected, shared, uc);
test_transport!(WithSrq<UnreliableDatagram>, datagrams, shared, ud);

//! The set-up of an end: its completion queue and queue pairs, created with the same attributes and
//! connected to the peer's, on every transport, by their endpoints or by the connection manager.
//!
//! How the ends exchange their endpoints, and the memory of messages, are the front end's.

use doorbell_verbs::{
    AddressHandleBuilder, CompletionQueue, Context, Endpoint, Mtu, ProtectionDomain, QKey, QueuePair, QueuePairBuilder,
    SharedReceiveQueue,
};

use super::cm::{Managed, QpConnector};
use super::test_end::{TestEnd, TestQp};
use super::transport::TestTransport;
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;

/// RNR retry count: 7 is infinite, as the C tools rely on it, and credits ensure that a receive
/// will be posted.
const RNR_RETRY: u8 = 7;

/// What peers may do, but SEND.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum RemoteAccess {
    Nothing,
    Write,
    Read,
    Atomic,
}

/// The attributes of an end's queue pairs.
#[derive(Clone, Copy, Debug)]
// fields: the attributes of a queue pair and of its queues
pub(crate) struct QpAttributes {
    pub(crate) port: u8,
    /// Index of the source GID; the port's default without one.
    pub(crate) gid_index: Option<u8>,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) flow_label: u32,
    pub(crate) service_level: u8,
    pub(crate) pkey_index: u16,
    pub(crate) mtu: Option<Mtu>,
    pub(crate) timeout: u8,
    pub(crate) retry: u8,
    /// Outstanding READs and atomics, in either direction.
    pub(crate) outstanding: u8,
    pub(crate) access: RemoteAccess,
    /// Whether the connection manager connects them.
    pub(crate) by_cm: bool,
    pub(crate) qps: u32,
    pub(crate) send: u32,
    /// Of each receive queue, or of the shared one.
    pub(crate) receive: u32,
    pub(crate) shares_receives: bool,
    pub(crate) inline: u32,
    /// The completion vector of the events that the end sleeps on.
    pub(crate) events: Option<u32>,
}

impl QpAttributes {
    fn entries(&self) -> u32 {
        let receive_queues = if self.shares_receives { 1 } else { self.qps };
        let sends = self.send.saturating_mul(self.qps);
        sends.saturating_add(self.receive.saturating_mul(receive_queues))
    }

    fn queue(&self, context: &Context) -> Result<CompletionQueue, Failure> {
        match self.events {
            Some(vector) => {
                let channel = context.completion_channel().map_err(refused)?;
                context.completion_queue_on_vector(&channel, vector, self.entries())
            }
            None => context.completion_queue(self.entries()),
        }
        .map_err(refused)
    }

    fn builder<'a>(&self, pd: &'a ProtectionDomain, cq: &'a CompletionQueue, index: u32) -> QueuePairBuilder<'a> {
        let mut builder = pd
            .queue_pair(cq)
            .port(self.port)
            .max_send_wr(self.send)
            .max_recv_wr(self.receive)
            .max_inline_data(self.inline)
            .tag(index.into())
            .timeout(self.timeout)
            .retry_count(self.retry)
            .rnr_retry(RNR_RETRY)
            .max_rd_atomic(self.outstanding)
            .traffic_class(self.traffic_class)
            .hop_limit(self.hop_limit)
            .flow_label(self.flow_label)
            .service_level(self.service_level)
            .pkey_index(self.pkey_index);
        if let Some(index) = self.gid_index {
            builder = builder.gid_index(index);
        }
        if let Some(mtu) = self.mtu {
            builder = builder.mtu(mtu);
        }
        if self.by_cm {
            builder = builder.qkey(QKey::RDMA_UDP);
        }
        match self.access {
            RemoteAccess::Nothing => builder,
            RemoteAccess::Write => builder.allow_remote_write(),
            RemoteAccess::Read => builder.allow_remote_read(),
            RemoteAccess::Atomic => builder.allow_remote_atomic(),
        }
    }

    /// The route of datagrams (UD address handles).
    fn route<'a>(&self, pd: &'a ProtectionDomain) -> AddressHandleBuilder<'a> {
        let route = pd
            .address_handle()
            .port(self.port)
            .traffic_class(self.traffic_class)
            .hop_limit(self.hop_limit)
            .flow_label(self.flow_label)
            .service_level(self.service_level);
        match self.gid_index {
            Some(index) => route.gid_index(index),
            None => route,
        }
    }

    /// The inline size, or 0 where the device has no such queue pair and it is not required.
    ///
    /// # Errors
    /// [`Failure::Test`] with the device's reason, where it is required.
    pub(crate) fn usable_inline<T: TestTransport>(
        &self,
        context: &Context,
        pd: &ProtectionDomain,
        is_required: bool,
    ) -> Result<u32, Failure> {
        match PreparedEnd::<T>::new(context, pd, QpAttributes { qps: 1, ..*self }) {
            Err(e) if is_required => Err(e),
            Err(_) => Ok(0),
            Ok(_) => Ok(self.inline),
        }
    }
}

/// An end whose queue pairs are not connected yet.
#[derive(Debug)]
pub(crate) struct PreparedEnd<T: TestTransport> {
    attributes: QpAttributes,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    shared: Option<SharedReceiveQueue>,
    qps: Vec<T::Prepared>,
}

impl<T: TestTransport> PreparedEnd<T> {
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    pub(crate) fn new(context: &Context, pd: &ProtectionDomain, attributes: QpAttributes) -> Result<Self, Failure> {
        let cq = attributes.queue(context)?;
        let shared = attributes
            .shares_receives
            .then(|| pd.shared_receive_queue(attributes.receive).create())
            .transpose()
            .map_err(refused)?;
        let qps = (0..attributes.qps)
            .map(|index| T::prepare(attributes.builder(pd, &cq, index), shared.as_ref()))
            .collect::<Result<_, _>>()
            .map_err(refused)?;
        Ok(PreparedEnd {
            attributes,
            pd: pd.clone(),
            cq,
            shared,
            qps,
        })
    }

    pub(crate) fn qps(&mut self) -> &mut [T::Prepared] {
        &mut self.qps
    }

    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        self.qps.iter().map(T::endpoint).collect()
    }

    /// Connects the queue pairs, one after the other: by the connection manager, if there is a
    /// `connector`, else to the endpoints of `peers`, each with the peer's name in messages; it is
    /// called after the connection manager's part.
    ///
    /// # Errors
    /// [`Failure::Test`] when one cannot be connected; [`Failure::Interrupted`]; those of `peers`.
    pub(crate) fn connect(
        mut self,
        connector: Option<Connector<'_>>,
        peers: impl FnOnce() -> Result<Vec<(Endpoint, String)>, Failure>,
    ) -> Result<TestEnd<T>, Failure> {
        let prepared = std::mem::take(&mut self.qps);
        let managed: Vec<_> = match connector {
            None => prepared.into_iter().map(Managed::NotConnected).collect(),
            Some(mut connector) => prepared
                .into_iter()
                .map(|qp| self.connect_by_cm(qp, &mut connector))
                .collect::<Result<_, _>>()?,
        };
        let (mut qps, mut connections) = (Vec::with_capacity(managed.len()), Vec::new());
        for (qp, (endpoint, peer)) in managed.into_iter().zip(peers()?) {
            let (qp, to) = match qp {
                Managed::NotConnected(qp) => T::connect(qp, &endpoint, self.attributes.route(&self.pd))
                    .map_err(|reason| Failure::test(format!("{peer}: {}", one_line(&reason))))?,
                Managed::Connected(qp, connection) => {
                    connections.extend(connection);
                    *qp
                }
            };
            qps.push(TestQp { qp, to, peer });
        }
        Ok(TestEnd {
            cq: self.cq,
            qps,
            shared: self.shared,
            connections,
        })
    }

    fn connect_by_cm(&mut self, qp: T::Prepared, connector: &mut Connector<'_>) -> Result<Managed<T>, Failure> {
        let pending = connector.by.next(connector.interrupt)?;
        let mut qp = T::connect_by_cm(qp, pending, &self.pd)
            .map_err(|reason| Failure::test(format!("{}: {}", connector.peer, one_line(&reason))))?;
        if let (Managed::Connected(qp, _), true) = (&mut qp, connector.announces) {
            announce(&mut qp.0, &qp.1, &mut self.cq)?;
        }
        Ok(qp)
    }
}

/// The connection manager's part in connecting an end.
#[derive(Debug)]
pub(crate) struct Connector<'a> {
    pub(crate) by: &'a mut QpConnector,
    /// Whether a client of datagrams announces itself.
    pub(crate) announces: bool,
    /// The peer's name in messages.
    pub(crate) peer: String,
    pub(crate) interrupt: &'a Interrupt,
}

/// Sends what a C tool's server awaits before it is ready, an empty datagram with the sender's
/// queue pair number, and waits until it has left. To Doorbell's server it is of no use, and finds
/// no receive there.
fn announce<T: TestTransport>(
    qp: &mut QueuePair<T>,
    to: &T::Destination,
    cq: &mut CompletionQueue,
) -> Result<(), Failure> {
    let before = qp.next_send();
    let qpn = qp.qpn().get();
    T::announce(qp, to, qpn).map_err(refused)?;
    while qp.next_send() > before {
        if let Some(done) = cq.poll().map_err(refused)?.next() {
            return done.check().map_err(refused);
        }
        std::hint::spin_loop();
    }
    Ok(())
}

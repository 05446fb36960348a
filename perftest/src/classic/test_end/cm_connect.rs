//! Queue pairs connected by the connection manager (`-R`), before their QP information is
//! exchanged; without `-R` the exchange comes first.

use doorbell_verbs::cm::Connection;
use doorbell_verbs::{
    CompletionQueue, Connectionless, Gid, Lid, ProtectionDomain, QueuePair, ReliableConnection, UdEndpoint,
    UnreliableConnection, UnreliableDatagram, WithSrq,
};

use super::super::printer::Printer;
use super::super::settings::Settings;
use super::super::wire::{ControlConnection, Pending, QpConnector};
use crate::engine::transport::{TestTransport, UdDestination};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// A queue pair, and the connection that it is on, if the manager keeps one.
type Connected<T> = (QpSetup<T>, Option<Connection>);

const OTHER_TRANSPORT: &str = "the connection manager connects queue pairs of another transport: leave -R out";

/// A transport of the classic tools.
pub(crate) trait ClassicTransport: TestTransport {
    /// Attaches it to a multicast group (UD).
    ///
    /// # Errors
    /// As text, when the device refuses, or the transport has no groups.
    fn join(_: &mut Self::Prepared, _: Gid) -> Result<(), String> {
        Err("only datagrams reach a group: leave -g out".to_owned())
    }

    /// Connects it by the connection manager, or exchanges its address (UD): where both ends send,
    /// the client then announces itself, with `announces` for its completion.
    ///
    /// # Errors
    /// As text, when the peer does not take part, the device refuses, or the manager does not
    /// connect this transport.
    fn connect_by_cm(
        _: Self::Prepared,
        _: Pending,
        _: &ProtectionDomain,
        _announces: Option<&mut CompletionQueue>,
    ) -> Result<Connected<Self>, String> {
        Err(OTHER_TRANSPORT.to_owned())
    }
}

macro_rules! connects {
    ($transport:ty) => {
        impl ClassicTransport for $transport {
            fn connect_by_cm(
                prepared: Self::Prepared,
                pending: Pending,
                _: &ProtectionDomain,
                _: Option<&mut CompletionQueue>,
            ) -> Result<Connected<Self>, String> {
                let Pending::Connection(pending) = pending else {
                    return Err(OTHER_TRANSPORT.to_owned());
                };
                let (qp, connection) = pending.connect(prepared).map_err(|e| e.to_string())?;
                Ok((QpSetup::Connected(Box::new((qp, ()))), Some(connection)))
            }
        }
    };
}

macro_rules! datagrams {
    ($transport:ty) => {
        impl ClassicTransport for $transport {
            fn join(prepared: &mut Self::Prepared, group: Gid) -> Result<(), String> {
                prepared
                    .attach_multicast(group, Lid(0))
                    .map_err(|e| e.to_string())
            }

            fn connect_by_cm(
                mut prepared: Self::Prepared,
                pending: Pending,
                pd: &ProtectionDomain,
                announces: Option<&mut CompletionQueue>,
            ) -> Result<Connected<Self>, String> {
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
        }
    };
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

connects!(ReliableConnection);
connects!(WithSrq<ReliableConnection>);
datagrams!(UnreliableDatagram);
datagrams!(WithSrq<UnreliableDatagram>);
impl ClassicTransport for UnreliableConnection {}
impl ClassicTransport for WithSrq<UnreliableConnection> {}

/// A queue pair while it is set up.
#[derive(Debug)]
pub(crate) enum QpSetup<T: TestTransport> {
    /// Connected when the peer's QP information is known.
    NotConnected(T::Prepared),
    Connected(Box<(QueuePair<T>, T::Destination)>),
}

/// Connects the queue pairs by the connection manager, one after the other between two barriers;
/// n-th to n-th. The control connection keeps the CM connections.
///
/// # Errors
/// [`Failure::Test`] when one cannot be connected; as [`ControlConnection::barrier`] otherwise.
pub(super) fn connect_by_cm<T: ClassicTransport>(
    prepared: Vec<T::Prepared>,
    (pd, cq): (&ProtectionDomain, &mut CompletionQueue),
    settings: &Settings,
    control: &mut ControlConnection,
    connector: Option<QpConnector>,
    printer: &Printer<'_>,
    interrupt: &Interrupt,
) -> Result<Vec<QpSetup<T>>, Failure> {
    let Some(mut connector) = connector else {
        return Ok(prepared.into_iter().map(QpSetup::NotConnected).collect());
    };
    if settings.is_server() {
        printer.waiting_for_queue_pairs()?;
    }
    control.cm_barrier()?;
    let mut connected = Vec::with_capacity(prepared.len());
    for qp in prepared {
        let announces = settings.goes_both_ways().then_some(&mut *cq);
        let (qp, connection) = T::connect_by_cm(qp, connector.next(interrupt)?, pd, announces)
            .map_err(|reason| Failure::test(format!("peer {}: {}", control.peer(), one_line(&reason))))?;
        connected.push(qp);
        if let Some(connection) = connection {
            control.keep_connected(connection);
        }
    }
    control.cm_barrier()?;
    Ok(connected)
}

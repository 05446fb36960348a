//! One end of a test at one message size: queue pairs, connected to the peer's, with their memory.
//!
//! Generic over [`QpMemory`], which differs by test and side: what is allocated, which keys of it
//! the peer gets, and what the queue pair requires.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use doorbell_verbs::{
    CompletionStatus, Endpoint, KeyAccess, Memory, Mtu, ProtectionDomain, Qpn, ReliableConnection, Remote,
    UnreliableConnection, UnreliableDatagram,
};

use super::cm;
use crate::cli::Transport;
use crate::device::{Device, PORT};
use crate::engine::cm::CmEndpoint;
use crate::engine::setup::{Connector, PreparedEnd, QpAttributes, RemoteAccess};
use crate::engine::test_end::{self, TestQp};
use crate::engine::transport::TestTransport;
use crate::exchange::{self, Control, Message, REPLY_TIMEOUT, Setup};
use crate::failure::{Failure, refused};
use crate::plan::{Kind, Plan, Verb};
use crate::stats::Clock;

/// Outstanding READs and atomics of a queue pair; more only helps over longer distances than tests
/// have.
const RD_ATOMIC: u8 = 16;
/// How long a test that has lost its peer waits for the device to notice.
const DEVICE_ERROR_WAIT: Duration = Duration::from_secs(5);
const HOP_LIMIT: u8 = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Test<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) bytes: u64,
    pub(crate) device: &'a Device,
    pub(crate) gid_index: Option<u8>,
    /// Messages of up to so many bytes are sent inline from this end.
    pub(crate) inline: u32,
    pub(crate) control: &'a Control,
    pub(crate) clock: &'a Clock,
    pub(crate) is_server: bool,
}

impl Test<'_> {
    pub(crate) fn len(&self) -> usize {
        // Plans are checked: a size is at most 1 GiB.
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.bytes <= u64::from(self.inline)
    }

    /// Zeroed memory for messages: shared memory, which other processes of the host can map, or
    /// private memory.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is too little.
    pub(crate) fn memory(&self, len: usize) -> Result<Memory, Failure> {
        if self.plan.private_memory {
            return Ok(Memory::zeroed(len));
        }
        Memory::shared(len).map_err(|error| Failure::test(format!("{error} (--private-memory)")))
    }

    pub(crate) fn window(&self) -> u32 {
        self.plan.window(self.bytes)
    }

    /// Whether this end sends, reads or does atomics.
    pub(crate) fn sends(&self) -> bool {
        !self.is_server || self.plan.mode.bidirectional
    }

    /// Whether this end has memory for what the peer sends, reads or does atomics on.
    pub(crate) fn serves(&self) -> bool {
        self.is_server || self.plan.mode.bidirectional
    }

    /// Whether messages count where they arrive: those of a transport that may lose them, if the
    /// receiver sees them.
    pub(crate) fn counts_arrivals(&self) -> bool {
        self.plan.kind == Kind::Bw && self.plan.verb == Verb::Send && !self.plan.mode.is_reliable()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QpRequirements {
    pub(crate) send: u32,
    pub(crate) receive: u32,
    /// Inline size that the test cannot do without.
    pub(crate) inline: u32,
    pub(crate) access: RemoteAccess,
}

impl QpRequirements {
    pub(crate) fn new(send: u32, receive: u32, inline: u32, access: RemoteAccess) -> QpRequirements {
        QpRequirements {
            send,
            receive,
            inline,
            access,
        }
    }

    /// Those of both directions on one queue pair.
    pub(crate) fn and(self, other: QpRequirements) -> QpRequirements {
        QpRequirements {
            send: self.send + other.send,
            receive: self.receive.max(other.receive),
            inline: self.inline.max(other.inline),
            access: self.access.max(other.access),
        }
    }
}

/// What an end advertises of a queue pair's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdvertisedMemory {
    /// Messages that fit in it.
    pub(crate) slots: u32,
    pub(crate) data: Option<[u8; 24]>,
    /// The word that the peer counts its credits in.
    pub(crate) credit: Option<[u8; 24]>,
    /// The word that the peer counts its messages in.
    pub(crate) notice: Option<[u8; 24]>,
}

pub(crate) trait QpMemory: Sized {
    /// The memory with what the peer has advertised.
    type Connected;

    fn requirements(test: &Test<'_>) -> QpRequirements;

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure>;

    /// What the peer may access.
    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory::default()
    }

    /// Takes the peer's keys and posts the receives, before the peer may send.
    ///
    /// # Errors
    /// [`Failure::Test`] when the peer's keys are unusable.
    fn connect<T: TestTransport>(self, peer: Peer<'_, T>) -> Result<Self::Connected, Failure>;
}

/// A queue pair that is just connected, with the keys of its peer.
pub(crate) struct Peer<'a, T: TestTransport> {
    pub(crate) test: &'a Test<'a>,
    pub(crate) test_qp: &'a mut TestQp<T>,
    pub(crate) keys: &'a PeerQp,
}

#[derive(Clone, Debug)]
pub(crate) struct PeerQp {
    pub(crate) address: IpAddr,
    pub(crate) qpn: Qpn,
    pub(crate) slots: u32,
    data: Option<String>,
    credit: Option<String>,
    notice: Option<String>,
}

impl PeerQp {
    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key, or it covers less than `bytes`.
    pub(crate) fn data<K: KeyAccess>(&self, bytes: u64) -> Result<Remote<K>, Failure> {
        self.key(self.data.as_deref(), bytes)
    }

    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key.
    pub(crate) fn credit<K: KeyAccess>(&self) -> Result<Remote<K>, Failure> {
        self.key(self.credit.as_deref(), 8)
    }

    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key.
    pub(crate) fn notice<K: KeyAccess>(&self) -> Result<Remote<K>, Failure> {
        self.key(self.notice.as_deref(), 8)
    }

    fn key<K: KeyAccess>(&self, text: Option<&str>, bytes: u64) -> Result<Remote<K>, Failure> {
        let remote = text
            .and_then(from_hex::<24>)
            .and_then(|raw| Remote::<K>::from_bytes(&raw).ok());
        match remote {
            Some(remote) if remote.len() >= bytes => Ok(remote),
            _ => Err(Failure::test(format!(
                "{self} sent no usable key to its memory: are both ends the same doorbell?"
            ))),
        }
    }
}

impl std::fmt::Display for PeerQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peer {} (queue pair {})", self.address, self.qpn)
    }
}

pub(crate) struct TestEnd<T: TestTransport, O: QpMemory> {
    pub(crate) end: test_end::TestEnd<T>,
    /// One per queue pair.
    pub(crate) memory: Vec<O::Connected>,
}

impl<T: TestTransport, O: QpMemory> TestEnd<T, O> {
    /// From the queue pairs to the barrier at which both ends are connected.
    pub(crate) fn establish(test: &Test<'_>) -> Result<TestEnd<T, O>, Failure> {
        let context = &test.device.context;
        let pd = context.protection_domain().map_err(refused)?;
        let mut requirements = O::requirements(test);
        if test.is_inline() {
            requirements.inline = requirements.inline.max(test.inline);
        }
        let attributes = attributes(test.plan, test.gid_index, requirements);
        let prepared = PreparedEnd::<T>::new(context, &pd, attributes)?;
        let memory: Vec<O> = (0..test.plan.qps as usize)
            .map(|qp_index| O::new(test, &pd, qp_index))
            .collect::<Result<_, _>>()?;
        let own = prepared.endpoints();
        let waiting = cm::listen(test, &own)?;
        let ours = own
            .iter()
            .zip(&memory)
            .map(|(endpoint, memory)| encode_setup(endpoint, &memory.advertised_memory()))
            .collect();
        test.control.send(&Message::Setup(Setup {
            bytes: test.bytes,
            qps: ours,
            cm_port: waiting.as_ref().and_then(CmEndpoint::port),
        }))?;
        let setup = match test.control.receive(Some(REPLY_TIMEOUT), "its setup")? {
            Message::Setup(setup) if setup.bytes == test.bytes && setup.qps.len() == memory.len() => setup,
            other => return Err(test.control.unexpected(&other, "setup")),
        };
        let (endpoints, keys): (Vec<_>, Vec<_>) = setup
            .qps
            .into_iter()
            .map(decode_setup)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|reason| Failure::test(format!("peer {}: {reason}", test.control.peer())))?
            .into_iter()
            .unzip();
        check_datagrams::<T>(test, &endpoints)?;
        let mut connector = cm::connector::<T>(test, waiting, setup.cm_port, &own, &endpoints)?;
        let connector = connector.as_mut().map(|by| Connector {
            by,
            announces: false,
            peer: format!("peer {}", test.control.peer()),
            interrupt: test.control.interrupt(),
        });
        let names = keys.iter().map(PeerQp::to_string);
        let mut end = prepared.connect(connector, || Ok(endpoints.into_iter().zip(names).collect()))?;
        let memory = memory
            .into_iter()
            .zip(&mut end.qps)
            .zip(&keys)
            .map(|((memory, test_qp), keys)| memory.connect(Peer { test, test_qp, keys }))
            .collect::<Result<_, _>>()?;
        let mut test_end = TestEnd { end, memory };
        let met = test
            .control
            .send(&Message::Ready)
            .and_then(|()| test.control.receive(Some(REPLY_TIMEOUT), "ready"));
        match met.map_err(|failure| test_end.explain_lost_peer(failure, test.plan))? {
            Message::Ready => Ok(test_end),
            other => Err(test.control.unexpected(&other, "ready")),
        }
    }

    /// Adds details to a lost peer: the device and queue pair, and the device's error status if it
    /// reports one within the timeout of the test. Other failures are returned unchanged.
    #[cold]
    pub(crate) fn explain_lost_peer(&mut self, failure: Failure, plan: &Plan) -> Failure {
        let Failure::Lost { control, reason } = failure else {
            return failure;
        };
        let Some(first) = self.end.qps.first() else {
            return Failure::Lost { control, reason };
        };
        let more = match self.end.qps.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more queue pairs"),
        };
        let peer = format!("{}{more}", first.peer);
        let confirmed = match self.await_failure(plan) {
            Some(status) => format!("; the device reports: {status}"),
            None => String::new(),
        };
        Failure::test(format!(
            "{peer} lost: {reason} (control connection {control}){confirmed}"
        ))
    }

    /// Waits for a request to fail, as long as the device may retry.
    fn await_failure(&mut self, plan: &Plan) -> Option<CompletionStatus> {
        let one = Duration::from_nanos(4096)
            .checked_mul(1 << plan.timeout)
            .filter(|_| plan.timeout > 0)?;
        let wait = one.saturating_mul(u32::from(plan.retry) + 1).min(DEVICE_ERROR_WAIT) + Duration::from_millis(200);
        let deadline = Instant::now() + wait;
        while Instant::now() < deadline {
            for done in self.end.cq.poll().ok()? {
                if let Err(failure) = done.result() {
                    return Some(failure.status);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

/// # Errors
/// [`Failure::Usage`] when a datagram is longer than the peer's MTU.
fn check_datagrams<T: TestTransport>(test: &Test<'_>, peers: &[Endpoint]) -> Result<(), Failure> {
    let most = peers.iter().map(|peer| u64::from(peer.mtu.bytes())).min();
    match most.filter(|most| T::HEADER > 0 && test.bytes > *most) {
        Some(most) => Err(Failure::usage(format!(
            "a datagram of {} bytes: the MTU of peer {} is {most}",
            test.bytes,
            test.control.peer()
        ))),
        None => Ok(()),
    }
}

fn attributes(plan: &Plan, gid_index: Option<u8>, requirements: QpRequirements) -> QpAttributes {
    QpAttributes {
        port: PORT,
        gid_index,
        traffic_class: plan.dscp << 2,
        hop_limit: HOP_LIMIT,
        flow_label: 0,
        service_level: 0,
        pkey_index: 0,
        mtu: plan.mtu.and_then(Mtu::from_bytes),
        timeout: plan.timeout,
        retry: plan.retry,
        outstanding: RD_ATOMIC,
        access: requirements.access,
        by_cm: plan.mode.rdma_cm,
        qps: plan.qps,
        send: requirements.send,
        receive: requirements.receive,
        shares_receives: false,
        inline: requirements.inline,
        events: plan.events.then_some(0),
    }
}

/// The inline size that this end can use: the plan's, or 0 where that was only a default and the
/// device has none.
///
/// # Errors
/// [`Failure::Usage`] when the size was given and the device refuses it.
pub(crate) fn usable_inline(plan: &Plan, device: &Device) -> Result<u32, Failure> {
    let smallest = plan.sizes.iter().min().copied().unwrap_or(0);
    if plan.gpu || u64::from(plan.inline) < smallest {
        return Ok(0);
    }
    let pd = device.context.protection_domain().map_err(refused)?;
    let trial = QpRequirements::new(1, 1, plan.inline, RemoteAccess::Nothing);
    let trial = attributes(plan, None, trial);
    let (context, is_required) = (&device.context, plan.inline_required);
    match plan.mode.transport {
        Transport::Rc => trial.usable_inline::<ReliableConnection>(context, &pd, is_required),
        Transport::Uc => trial.usable_inline::<UnreliableConnection>(context, &pd, is_required),
        Transport::Ud => trial.usable_inline::<UnreliableDatagram>(context, &pd, is_required),
    }
    .map_err(|e| Failure::usage(format!("--inline {}: {e}", plan.inline)))
}

fn encode_setup(endpoint: &Endpoint, keys: &AdvertisedMemory) -> exchange::QpSetup {
    exchange::QpSetup {
        endpoint: to_hex(&endpoint.to_bytes()),
        slots: keys.slots,
        data: keys.data.map(|key| to_hex(&key)),
        credit: keys.credit.map(|key| to_hex(&key)),
        notice: keys.notice.map(|key| to_hex(&key)),
    }
}

fn decode_setup(setup: exchange::QpSetup) -> Result<(Endpoint, PeerQp), String> {
    let bytes = from_hex(&setup.endpoint).ok_or("its setup makes no sense: are both ends the same doorbell?")?;
    let endpoint = Endpoint::from_bytes(&bytes).map_err(|e| e.to_string())?;
    let peer = PeerQp {
        address: endpoint.gid.to_ip(),
        qpn: endpoint.qpn,
        slots: setup.slots,
        data: setup.data,
        credit: setup.credit,
        notice: setup.notice,
    };
    Ok((endpoint, peer))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_hexadecimal_is_decoded() {
        let bytes: [u8; 24] = std::array::from_fn(|i| (i * 11) as u8);
        assert_eq!(from_hex(&to_hex(&bytes)), Some(bytes));
        for text in [
            "",
            "00",
            &"0".repeat(49),
            &"g".repeat(48),
            &"é".repeat(24),
            &"+f".repeat(24),
        ] {
            assert_eq!(from_hex::<24>(text), None, "{text}");
        }
    }
}

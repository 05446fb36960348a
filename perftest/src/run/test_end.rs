//! One end of a test at one message size: queue pairs, connected to the peer's, with their memory.
//!
//! Generic over [`QpMemory`], which differs by test and side: what is allocated, which keys of it
//! the peer gets, and what the queue pair requires.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use doorbell_verbs::{
    CompletionQueue, CompletionStatus, Endpoint, KeyAccess, Memory, Mtu, PreparedQueuePair, ProtectionDomain, Qpn,
    ReliableConnection, Remote,
};

use crate::device::{Device, PORT};
use crate::engine::test_end::{self, TestQp};
use crate::exchange::{self, Control, Message, REPLY_TIMEOUT, Setup};
use crate::failure::{Failure, one_line, refused};
use crate::plan::Plan;

/// Outstanding READs and atomics of a queue pair; more only helps over longer distances than tests
/// have.
const RD_ATOMIC: u8 = 16;
/// How long a test that has lost its peer waits for the device to notice.
const DEVICE_ERROR_WAIT: Duration = Duration::from_secs(5);
/// RNR retry count: 7 is infinite, as credits ensure that a receive will be posted.
const RNR_RETRY: u8 = 7;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Test<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) bytes: u64,
    pub(crate) device: &'a Device,
    pub(crate) gid_index: Option<u8>,
    /// Messages of up to so many bytes are sent inline from this end.
    pub(crate) inline: u32,
    pub(crate) control: &'a Control,
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
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RemoteAccess {
    /// None but SEND.
    Nothing,
    Write,
    Read,
    Atomic,
}

/// What an end advertises of a queue pair's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct AdvertisedMemory {
    /// Messages that fit in it.
    pub(crate) slots: u32,
    pub(crate) data: Option<[u8; 24]>,
    pub(crate) counter: Option<[u8; 24]>,
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
    fn connect(self, peer: Peer<'_>) -> Result<Self::Connected, Failure>;
}

/// A queue pair that is just connected, with the keys of its peer.
pub(crate) struct Peer<'a> {
    pub(crate) test: &'a Test<'a>,
    pub(crate) test_qp: &'a mut TestQp<ReliableConnection>,
    pub(crate) keys: &'a PeerQp,
}

#[derive(Clone, Debug)]
pub(crate) struct PeerQp {
    pub(crate) address: IpAddr,
    pub(crate) qpn: Qpn,
    pub(crate) slots: u32,
    data: Option<String>,
    counter: Option<String>,
}

impl PeerQp {
    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key, or it covers less than `bytes`.
    pub(crate) fn data<K: KeyAccess>(&self, bytes: u64) -> Result<Remote<K>, Failure> {
        self.key(self.data.as_deref(), bytes)
    }

    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key.
    pub(crate) fn counter<K: KeyAccess>(&self) -> Result<Remote<K>, Failure> {
        self.key(self.counter.as_deref(), 8)
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

pub(crate) struct TestEnd<O: QpMemory> {
    pub(crate) end: test_end::TestEnd<ReliableConnection>,
    /// One per queue pair.
    pub(crate) memory: Vec<O::Connected>,
}

impl<O: QpMemory> TestEnd<O> {
    /// From the queue pairs to the barrier at which both ends are connected.
    pub(crate) fn establish(test: &Test<'_>) -> Result<TestEnd<O>, Failure> {
        let context = &test.device.context;
        let pd = context.protection_domain().map_err(refused)?;
        let requirements = O::requirements(test);
        let entries = (requirements.send + requirements.receive) * test.plan.qps;
        let cq = if test.plan.events {
            let channel = context.completion_channel().map_err(refused)?;
            context.completion_queue_on(&channel, entries)
        } else {
            context.completion_queue(entries)
        }
        .map_err(refused)?;
        let mut prepared = Vec::with_capacity(test.plan.qps as usize);
        for qp_index in 0..test.plan.qps as usize {
            let memory = O::new(test, &pd, qp_index)?;
            prepared.push((prepare(test, &pd, &cq, requirements, qp_index)?, memory));
        }
        let ours = prepared
            .iter()
            .map(|(qp, memory)| encode_setup(&qp.endpoint(), &memory.advertised_memory()))
            .collect();
        test.control.send(&Message::Setup(Setup {
            bytes: test.bytes,
            qps: ours,
        }))?;
        let setups = match test.control.receive(Some(REPLY_TIMEOUT), "its setup")? {
            Message::Setup(setup) if setup.bytes == test.bytes && setup.qps.len() == prepared.len() => setup.qps,
            other => return Err(test.control.unexpected(&other, "setup")),
        };
        let mut qps = Vec::with_capacity(prepared.len());
        let mut connected = Vec::with_capacity(prepared.len());
        for ((qp, memory), setup) in prepared.into_iter().zip(setups) {
            let (endpoint, peer) = decode_setup(setup)
                .map_err(|reason| Failure::test(format!("peer {}: {reason}", test.control.peer())))?;
            let mut test_qp = TestQp {
                qp: qp.connect(&endpoint).map_err(refused)?,
                to: (),
                peer: peer.to_string(),
            };
            connected.push(memory.connect(Peer {
                test,
                test_qp: &mut test_qp,
                keys: &peer,
            })?);
            qps.push(test_qp);
        }
        let shared = None;
        let mut test_end = TestEnd {
            end: test_end::TestEnd { cq, qps, shared },
            memory: connected,
        };
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

fn prepare(
    test: &Test<'_>,
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
    requirements: QpRequirements,
    qp_index: usize,
) -> Result<PreparedQueuePair, Failure> {
    let plan = test.plan;
    let build = |inline: u32| {
        let mut builder = pd
            .queue_pair(cq)
            .port(PORT)
            .max_send_wr(requirements.send)
            .max_recv_wr(requirements.receive)
            .max_inline_data(inline)
            .tag(qp_index as u64)
            .timeout(plan.timeout)
            .retry_count(plan.retry)
            .rnr_retry(RNR_RETRY)
            .traffic_class(plan.dscp << 2)
            .max_rd_atomic(RD_ATOMIC);
        builder = match requirements.access {
            RemoteAccess::Nothing => builder,
            RemoteAccess::Write => builder.allow_remote_write(),
            RemoteAccess::Read => builder.allow_remote_read(),
            RemoteAccess::Atomic => builder.allow_remote_atomic(),
        };
        if let Some(index) = test.gid_index {
            builder = builder.gid_index(index);
        }
        if let Some(mtu) = plan.mtu.and_then(Mtu::from_bytes) {
            builder = builder.mtu(mtu);
        }
        builder.rc()
    };
    let payload = if test.is_inline() { test.inline } else { 0 };
    build(payload.max(requirements.inline)).map_err(refused)
}

/// The inline size that this end can use: the plan's, or 0 where that was only a default and the
/// device has none.
///
/// # Errors
/// [`Failure::Test`] when the size was given and the device refuses it.
pub(crate) fn usable_inline(plan: &Plan, device: &Device) -> Result<u32, Failure> {
    if plan.gpu {
        return Ok(0);
    }
    let smallest = plan.sizes.iter().min().copied().unwrap_or(0);
    if u64::from(plan.inline) < smallest {
        return Ok(0);
    }
    let pd = device.context.protection_domain().map_err(refused)?;
    let cq = device.context.completion_queue(2).map_err(refused)?;
    match pd
        .queue_pair(&cq)
        .max_send_wr(1)
        .max_recv_wr(1)
        .max_inline_data(plan.inline)
        .rc()
    {
        Ok(_) => Ok(plan.inline),
        Err(_) if !plan.inline_required => Ok(0),
        Err(e) => Err(Failure::usage(format!(
            "--inline {}: {}",
            plan.inline,
            one_line(&e.to_string())
        ))),
    }
}

fn encode_setup(endpoint: &Endpoint, keys: &AdvertisedMemory) -> exchange::QpSetup {
    exchange::QpSetup {
        endpoint: to_hex(&endpoint.to_bytes()),
        slots: keys.slots,
        data: keys.data.map(|key| to_hex(&key)),
        counter: keys.counter.map(|key| to_hex(&key)),
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
        counter: setup.counter,
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

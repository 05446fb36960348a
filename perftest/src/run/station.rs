//! One end of a test at one message size: queue pairs, connected to the other end's, with their memory.
//!
//! What memory a lane (a queue pair and what belongs to it) needs differs by test and side, so a [`Station`] is generic over it: a type that
//! is [`Own`] says what it allocates, what of that the other side gets keys to, and what its queue pair needs. Everything else, from the
//! completion queue to the barrier before the first message, is the same for all and is done here.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use doorbell_verbs::{
    CompletionQueue, Endpoint, Failure as Completed, Key, Memory, Mtu, PreparedQueuePair, ProtectionDomain, Qpn,
    QueuePair, Refused, Remote, Status,
};

use crate::device::{Device, PORT};
use crate::exchange::{self, ANSWER, Control, Message, Setup};
use crate::failure::{Failure, one_line};
use crate::plan::Plan;

/// The most READs and atomics a queue pair keeps outstanding; more only helps over distances that no test has.
const RD_ATOMIC: u8 = 16;
/// How long a test that has lost its peer waits for the device to notice.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How often a receiver that has no receive posted is asked again: for ever, because flow control sees to it that it will.
const RNR_RETRY: u8 = 7;

/// What every part of a test at one size knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Test<'a> {
    /// The test.
    pub(crate) plan: &'a Plan,
    /// The message size now.
    pub(crate) bytes: u64,
    /// The device.
    pub(crate) device: &'a Device,
    /// Index of the GID to use, if one was asked for.
    pub(crate) gid_index: Option<u8>,
    /// Messages up to so many bytes travel inline from this side.
    pub(crate) inline: u32,
    /// The connection to the other end.
    pub(crate) control: &'a Control,
}

impl Test<'_> {
    /// The message size as a length of memory.
    pub(crate) fn len(&self) -> usize {
        // Plans are checked: a size is at most 1 GiB.
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }

    /// Whether messages travel inline from this side.
    pub(crate) fn is_inline(&self) -> bool {
        self.bytes <= u64::from(self.inline)
    }

    /// Zeros for messages: such as other processes on the host can map, or from the heap.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is none left.
    pub(crate) fn memory(&self, len: usize) -> Result<Memory, Failure> {
        if self.plan.private_memory {
            return Ok(Memory::zeroed(len));
        }
        Memory::shared(len).map_err(|error| Failure::test(format!("{error} (--private-memory)")))
    }

    /// Messages that one lane may have in flight.
    pub(crate) fn window(&self) -> u32 {
        self.plan.window(self.bytes)
    }
}

/// What a lane needs of its queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Needs {
    /// Send requests outstanding.
    pub(crate) send: u32,
    /// Receives posted.
    pub(crate) receive: u32,
    /// Bytes of inline payload that the test cannot do without.
    pub(crate) inline: u32,
    /// What the peer may do.
    pub(crate) grants: Grants,
}

/// What a queue pair lets the peer do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Grants {
    /// Nothing but SEND.
    Nothing,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// Atomics.
    Atomic,
}

/// What a side tells the other about a lane's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    /// Messages that fit in it.
    pub(crate) slots: u32,
    /// Where messages go to or come from.
    pub(crate) data: Option<[u8; 24]>,
    /// Where counters go to.
    pub(crate) counter: Option<[u8; 24]>,
}

/// The memory of a lane, as one side of one test needs it.
pub(crate) trait Own: Sized {
    /// What its queue pair has to be like.
    fn needs(test: &Test<'_>) -> Needs;

    /// Allocates and registers.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure>;

    /// What the other side may reach.
    fn keys(&self) -> Keys {
        Keys::default()
    }

    /// Posts what is to be received into, before the other side may send.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    fn post_receives(&mut self, _qp: &mut PreparedQueuePair) -> Result<(), Failure> {
        Ok(())
    }
}

/// The other side's half of a lane.
#[derive(Clone, Debug)]
pub(crate) struct Theirs {
    /// Where its device is.
    pub(crate) address: IpAddr,
    /// Its queue pair.
    pub(crate) qpn: Qpn,
    /// Messages that fit in its memory.
    pub(crate) slots: u32,
    data: Option<String>,
    counter: Option<String>,
}

impl Theirs {
    /// Where messages go to or come from.
    ///
    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key, or it covers less than `bytes`.
    pub(crate) fn data<K: Key>(&self, bytes: u64) -> Result<Remote<K>, Failure> {
        self.key(self.data.as_deref(), bytes)
    }

    /// Where counters go to.
    ///
    /// # Errors
    /// [`Failure::Test`] when the peer sent no such key.
    pub(crate) fn counter<K: Key>(&self) -> Result<Remote<K>, Failure> {
        self.key(self.counter.as_deref(), 8)
    }

    fn key<K: Key>(&self, text: Option<&str>, bytes: u64) -> Result<Remote<K>, Failure> {
        let remote = text
            .and_then(from_hex)
            .and_then(|raw| Remote::<K>::from_bytes(&raw).ok());
        match remote {
            Some(remote) if remote.len() >= bytes => Ok(remote),
            _ => Err(Failure::test(format!(
                "{self} sent no usable key to its memory: are both ends the same doorbell?"
            ))),
        }
    }

    /// The failure that a failed completion on this lane stands for.
    #[cold]
    pub(crate) fn failed(&self, failure: &Completed) -> Failure {
        Failure::test(format!("{self}: {}", one_line(&failure.to_string())))
    }

    /// The failure that a refused batch on this lane stands for.
    #[cold]
    pub(crate) fn refused(&self, refused: &Refused) -> Failure {
        Failure::test(format!("cannot post to {self}: {}", one_line(&refused.to_string())))
    }
}

impl std::fmt::Display for Theirs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peer {} (queue pair {})", self.address, self.qpn)
    }
}

/// A queue pair and what belongs to it.
#[derive(Debug)]
pub(crate) struct Lane<O> {
    /// The queue pair, connected.
    pub(crate) qp: QueuePair,
    /// The other side's half.
    pub(crate) theirs: Theirs,
    /// This side's memory.
    pub(crate) own: O,
}

/// One end of a test at one size.
#[derive(Debug)]
pub(crate) struct Station<O> {
    /// Where all lanes complete; a completion's tag is its lane's index.
    pub(crate) cq: CompletionQueue,
    /// The lanes.
    pub(crate) lanes: Vec<Lane<O>>,
}

impl<O: Own> Station<O> {
    /// Makes the lanes, tells the other side about them, connects them to its, and meets it at the barrier.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses or the peer fails; [`Failure::Interrupted`].
    pub(crate) fn establish(test: &Test<'_>) -> Result<Station<O>, Failure> {
        let context = &test.device.context;
        let pd = context.protection_domain().map_err(refused)?;
        let needs = O::needs(test);
        let cq = context
            .completion_queue((needs.send + needs.receive) * test.plan.qps)
            .map_err(refused)?;
        let mut prepared = Vec::with_capacity(test.plan.qps as usize);
        for lane in 0..test.plan.qps as usize {
            let mut own = O::new(test, &pd, lane)?;
            let mut qp = prepare(test, &pd, &cq, needs, lane)?;
            own.post_receives(&mut qp)?;
            prepared.push((qp, own));
        }
        let ours = prepared
            .iter()
            .map(|(qp, own)| describe(&qp.endpoint(), &own.keys()))
            .collect();
        test.control.send(&Message::Setup(Setup {
            bytes: test.bytes,
            lanes: ours,
        }))?;
        let theirs = match test.control.receive(Some(ANSWER), "its setup")? {
            Message::Setup(setup) if setup.bytes == test.bytes && setup.lanes.len() == prepared.len() => setup.lanes,
            other => return Err(test.control.unexpected(&other, "setup")),
        };
        let mut lanes = Vec::with_capacity(prepared.len());
        for ((qp, own), lane) in prepared.into_iter().zip(theirs) {
            let (endpoint, theirs) =
                understand(lane).map_err(|reason| Failure::test(format!("peer {}: {reason}", test.control.peer())))?;
            let qp = qp.connect(&endpoint).map_err(refused)?;
            lanes.push(Lane { qp, theirs, own });
        }
        let mut station = Station { cq, lanes };
        let met = test
            .control
            .send(&Message::Ready)
            .and_then(|()| test.control.receive(Some(ANSWER), "ready"));
        match met.map_err(|failure| station.explain(failure, test.plan))? {
            Message::Ready => Ok(station),
            other => Err(test.control.unexpected(&other, "ready")),
        }
    }
}

impl<O> Station<O> {
    /// Says more about a lost peer: which device and queue pair it was, and, when this side's device finds out in the time that the test gave it,
    /// what it has to say. Any other failure stays what it is.
    #[cold]
    pub(crate) fn explain(&mut self, failure: Failure, plan: &Plan) -> Failure {
        let Failure::Lost { control, reason } = failure else {
            return failure;
        };
        let Some(first) = self.lanes.first() else {
            return Failure::Lost { control, reason };
        };
        let more = match self.lanes.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more queue pairs"),
        };
        let peer = format!("{}{more}", first.theirs);
        let confirmed = match self.await_failure(plan) {
            Some(status) => format!("; the device reports: {status}"),
            None => String::new(),
        };
        Failure::test(format!(
            "{peer} lost: {reason} (control connection {control}){confirmed}"
        ))
    }

    /// Waits for a request to fail, as long as the device may take to give the peer up.
    fn await_failure(&mut self, plan: &Plan) -> Option<Status> {
        let one = Duration::from_nanos(4096)
            .checked_mul(1 << plan.timeout)
            .filter(|_| plan.timeout > 0)?;
        let wait = one.saturating_mul(u32::from(plan.retry) + 1).min(LONGEST_WAIT) + Duration::from_millis(200);
        let deadline = Instant::now() + wait;
        while Instant::now() < deadline {
            for done in self.cq.poll().ok()? {
                if let Err(failure) = done.result() {
                    return Some(failure.status);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

/// What a device or its library refused, as a failed test.
pub(crate) fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::test(one_line(&error.to_string()))
}

fn prepare(
    test: &Test<'_>,
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
    needs: Needs,
    lane: usize,
) -> Result<PreparedQueuePair, Failure> {
    let plan = test.plan;
    let build = |inline: u32| {
        let mut builder = pd
            .queue_pair(cq)
            .port(PORT)
            .send_depth(needs.send)
            .recv_depth(needs.receive)
            .max_inline(inline)
            .tag(lane as u64)
            .timeout(plan.timeout)
            .retry_count(plan.retry)
            .rnr_retry(RNR_RETRY)
            .rd_atomic(RD_ATOMIC);
        builder = match needs.grants {
            Grants::Nothing => builder,
            Grants::Write => builder.allow_remote_write(),
            Grants::Read => builder.allow_remote_read(),
            Grants::Atomic => builder.allow_remote_atomic(),
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
    build(payload.max(needs.inline)).map_err(refused)
}

/// The inline size that this side can use: the plan's, or none where that was only a default and the device has none.
///
/// # Errors
/// [`Failure::Test`] when the size was asked for and the device refuses it.
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
        .send_depth(1)
        .recv_depth(1)
        .max_inline(plan.inline)
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

fn describe(endpoint: &Endpoint, keys: &Keys) -> exchange::Lane {
    exchange::Lane {
        endpoint: to_hex(&endpoint.to_bytes()),
        slots: keys.slots,
        data: keys.data.map(|key| to_hex(&key)),
        counter: keys.counter.map(|key| to_hex(&key)),
    }
}

fn understand(lane: exchange::Lane) -> Result<(Endpoint, Theirs), String> {
    let bytes = from_hex(&lane.endpoint).ok_or("its setup makes no sense: are both ends the same doorbell?")?;
    let endpoint = Endpoint::from_bytes(&bytes).map_err(|e| e.to_string())?;
    let theirs = Theirs {
        address: endpoint.gid.to_ip(),
        qpn: endpoint.qpn,
        slots: lane.slots,
        data: lane.data,
        counter: lane.counter,
    };
    Ok((endpoint, theirs))
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
    fn hexadecimal_survives_and_nonsense_does_not() {
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

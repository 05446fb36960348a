//! Drives the device: link to engine, engine to completion queues, engine to link (decision 017).
//!
//! Three locks let one thread receive while another posts:
//! - `rx`: the receiving half and its batch;
//! - `core`: the engine, memory, and the object tables;
//! - `tx`: the sending half and its batch.
//!
//! **Lock order:** rx, core, tx, acks; the locks of completion and event queues come after core,
//! and below them only the event queue is locked. The send system call runs under `tx` alone.
//! Packets leave in the engine's order: the batch is filled under core *and* tx, and core is
//! released first.
//!
//! **Delayed ACK** (decision 019). ACKs are held ([`Reasons::DELAYED_ACK`]) when one message
//! arrived alone and they are all there is to send. The next post takes them along; otherwise the
//! next drive sends them, the progress thread's after [`ACK_DELAY`].
//!
//! **Separate ACK path.** A batch of ACKs alone goes out through a second sending half, under
//! `acks`, beside the application's reply. The peer's transport tolerates the reordering, but not
//! an application that sleeps on a completion and takes a reply as the completion of its own
//! message (`perftest -e`): ACKs of a queue pair with a completion channel keep their order and go
//! first.
//!
//! **Receive before timers.** A response still in the socket, or in the batch of a preempted
//! receiver, is indistinguishable from a lost one. So timers run in a drive that held rx and found
//! the socket empty, with the time before that poll; or once as much was received since they fell
//! due as can have been queued then ([`BACKLOG`]).
//!
//! The locks are parking_lot's: they spin briefly, which suits sections of a microsecond.
//!
//! How the progress thread sleeps and is woken is in [`wakeup`](crate::wakeup).

use std::hint;
use std::mem;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU32;
use std::thread;
use std::time::{Duration, Instant as Clock};

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::icrc::FlowCache;
use doorbell_roce_proto::wire::Opcode;

use crate::clock::{COARSE, coarse_ticks, ticks};
use crate::links::shm::IncomingRings;
use crate::links::udp::{Envelope, PortState, Receive, RxBatch, Seal, Transmit, TxBatch};
use crate::state::Core;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering};
use crate::wakeup::{Deadline, NEVER, Reasons, Wakeup};

mod app_polling;
mod combining_lock;
mod report;
mod shm;

use app_polling::AppPolling;
use combining_lock::CombiningLock;

/// Datagrams handled between two polls of the engine, so that a streaming peer gets ACKs in time.
const STRIDE: usize = 32;

/// The most acknowledgements sent through the separate ACK path; more are throughput traffic.
const MAX_ACK_BATCH: usize = 4;

/// How long a polling application takes to see a message and to post its reply.
const ACK_DELAY: Duration = Duration::from_nanos(1500);

/// The same while all traffic uses shm links, where an ACK is cheap but contends with the poster.
const SHM_ACK_DELAY: Duration = Duration::from_nanos(300);

/// After this many receives, everything that was in the socket before them has been handled: a
/// buffer of 16 MiB holds about 32 times as many acknowledgements.
const BACKLOG: u32 = 1024;

/// The same for shm rings of about 500 records: each receive takes twice as many, up to 32.
const SHM_BACKLOG: u32 = 32;

/// How long a queue pair that stops sending waits for its rings to drain; a peer that consumes
/// nothing for this long is stopped.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(20);

/// From here on timeouts may start from the coarse clock, up to a sixth longer: the local ACK
/// timeout may take four times as long (IBTA vol 1, 9.7.6.1.3).
pub(crate) const COARSE_TIMEOUT: Duration = Duration::from_nanos(6 * COARSE);

/// After this many polls of an idle UDP socket, only one in [`UDP_POLL_INTERVAL`] drives polls it.
const UDP_IDLE_POLLS: u32 = 256;
const UDP_POLL_INTERVAL: u32 = 128;

pub(crate) struct Rx {
    half: Box<dyn Receive>,
    batch: RxBatch,
    /// Consecutive receives that found packets while timers were due.
    behind: u32,
    rings: IncomingRings,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RxPoll {
    Busy,
    Empty,
    /// Packets received; more may be queued.
    Some,
    /// Packets received, and everything that was queued when the timers fell due has been handled.
    CaughtUp,
}

pub(crate) struct Tx {
    half: Box<dyn Transmit>,
    batch: TxBatch,
}

pub(crate) struct Shared {
    rx: Mutex<Rx>,
    pub(crate) core: Mutex<Core>,
    tx: CombiningLock<Tx>,
    /// The second sending half, for ACKs. Its batch is empty whenever the lock is free.
    acks: Option<Mutex<Tx>>,
    pub(crate) wakeup: Wakeup,
    shm_enabled: AtomicBool,
    /// Drives so far, and consecutive ones without UDP traffic.
    drive_count: AtomicU32,
    udp_idle_polls: AtomicU32,
    pub(crate) app_polling: AppPolling,
    /// The port state. Written under core, so that changes and their events have one order.
    port: Mutex<PortState>,
    broken: AtomicBool,
    /// In [`ticks`].
    epoch: u64,
}

fn seal() -> impl Seal + 'static {
    let mut flows = FlowCache::default();
    let mut last = None;
    move |packet: &mut [u8], envelope: &Envelope| {
        let (src, dst) = (envelope.src, envelope.dst.addr);
        // Only the first packet of a run needs the flow lookup, which costs a tenth of its CRC.
        let flow = match last {
            Some(flow) if envelope.ident != 0 => flow,
            _ => *last.insert(flows.flow(src.ip(), dst.ip(), src.port(), dst.port())),
        };
        flow.seal(envelope.ident, packet);
    }
}

/// Whether a batch is short and holds only ACKs and NAKs.
fn is_acks(batch: &TxBatch) -> bool {
    let ack = Opcode::RcAcknowledge.code();
    (1..=MAX_ACK_BATCH).contains(&batch.len()) && batch.packets().all(|(_, packet)| packet.first() == Some(&ack))
}

impl Shared {
    pub(crate) fn new(
        local: SocketAddr,
        rx: Box<dyn Receive>,
        tx: Box<dyn Transmit>,
        acks: Option<Box<dyn Transmit>>,
        wakeup: Wakeup,
        core: Core,
    ) -> Self {
        let sender = |half| {
            let batch = TxBatch::new(local, seal());
            Tx { half, batch }
        };
        Self {
            rx: Mutex::new(Rx {
                half: rx,
                batch: RxBatch::new(local),
                behind: 0,
                rings: IncomingRings::default(),
            }),
            core: Mutex::new(core),
            tx: CombiningLock::new(sender(tx)),
            acks: acks.map(|half| Mutex::new(sender(half))),
            wakeup,
            shm_enabled: AtomicBool::new(false),
            drive_count: AtomicU32::new(0),
            udp_idle_polls: AtomicU32::new(0),
            app_polling: AppPolling::new(),
            port: Mutex::new(PortState::UNKNOWN),
            broken: AtomicBool::new(false),
            epoch: ticks(),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        // Monotonic; 2^64 ns are 584 years.
        Instant(ticks().saturating_sub(self.epoch))
    }

    /// The time, or up to [`COARSE`] later: cheap; for timeouts of at least [`COARSE_TIMEOUT`].
    pub(crate) fn about_now(&self) -> Instant {
        Instant((coarse_ticks() + COARSE).saturating_sub(self.epoch))
    }

    pub(crate) fn drive_for_app(&self) {
        self.app_polling.drive(|| {
            self.drive();
        });
    }

    /// `false` when there was nothing to do or another thread drives.
    pub(crate) fn drive_for_progress(&self) -> bool {
        let busy = self.drive();
        if self.wakeup.has(Reasons::DELAYED_ACK) {
            let since = self.now();
            let delay = if self.is_udp_idle() { SHM_ACK_DELAY } else { ACK_DELAY };
            while self.wakeup.has(Reasons::DELAYED_ACK) && self.now() - since < delay {
                hint::spin_loop();
            }
            self.flush_delayed_ack();
        }
        busy
    }

    fn flush_delayed_ack(&self) {
        if self.wakeup.has(Reasons::DELAYED_ACK) {
            self.flush(self.core.lock());
        }
    }

    /// Leaves the ACKs to a thread that posts or polls, or to the progress thread, which is woken.
    fn delay_ack(&self, core: MutexGuard<'_, Core>) {
        self.wakeup.set(Reasons::DELAYED_ACK, true);
        self.publish_and_unlock(core);
        self.wakeup.wake_before(0);
    }

    /// Never blocks; `false` when there was nothing to do or another thread drives.
    fn drive(&self) -> bool {
        self.flush_delayed_ack();
        if self.wakeup.has(Reasons::RING_BLOCKED) {
            self.unblock_rings();
        }
        if self.skips_udp() {
            return matches!(self.receive(false, false), RxPoll::Some);
        }
        let late = self.now_if_due(Deadline::Engine);
        let received = self.receive(late.is_some(), true);
        let late = late.filter(|_| matches!(received, RxPoll::Empty | RxPoll::CaughtUp));
        let any = matches!(received, RxPoll::Some | RxPoll::CaughtUp);
        let blocked = self.wakeup.has(Reasons::UDP_BLOCKED);
        let moderated = self.now_if_due(Deadline::Channels);
        if late.is_none() && moderated.is_none() && !blocked && self.now_if_due(Deadline::Link).is_none() {
            return any;
        }
        let mut core = self.core.lock();
        if let Some(now) = late {
            self.wakeup.set_deadline(Deadline::Engine, NEVER);
            core.handle_timeout(now);
        }
        if let Some(now) = moderated {
            core.notify_moderated(now);
        }
        self.flush_blocked(core);
        any || !blocked || !self.wakeup.has(Reasons::UDP_BLOCKED)
    }

    fn now_if_due(&self, which: Deadline) -> Option<Instant> {
        let due = self.wakeup.deadline(which);
        if due == NEVER {
            return None;
        }
        Some(self.now()).filter(|now| now.0 >= due)
    }

    /// Whether this drive polls the shm rings alone, without a system call or a clock read.
    fn skips_udp(&self) -> bool {
        if !self.shm_enabled.load(Ordering::Relaxed) || !self.is_udp_idle() {
            return false;
        }
        // A lost count of two racing threads is harmless.
        let count = self.drive_count.load(Ordering::Relaxed).wrapping_add(1);
        self.drive_count.store(count, Ordering::Relaxed);
        !count.is_multiple_of(UDP_POLL_INTERVAL)
    }

    /// Makes the next drive poll everything: after a sleep the cause of the wake-up is unknown.
    pub(crate) fn poll_all_next(&self) {
        self.drive_count.store(u32::MAX, Ordering::Relaxed);
    }

    fn is_udp_idle(&self) -> bool {
        self.udp_idle_polls.load(Ordering::Relaxed) >= UDP_IDLE_POLLS
    }

    /// Receives once from the shm rings, and from the link when `udp`; `late` when timers are due.
    fn receive(&self, late: bool, udp: bool) -> RxPoll {
        let Some(mut rx) = self.rx.try_lock() else {
            return RxPoll::Busy;
        };
        let Rx {
            half,
            batch,
            behind,
            rings,
        } = &mut *rx;
        let polled = self.receive_shm(rings);
        if !udp {
            return if polled.any { RxPoll::Some } else { RxPoll::Empty };
        }
        let messages = match half.receive(batch) {
            Ok(messages) => messages,
            Err(error) => {
                self.fail(&error);
                return RxPoll::Empty;
            }
        };
        let idle_polls = if messages == 0 {
            self.udp_idle_polls.load(Ordering::Relaxed).saturating_add(1)
        } else {
            0
        };
        self.udp_idle_polls.store(idle_polls, Ordering::Relaxed);
        if messages == 0 && !polled.more {
            *behind = 0;
            return if polled.any { RxPoll::CaughtUp } else { RxPoll::Empty };
        }
        *behind = if late { *behind + 1 } else { 0 };
        let enough = if messages == 0 { SHM_BACKLOG } else { BACKLOG };
        let received = if *behind >= enough {
            *behind = 0;
            RxPoll::CaughtUp
        } else {
            RxPoll::Some
        };
        let mut datagrams = batch.datagrams().peekable();
        while datagrams.peek().is_some() {
            let now = self.now();
            let mut core = self.core.lock();
            for datagram in datagrams.by_ref().take(STRIDE) {
                core.receive(now, &datagram);
            }
            core.finish_staged_writes(|| now);
            if messages == 1 && datagrams.peek().is_none() && core.endpoint.has_only_acks() {
                self.delay_ack(core);
            } else {
                self.flush(core);
            }
        }
        received
    }

    /// Delivers completions and events, and sends packets. Called after every engine change.
    pub(crate) fn flush<'a>(&'a self, core: MutexGuard<'a, Core>) {
        let now = self.now();
        self.flush_with(core, now, false);
    }

    pub(crate) fn flush_at<'a>(&'a self, core: MutexGuard<'a, Core>, now: Instant) {
        self.flush_with(core, now, false);
    }

    /// [`flush`](Self::flush) that also calls the link: for delayed faults and a blocked batch.
    fn flush_blocked<'a>(&'a self, core: MutexGuard<'a, Core>) {
        let now = self.now();
        self.flush_with(core, now, true);
    }

    /// [`flush`](Self::flush) that waits for tx, before a queue pair stops sending: a completion
    /// that the application has seen implies that the peer will receive the ACK.
    pub(crate) fn flush_waiting<'a>(&'a self, core: MutexGuard<'a, Core>) {
        self.wakeup.set(Reasons::DELAYED_ACK, false);
        // Allowed by the lock order: no thread waits for core under tx.
        let tx = self.tx.lock();
        if self
            .tx
            .run_locked(core, tx, |core, tx| self.fill_and_send(core, tx, false))
        {
            self.flush(self.core.lock());
        }
        // An ACK may be queued behind a full ring.
        let since = Clock::now();
        while self.wakeup.has(Reasons::RING_BLOCKED) && since.elapsed() < DRAIN_TIMEOUT {
            self.unblock_rings();
            thread::yield_now();
        }
    }

    /// [`flush`](Self::flush) after posting: mostly the fast path has sent everything already.
    #[inline]
    pub(crate) fn flush_posted<'a>(&'a self, core: MutexGuard<'a, Core>) {
        if !core.has_nothing_to_send() {
            return self.flush(core);
        }
        // The delayed ACK has piggybacked.
        self.wakeup.set(Reasons::DELAYED_ACK, false);
        if !core.is_idle() {
            self.publish_posted(core);
        }
    }

    #[inline(never)]
    fn publish_posted(&self, mut core: MutexGuard<'_, Core>) {
        core.deliver(|| self.now());
        // Direct requests complete, and leave nothing else to publish.
        if !core.is_idle() || core.moderation_due().is_some() {
            self.publish_and_unlock(core);
        }
    }

    fn flush_with<'a>(&'a self, mut core: MutexGuard<'a, Core>, now: Instant, mut force: bool) {
        // Under core: no other thread delays an ACK now.
        self.wakeup.set(Reasons::DELAYED_ACK, false);
        // Completions are delivered before a shm ring shows the peer that its message was received.
        core.deliver(|| now);
        if !core.fill_shm(now) && !force {
            return self.publish_and_unlock(core);
        }
        self.tx.run_or_delegate(
            core,
            |core, tx| self.fill_and_send(core, tx, mem::take(&mut force)),
            |core| self.publish_and_unlock(core),
            || {
                let core = self.core.lock();
                self.wakeup.set(Reasons::DELAYED_ACK, false);
                core
            },
        );
    }

    /// Sends what the engine has, up to a full batch. Whether there is more.
    fn fill_and_send<'a>(&'a self, mut core: MutexGuard<'a, Core>, mut tx: MutexGuard<'a, Tx>, force: bool) -> bool {
        let now = self.now();
        core.deliver(|| now);
        let filled = core.fill(now, &mut tx.batch);
        let blocked = if let Some(mut acks) = self.ack_sender(&tx.batch, force || filled.in_order) {
            mem::swap(&mut tx.batch, &mut acks.batch);
            drop(tx);
            self.publish_and_unlock(core);
            self.send_acks(&mut acks, now);
            false
        } else {
            self.publish_and_unlock(core);
            let blocked = self.send(&mut tx, now, force);
            drop(tx);
            blocked
        };
        filled.full && !blocked
    }

    /// The sending half for ACKs, if free, unless `batch` has more than ACKs or stays `in_order`.
    fn ack_sender(&self, batch: &TxBatch, in_order: bool) -> Option<MutexGuard<'_, Tx>> {
        if in_order || !is_acks(batch) {
            return None;
        }
        self.acks.as_ref()?.try_lock()
    }

    fn send_acks(&self, acks: &mut Tx, now: Instant) {
        self.udp_idle_polls.store(0, Ordering::Relaxed);
        if let Err(error) = acks.half.transmit(&mut acks.batch, now) {
            self.fail(&error);
        }
        // What the socket has no space for is lost as on any network: the requester retransmits.
        acks.batch.clear();
    }

    /// Ends a section under core: delivers, publishes the engine's deadline, unlocks, and wakes the
    /// progress thread if it sleeps past that deadline, and peers that have something to receive.
    fn publish_and_unlock(&self, mut core: MutexGuard<'_, Core>) {
        core.deliver(|| self.now());
        let due = core.due().map_or(NEVER, |due| due.0);
        // A later deadline is not published: the drive at the earlier one finds nothing due and
        // publishes this one then. The store costs as much as a whole record.
        if due < self.wakeup.deadline(Deadline::Engine) {
            self.wakeup.set_deadline(Deadline::Engine, due);
        }
        let wakeups = core.take_wakeups();
        let blocked = core.rings.is_blocked();
        let changed = self.wakeup.set(Reasons::RING_BLOCKED, blocked);
        let channels = core.moderation_due().map_or(NEVER, |due| due.0);
        self.wakeup.set_deadline(Deadline::Channels, channels);
        drop(core);
        if wakeups.own {
            self.wakeup.publish(Reasons::OWN_RECORDS);
        }
        // A credit wake-up may have arrived before a ring was known to be blocked.
        let at_once = changed && blocked;
        self.wakeup.wake_before(if at_once { 0 } else { due.min(channels) });
        wakeups.peers.iter().for_each(|connection| connection.wake());
    }

    /// Delivers completions and events: after changes that send nothing.
    pub(crate) fn deliver(&self, core: MutexGuard<'_, Core>) {
        self.publish_and_unlock(core);
    }

    /// Whether packets are left in the batch.
    fn send(&self, tx: &mut Tx, now: Instant, force: bool) -> bool {
        if tx.batch.is_empty() && !force {
            return false;
        }
        self.udp_idle_polls.store(0, Ordering::Relaxed);
        if let Err(error) = tx.half.transmit(&mut tx.batch, now) {
            tx.batch.clear();
            self.fail(&error);
        }
        let due = tx.half.due().map_or(NEVER, |due| due.0);
        self.wakeup.set_deadline(Deadline::Link, due);
        let left = !tx.batch.is_empty();
        // A half that has a time to be called does not wait for the socket.
        let blocked = left && due == NEVER;
        self.wakeup.set(Reasons::UDP_BLOCKED, blocked);
        self.wakeup.wake_before(if blocked { 0 } else { due });
        left
    }
}

#[cfg(test)]
mod tests;

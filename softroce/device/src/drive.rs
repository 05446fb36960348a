//! Moving a device on: from the link into the engine, from the engine to the completion queues and onto the link.
//!
//! Three locks, so that one thread may receive while another posts:
//! - `rx`: the receiving half and its batch;
//! - `core`: the engine, memory, and the tables of objects;
//! - `tx`: the sending half and its batch.
//!
//! **Order:** rx before core before tx; the locks of completion queues and event queues come after core, and nothing is locked under them but the
//! queue of events. The send system call runs under `tx` alone. Two rules make packets leave in the order in which the engine gave them: the batch
//! is filled under core *and* tx, and core is given back before tx. A thread that finds tx taken does not wait: it leaves a [`note`]
//! for its holder, who looks for one after giving tx back.
//!
//! **Acknowledgements wait for an answer.** Who receives a SEND or WRITE mostly answers it, and each datagram costs microseconds in the kernel. When a
//! message comes alone and leaves nothing to send but acknowledgements, these are held back (`held`) for a moment: whoever posts takes them along in the same
//! GSO run. Otherwise the next drive sends them: that of a thread which polls again, or the progress thread's after [`HOLD`].
//!
//! **Acknowledgements leave beside the rest.** A batch of nothing but acknowledgements goes out by a second sending half, under the lock `acks`, which comes after tx: the thread that received
//! sends it while the application posts its answer by the first. Their order towards other packets means nothing to the peer: a later
//! response acknowledges what came before it as well, and what then comes late is ignored. To its application it may mean something: one that sleeps until a completion
//! comes, of whatever queue, may take for granted that its message has completed when the answer is there, as with an adapter (`perftest -e` does, and waits for ever when it is
//! wrong). So the acknowledgements of a queue pair with a completion channel, whose peer will have one as well, keep their order, and go first.
//!
//! **What arrived comes before the timers.** An answer that waits in the socket, or in the batch of a thread that lost the processor while it received, looks
//! to the engine like one that was lost. So timers run in a drive that itself had rx and found the socket empty, by the time of before it looked; or, lest a
//! stream that never ends starve them, when as much has been received since they were due as could have waited then ([`BACKLOG`]).
//!
//! The locks are parking_lot's: they spin a little before they sleep, which suits sections of about a microsecond; `try_lock` is one
//! compare-and-swap; and a panic in one thread does not turn into a panic in every other.

use std::hint;
use std::mem;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU32;
use std::thread::{self, Thread};
use std::time::{Duration, Instant as Clock};

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::icrc::FlowCache;
use doorbell_roce_proto::wire::Opcode;

use crate::clock::{COARSE, coarse_ticks, ticks};
use crate::event::{Event, PortEvent};
use crate::lanes::Incoming;
use crate::link::{Envelope, PortState, Receive, RxBatch, Seal, Transmit, TxBatch, Waker};
use crate::state::Core;
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};

mod application;
mod doze;
mod lanes;
mod note;

use application::Application;
use doze::Doze;
use note::Noted;

/// Datagrams handled between two looks at what the engine wants to send: a peer that streams gets its acknowledgements while the rest of a large
/// batch is still being handled.
const STRIDE: usize = 32;

/// As many acknowledgements go out beside the rest; more of them are traffic in which latency does not count.
const ACKS: usize = 4;

/// How long the progress thread holds acknowledgements back: what an application that polls its memory takes to see a message and to post an answer.
const HOLD: Duration = Duration::from_nanos(1500);

/// The same while all goes by lanes: on one an acknowledgement costs little, but it is in the way of the application that wants to post.
const LANE_HOLD: Duration = Duration::from_nanos(300);

/// After as many receives nothing is left of what waited in the socket before them: a buffer of 16 MiB holds about as many times 32 acknowledgements.
const BACKLOG: u32 = 1024;

/// The same for lanes: one has some 500 records, of which each receive takes twice as many as the one before, up to 32.
const LANE_BACKLOG: u32 = 32;

/// How long a queue pair that falls silent waits for room on the lanes: a peer that takes nothing for so long is stopped.
const LAST_WORDS: Duration = Duration::from_millis(20);

/// A deadline so far away may come later by a sixth: the local ACK timeout is one from 67 ms on, and may take four times as long (IBTA vol 1, 9.7.6.1.3).
pub(crate) const FAR: Duration = Duration::from_nanos(6 * COARSE);

/// While nothing went over UDP in as many looks at the socket, one is taken only in every so many drives.
const QUIET: u32 = 256;
const UDP_TURN: u32 = 128;

/// No deadline.
const NEVER: u64 = u64::MAX;

/// The receiving side of the link.
pub(crate) struct Rx {
    half: Box<dyn Receive>,
    batch: RxBatch,
    /// How many receives in a row found something while timers were due.
    behind: u32,
    lanes: Incoming,
}

/// What a look at the socket came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Received {
    /// Another thread is at it.
    Busy,
    /// Nothing waits, or nothing will come any more.
    Nothing,
    /// Something came; more may wait.
    Some,
    /// Something came, but nothing is left of what waited when the timers became due.
    CaughtUp,
}

/// The sending side of the link.
pub(crate) struct Tx {
    half: Box<dyn Transmit>,
    batch: TxBatch,
}

/// What the threads that drive a device share.
pub(crate) struct Shared {
    rx: Mutex<Rx>,
    pub(crate) core: Mutex<Core>,
    tx: Noted<Tx>,
    /// Its batch is empty whenever the lock is free.
    acks: Option<Mutex<Tx>>,
    /// The engine has acknowledgements that wait for somebody to post.
    held: AtomicBool,
    /// The batch holds packets that the socket had no room for.
    pub(crate) tx_blocked: AtomicBool,
    /// A lane is full, and queue pairs wait for it.
    lanes_blocked: AtomicBool,
    /// Queue pairs use lanes.
    has_lanes: AtomicBool,
    /// Copies of GPUs' memory are under way.
    copying: AtomicBool,
    /// How often was driven, and how often in a row nothing went over UDP then.
    turns: AtomicU32,
    quiet: AtomicU32,
    /// When the engine wants `handle_timeout`, in nanoseconds; [`NEVER`] when it does not.
    engine_due: AtomicU64,
    /// When the link wants `transmit`, likewise.
    link_due: AtomicU64,
    /// When a completion channel is to be told of what it was moderated for, likewise.
    channels_due: AtomicU64,
    /// Until when the progress thread sleeps.
    pub(crate) doze: Doze,
    /// Whether threads of the application drive.
    pub(crate) application: Application,
    /// The device is being dropped.
    pub(crate) stop: AtomicBool,
    /// What the port is good for. Written under core, so that its changes and the events that tell of them are in one order.
    port: (AtomicBool, AtomicBool),
    /// The link broke; said once.
    broken: AtomicBool,
    waker: Waker,
    /// By [`ticks`].
    epoch: u64,
}

/// The ICRC for the link's batches.
fn seal() -> impl Seal + 'static {
    let mut flows = FlowCache::default();
    let mut last = None;
    move |packet: &mut [u8], envelope: &Envelope| {
        let (src, dst) = (envelope.src, envelope.dst);
        // What is not the first of its run goes where the one before went: to look it up would cost as much as a tenth of its CRC.
        let flow = match last {
            Some(flow) if envelope.ident != 0 => flow,
            _ => *last.insert(flows.flow(src.ip(), dst.ip(), src.port(), dst.port())),
        };
        flow.seal(envelope.ident, packet);
    }
}

/// Whether a batch is short and holds nothing but acknowledgements, positive or negative.
fn is_acks(batch: &TxBatch) -> bool {
    let ack = Opcode::RcAcknowledge.code();
    (1..=ACKS).contains(&batch.len()) && batch.packets().all(|(_, packet)| packet.first() == Some(&ack))
}

impl Shared {
    pub(crate) fn new(
        local: SocketAddr,
        rx: Box<dyn Receive>,
        tx: Box<dyn Transmit>,
        acks: Option<Box<dyn Transmit>>,
        waker: Waker,
        core: Core,
    ) -> Self {
        let lane = |half| {
            let batch = TxBatch::new(local, seal());
            Tx { half, batch }
        };
        Self {
            rx: Mutex::new(Rx {
                half: rx,
                batch: RxBatch::new(local),
                behind: 0,
                lanes: Incoming::default(),
            }),
            core: Mutex::new(core),
            tx: Noted::new(lane(tx)),
            acks: acks.map(|half| Mutex::new(lane(half))),
            held: AtomicBool::new(false),
            tx_blocked: AtomicBool::new(false),
            lanes_blocked: AtomicBool::new(false),
            has_lanes: AtomicBool::new(false),
            copying: AtomicBool::new(false),
            turns: AtomicU32::new(0),
            quiet: AtomicU32::new(0),
            engine_due: AtomicU64::new(NEVER),
            link_due: AtomicU64::new(NEVER),
            channels_due: AtomicU64::new(NEVER),
            doze: Doze::new(),
            application: Application::new(),
            stop: AtomicBool::new(false),
            port: (AtomicBool::new(true), AtomicBool::new(true)),
            broken: AtomicBool::new(false),
            waker,
            epoch: ticks(),
        }
    }

    /// The time by the device's clock.
    pub(crate) fn now(&self) -> Instant {
        // It never goes back; 2^64 ns are 584 years.
        Instant(ticks().saturating_sub(self.epoch))
    }

    /// The time, or one that is later by [`COARSE`] at most: from which on a deadline may be counted that is [`FAR`] away.
    pub(crate) fn about_now(&self) -> Instant {
        Instant((coarse_ticks() + COARSE).saturating_sub(self.epoch))
    }

    /// The next deadline of engine, link and channels; `None` when there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        let due = [&self.engine_due, &self.link_due, &self.channels_due]
            .into_iter()
            .fold(NEVER, |least, due| least.min(due.load(Ordering::SeqCst)));
        (due != NEVER).then_some(Instant(due))
    }

    /// Drives on behalf of a thread of the application; the progress thread then keeps out of the way.
    pub(crate) fn drive_for_application(&self) {
        self.application.drive(|| {
            self.drive();
        });
    }

    /// Drives on behalf of the progress thread; `false` when there was nothing to do or another thread is at it.
    pub(crate) fn drive_for_progress(&self) -> bool {
        let busy = self.drive();
        if self.held.load(Ordering::Relaxed) {
            let since = self.now();
            let hold = if self.is_quiet() { LANE_HOLD } else { HOLD };
            while self.held.load(Ordering::Relaxed) && self.now() - since < hold {
                hint::spin_loop();
            }
            self.release_held();
        }
        busy
    }

    /// Whether acknowledgements are held back.
    pub(crate) fn holds(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Sends the acknowledgements held back, if any.
    fn release_held(&self) {
        if self.held.load(Ordering::Relaxed) {
            self.flush(self.core.lock());
        }
    }

    /// Leaves the acknowledgements to whoever comes next: a thread that posts or polls, or the progress thread, which is woken for it.
    fn hold(&self, core: MutexGuard<'_, Core>) {
        self.held.store(true, Ordering::SeqCst);
        self.settle(core);
        self.wake_for(0);
    }

    /// Receives what has come, handles what is due, sends what there is to send. Never waits; `false` when there was nothing to do or another
    /// thread is at it.
    fn drive(&self) -> bool {
        self.release_held();
        if self.lanes_blocked.load(Ordering::Relaxed) {
            self.unblock_lanes();
        }
        if self.passes_over_udp() {
            return matches!(self.receive(false, false), Received::Some);
        }
        let late = self.if_passed(&self.engine_due);
        let received = self.receive(late.is_some(), true);
        let late = late.filter(|_| matches!(received, Received::Nothing | Received::CaughtUp));
        let something = matches!(received, Received::Some | Received::CaughtUp);
        let blocked = self.tx_blocked.load(Ordering::Relaxed);
        let telling = self.if_passed(&self.channels_due);
        if late.is_none() && telling.is_none() && !blocked && self.if_passed(&self.link_due).is_none() {
            return something;
        }
        let mut core = self.core.lock();
        if let Some(now) = late {
            self.engine_due.store(NEVER, Ordering::SeqCst);
            core.handle_timeout(now);
        }
        if let Some(now) = telling {
            core.tell_moderated(now);
        }
        self.flush_blocked(core);
        something || !blocked || !self.tx_blocked.load(Ordering::Relaxed)
    }

    /// The time, when the deadline has passed.
    fn if_passed(&self, due: &AtomicU64) -> Option<Instant> {
        let due = due.load(Ordering::SeqCst);
        if due == NEVER {
            return None;
        }
        Some(self.now()).filter(|now| now.0 >= due)
    }

    /// Whether this drive looks at the lanes alone, without a system call or a look at the clock: all but every so many, while nothing goes over UDP.
    fn passes_over_udp(&self) -> bool {
        if !self.has_lanes.load(Ordering::Relaxed) || !self.is_quiet() {
            return false;
        }
        // Two threads may count as one: no matter.
        let turn = self.turns.load(Ordering::Relaxed).wrapping_add(1);
        self.turns.store(turn, Ordering::Relaxed);
        !turn.is_multiple_of(UDP_TURN)
    }

    /// Has the next drive look at all there is: whoever slept knows not what for it was woken.
    pub(crate) fn look_at_all(&self) {
        self.turns.store(u32::MAX, Ordering::Relaxed);
    }

    /// Whether nothing has gone over UDP for a while.
    fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Relaxed) >= QUIET
    }

    /// Receives once from the lanes, and from the link when `udp`; `late` when timers are due.
    fn receive(&self, late: bool, udp: bool) -> Received {
        let Some(mut rx) = self.rx.try_lock() else {
            return Received::Busy;
        };
        let Rx {
            half,
            batch,
            behind,
            lanes,
        } = &mut *rx;
        let taken = self.receive_from_lanes(lanes);
        if !udp {
            return if taken.some { Received::Some } else { Received::Nothing };
        }
        let messages = match half.receive(batch) {
            Ok(messages) => messages,
            Err(error) => {
                self.fail(&error);
                return Received::Nothing;
            }
        };
        let quiet = if messages == 0 {
            self.quiet.load(Ordering::Relaxed).saturating_add(1)
        } else {
            0
        };
        self.quiet.store(quiet, Ordering::Relaxed);
        if messages == 0 && !taken.more {
            *behind = 0;
            return if taken.some {
                Received::CaughtUp
            } else {
                Received::Nothing
            };
        }
        *behind = if late { *behind + 1 } else { 0 };
        let enough = if messages == 0 { LANE_BACKLOG } else { BACKLOG };
        let received = if *behind >= enough {
            *behind = 0;
            Received::CaughtUp
        } else {
            Received::Some
        };
        let mut datagrams = batch.datagrams().peekable();
        while datagrams.peek().is_some() {
            let now = self.now();
            let mut core = self.core.lock();
            for datagram in datagrams.by_ref().take(STRIDE) {
                core.receive(now, &datagram);
            }
            core.store_writes(|| now);
            if messages == 1 && datagrams.peek().is_none() && core.endpoint.only_acknowledges() {
                self.hold(core);
            } else {
                self.flush(core);
            }
        }
        received
    }

    /// Delivers completions and events, and sends what the engine has to send. Called after every change to the engine that may lead to any of these.
    pub(crate) fn flush<'a>(&'a self, core: MutexGuard<'a, Core>) {
        let now = self.now();
        self.flush_with(core, now, false);
    }

    /// As [`flush`](Self::flush) at a time that is known.
    pub(crate) fn flush_at<'a>(&'a self, core: MutexGuard<'a, Core>, now: Instant) {
        self.flush_with(core, now, false);
    }

    /// As [`flush`](Self::flush), and calls the link even when the engine has nothing: it may hold something that is due, or be blocked.
    fn flush_blocked<'a>(&'a self, core: MutexGuard<'a, Core>) {
        let now = self.now();
        self.flush_with(core, now, true);
    }

    /// As [`flush`](Self::flush), but waits for tx: called before a queue pair falls silent. A completion that the application has seen of a message
    /// means that the peer will hear so.
    pub(crate) fn flush_waiting<'a>(&'a self, core: MutexGuard<'a, Core>) {
        self.held.store(false, Ordering::Relaxed);
        // Under core, as the order allows: nobody waits for core under tx.
        let tx = self.tx.lock();
        if self.tx.serve(core, tx, |core, tx| self.fill_and_send(core, tx, false)) {
            self.flush(self.core.lock());
        }
        // An acknowledgement may be behind what a full lane has no room for.
        let since = Clock::now();
        while self.lanes_blocked.load(Ordering::Relaxed) && since.elapsed() < LAST_WORDS {
            self.unblock_lanes();
            thread::yield_now();
        }
    }

    /// As [`flush`](Self::flush), after requests were posted: mostly they are on their lane already.
    pub(crate) fn flush_posted<'a>(&'a self, core: MutexGuard<'a, Core>) {
        if !core.sends_nothing() {
            return self.flush(core);
        }
        // What was held has gone along.
        if self.held.load(Ordering::Relaxed) {
            self.held.store(false, Ordering::Relaxed);
        }
        self.settle(core);
    }

    fn flush_with<'a>(&'a self, mut core: MutexGuard<'a, Core>, now: Instant, mut force: bool) {
        // Under core: nobody holds anything back at the same time.
        self.held.store(false, Ordering::Relaxed);
        // Before a lane shows the peer that its message was received.
        core.deliver(|| now);
        if !core.fill_lanes(now) && !force {
            return self.settle(core);
        }
        self.tx.pass(
            core,
            |core, tx| self.fill_and_send(core, tx, mem::take(&mut force)),
            |core| self.settle(core),
            || {
                let core = self.core.lock();
                self.held.store(false, Ordering::Relaxed);
                core
            },
        );
    }

    /// Sends what the engine has to send, as far as the batch has room. Says whether there is more.
    fn fill_and_send<'a>(&'a self, mut core: MutexGuard<'a, Core>, mut tx: MutexGuard<'a, Tx>, force: bool) -> bool {
        let now = self.now();
        core.deliver(|| now);
        let filled = core.fill(now, &mut tx.batch);
        let blocked = if let Some(mut acks) = self.beside(&tx.batch, force || filled.in_order) {
            mem::swap(&mut tx.batch, &mut acks.batch);
            drop(tx);
            self.settle(core);
            self.send_acks(&mut acks, now);
            false
        } else {
            self.settle(core);
            let blocked = self.send(&mut tx, now, force);
            drop(tx);
            blocked
        };
        filled.full && !blocked
    }

    /// The sending half for acknowledgements, when `batch` is made of them and the half is there and free. Not when the batch is to go `by_turns`.
    fn beside(&self, batch: &TxBatch, by_turns: bool) -> Option<MutexGuard<'_, Tx>> {
        if by_turns || !is_acks(batch) {
            return None;
        }
        self.acks.as_ref()?.try_lock()
    }

    fn send_acks(&self, acks: &mut Tx, now: Instant) {
        self.quiet.store(0, Ordering::Relaxed);
        if let Err(error) = acks.half.transmit(&mut acks.batch, now) {
            self.fail(&error);
        }
        // What the socket has no room for is lost, as it may be on any network: the requester asks again.
        acks.batch.clear();
    }

    /// The end of a section under core: delivers, and makes the engine's deadline known, waking the progress thread if it sleeps beyond it.
    fn settle(&self, mut core: MutexGuard<'_, Core>) {
        core.deliver(|| self.now());
        let due = core.due().map_or(NEVER, |due| due.0);
        // One that is later than what is known is not made so: who comes at the earlier one finds nothing due, and then makes this one known. The store costs as much as a whole record.
        if due < self.engine_due.load(Ordering::Relaxed) {
            self.engine_due.store(due, Ordering::SeqCst);
        }
        let wake = core.ring();
        let blocked = core.lanes.is_blocked();
        let changed = self.lanes_blocked.load(Ordering::Relaxed) != blocked;
        if changed {
            self.lanes_blocked.store(blocked, Ordering::SeqCst);
        }
        let channels = core.moderation_due().map_or(NEVER, |due| due.0);
        // Mostly never; a look costs less than a store that all must see at once, and under core nobody else stores.
        if self.channels_due.load(Ordering::Relaxed) != channels {
            self.channels_due.store(channels, Ordering::SeqCst);
        }
        drop(core);
        // Who was to tell of room may have rung before the progress thread could know that somebody waits.
        let at_once = wake.own || changed && blocked;
        self.wake_for(if at_once { 0 } else { due.min(channels) });
        wake.others.iter().for_each(|connection| connection.wake());
    }

    /// Delivers completions and events only: for changes that send nothing.
    pub(crate) fn deliver(&self, core: MutexGuard<'_, Core>) {
        self.settle(core);
    }

    /// Gives the batch to the link; whether the link is blocked now.
    fn send(&self, tx: &mut Tx, now: Instant, force: bool) -> bool {
        if tx.batch.is_empty() && !force {
            return false;
        }
        self.quiet.store(0, Ordering::Relaxed);
        if let Err(error) = tx.half.transmit(&mut tx.batch, now) {
            tx.batch.clear();
            self.fail(&error);
        }
        let due = tx.half.due().map_or(NEVER, |due| due.0);
        self.link_due.store(due, Ordering::SeqCst);
        let blocked = !tx.batch.is_empty();
        self.tx_blocked.store(blocked, Ordering::SeqCst);
        self.wake_for(if blocked { 0 } else { due });
        blocked
    }

    /// Wakes the progress thread when it sleeps beyond `due`.
    fn wake_for(&self, due: u64) {
        if self.doze.is_beyond(due) {
            self.waker.wake();
        }
    }

    /// Has the progress thread end, wherever it is.
    pub(crate) fn stop(&self, progress: &Thread) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
        progress.unpark();
    }

    /// What the port is good for now.
    pub(crate) fn port(&self) -> PortState {
        PortState {
            active: self.port.0.load(Ordering::Acquire),
            addressed: self.port.1.load(Ordering::Acquire),
        }
    }

    /// The port has changed: tells who listens what is new.
    pub(crate) fn set_port(&self, now: PortState) {
        let core = self.core.lock();
        let before = self.port();
        self.port.0.store(now.active, Ordering::Release);
        self.port.1.store(now.addressed, Ordering::Release);
        let gid = (now.addressed != before.addressed).then_some(PortEvent::GidChange);
        let link = (now.active != before.active).then_some(if now.active {
            PortEvent::Active
        } else {
            PortEvent::Error
        });
        for event in gid.into_iter().chain(link) {
            for listener in &core.listeners {
                listener.push(Event::Port(event));
            }
        }
    }

    /// The link broke: says so once, here and to the owners of contexts and queue pairs. What is outstanding then fails by its timeouts.
    fn fail(&self, error: &dyn std::fmt::Display) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            tracing::error!("the soft device's link failed: {error}");
            self.tell_fatal();
        }
    }

    /// Tells every owner of a queue pair that the device is lost. Skipped where the caller holds the core already: the timeouts tell them then.
    pub(crate) fn tell_fatal(&self) {
        if let Some(core) = self.core.try_lock() {
            core.tell_fatal();
        }
    }
}

#[cfg(test)]
mod tests;

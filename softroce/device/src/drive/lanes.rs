//! The shm link's part of driving: receiving from rings, and messages of other processes about
//! them.

use std::os::fd::OwnedFd;
use std::thread;

use doorbell_roce_proto::{Instant, Qpn};

use super::Shared;
use crate::gpu::{self, Handle};
use crate::host::{Arrival, MemberId, Message};
use crate::lanes::{Incoming, Taken, lane_of};
use crate::local::segment::SegmentId;
use crate::local::{Kind, Receiver};
use crate::state::Core;
use crate::sync::Ordering;

/// After this many records, or bytes of them, the clock is read: timers may be due.
const MANY: usize = 8;
const LONG: usize = 32 << 10;

/// Records of one ring that are handled under one lock of core.
#[derive(Default)]
struct Batch {
    /// The time, if a record needed it.
    now: Option<Instant>,
    count: usize,
    /// Payload bytes.
    bytes: usize,
    /// Datagrams forwarded from other hosts are among them.
    datagrams: bool,
}

impl Shared {
    /// Hands the records of all rings to the engine and sends its responses.
    pub(super) fn receive_from_lanes(&self, lanes: &mut Incoming) -> Taken {
        let mut at = 0;
        let copying = self.copying.load(Ordering::Relaxed);
        if copying {
            self.finish_copies(lanes);
        }
        let mut taken = lanes.take(
            || (self.core.lock(), Batch::default()),
            |(core, batch), lane, record| {
                batch.count += 1;
                batch.bytes += record.body.len();
                batch.datagrams |= record.kind == Kind::Datagram;
                core.receive_record(|| *batch.now.get_or_insert_with(|| self.now()), lane, &record)
            },
            |(mut core, mut batch), waiting| {
                if batch.datagrams {
                    core.store_writes(|| self.now());
                }
                self.begin_copies(&mut core);
                if batch.count >= MANY || batch.bytes >= LONG {
                    batch.now = Some(self.now());
                }
                at = batch.now.map_or(at, |now| now.0);
                let room = waiting.and_then(|member| core.lanes.connection(member));
                if waiting.is_some() && room.is_none() {
                    // The waiting sender may be this process.
                    core.unblock_lanes();
                }
                // Waking the progress thread for it would cost more than a record.
                if batch.count == 1 && core.endpoint.only_acknowledges() && !self.doze.is_beyond(0) {
                    self.hold(core);
                } else if batch.datagrams || waiting.is_some() || !core.sends_nothing() {
                    self.flush_at(core, batch.now.unwrap_or_else(|| self.now()));
                } else if !core.is_at_rest() || batch.now.is_some() {
                    self.settle(core);
                } else {
                    drop(core);
                }
                if let Some(connection) = room {
                    connection.wake();
                }
            },
        );
        // Timers run in a drive that polls everything. Copies from shm may take long: timers must
        // not wait for many of them.
        if at > self.engine_due.load(Ordering::Relaxed) {
            self.look_at_all();
        }
        // Copies in flight must be polled.
        taken.some |= copying;
        taken
    }

    /// Starts the copies that records requested.
    fn begin_copies(&self, core: &mut Core) {
        if !core.copies.is_idle() {
            core.copies.begin();
            // This thread may stop polling once it has what it waits for.
            if !self.copying.swap(true, Ordering::SeqCst) {
                self.wake_for(0);
            }
        }
    }

    /// Polls the copies, and delivers what waited for the finished ones.
    fn finish_copies(&self, lanes: &mut Incoming) {
        let mut core = self.core.lock();
        let now = self.now();
        let mut rings = Vec::new();
        if let Some(done) = core.copies.look() {
            let mut failed = done.failed;
            rings = lanes.release(core.copies.done(), |qpn| failed.push(qpn));
            core.finish_copies(now, &done.landings, failed);
        }
        core.copies.begin();
        core.open_gate(|| now);
        if !core.is_copying() {
            self.copying.store(false, Ordering::SeqCst);
        }
        let connections: Vec<_> = rings
            .iter()
            .filter_map(|member| core.lanes.connection(*member))
            .collect();
        if connections.len() < rings.len() {
            // The waiting sender may be this process.
            core.unblock_lanes();
        }
        self.flush_at(core, now);
        connections.iter().for_each(|connection| connection.wake());
    }

    /// Waits until no copy for a queue pair, or of a region, is in flight; then unpins the region.
    /// No lock may be held.
    pub(crate) fn wait_for_copies(&self, qpn: Option<Qpn>, key: Option<u32>) {
        while self.copying.load(Ordering::SeqCst) && self.core.lock().copies.uses(qpn, key) {
            self.drive();
            thread::yield_now();
        }
        if let Some(key) = key {
            let pinned = self.core.lock().copies.unpin(key);
            pinned.release();
        }
    }

    /// GPU memory is registered here: from now on peers may share theirs.
    pub(crate) fn take_devices(&self, range: &gpu::Range) {
        let memory = range.allocation.memory();
        let known = self.core.lock().copies.has_short(memory);
        if !known {
            let short = gpu::make_short(memory);
            self.core.lock().copies.add_short(short);
        }
        self.rx.lock().lanes.take_devices();
    }

    /// Sends what waited for credits on rings that have space again.
    pub(super) fn unblock_lanes(&self) {
        let mut core = self.core.lock();
        core.unblock_lanes();
        self.flush(core);
    }

    /// Before the progress thread sleeps: makes senders wake it. `false` when records are queued
    /// already.
    pub(crate) fn sleep_on_lanes(&self) -> bool {
        // The credit wake-up may have been consumed before the ring was known to be full, by a
        // thread that was not asleep when that was published. So the sleeper polls again, and
        // requests another wake-up if there are still no credits.
        if self.lanes_blocked.load(Ordering::SeqCst) {
            self.unblock_lanes();
        }
        !self.copying.load(Ordering::SeqCst) && self.rx.lock().lanes.sleep()
    }

    /// The progress thread is awake.
    pub(crate) fn wake_on_lanes(&self) {
        self.rx.lock().lanes.awake();
    }

    /// Adds the ring of this process to itself.
    pub(crate) fn use_lanes(&self, me: MemberId, receiver: Receiver) {
        self.core.lock().copies.set_own_lane(lane_of(me));
        self.rx.lock().lanes.add(me, receiver);
        self.has_lanes.store(true, Ordering::Relaxed);
    }

    /// Handles a message of another process on this address.
    pub(crate) fn handle_arrival(&self, arrival: Arrival) {
        match arrival {
            Arrival::Gone(member) => self.forget_member(member),
            Arrival::Message {
                from,
                pid,
                message,
                fds,
            } => {
                let fd = fds.into_iter().next();
                match (message, fd) {
                    (Message::Lane, Some(fd)) => match Receiver::attach(fd, pid) {
                        Ok(receiver) => self.rx.lock().lanes.add(from, receiver),
                        Err(error) => tracing::warn!("another process sent what is no lane: {error}"),
                    },
                    (Message::Segment { id }, Some(fd)) => {
                        if let Ok(id) = u32::try_from(id) {
                            self.rx.lock().lanes.add_segment(from, SegmentId(id), fd);
                        }
                    }
                    (Message::Released { id }, _) => {
                        if let Ok(id) = u32::try_from(id) {
                            self.rx.lock().lanes.remove_segment(from, SegmentId(id));
                            self.core.lock().copies.remove_import(lane_of(from), SegmentId(id));
                        }
                    }
                    (Message::Device { id, len, own }, Some(fd)) => {
                        let imported = self.import(from, pid, (id, len), (fd, own));
                        self.rx.lock().lanes.add_device(from, imported);
                    }
                    (Message::Lane | Message::Segment { .. } | Message::Device { .. }, None) => {}
                }
            }
        }
    }

    /// Imports GPU memory that a member shares. Whether that is possible.
    fn import(&self, from: MemberId, pid: Option<i32>, (id, len): (u64, u64), (fd, own): (OwnedFd, bool)) -> bool {
        let (Ok(id), Ok(len)) = (u32::try_from(id), usize::try_from(len)) else {
            return false;
        };
        let (lane, id) = (lane_of(from), SegmentId(id));
        if pid.is_some_and(|pid| u32::try_from(pid) == Ok(std::process::id())) {
            return self.core.lock().copies.add_own(lane, id);
        }
        match Handle::from_descriptor(fd, own) {
            Ok(handle) => self.core.lock().copies.add_import(lane, id, handle, len),
            Err(error) => {
                tracing::warn!("another process sent what is no memory of a GPU: {error}");
                false
            }
        }
    }

    /// A member is gone: what it sent is still received, what is sent to it is dropped.
    fn forget_member(&self, member: MemberId) {
        let mut rx = self.rx.lock();
        let mut core = self.core.lock();
        let now = self.now();
        rx.lanes
            .remove(member, |lane, record| core.receive_record(|| now, lane, &record));
        core.store_writes(|| now);
        self.begin_copies(&mut core);
        core.forget_member(now, member);
        self.flush(core);
    }
}

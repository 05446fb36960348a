//! Driving of shm links: receiving from rings, and messages of other processes about them.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use doorbell_roce_proto::{Instant, Qpn};

use super::Shared;
use crate::direct::Access;
use crate::gpu::{self, Handle};
use crate::host::{HostEvent, MemberId, Message};
use crate::links::shm::{IncomingRings, Polled, link_to};
use crate::links::shm_ring::segment::SegmentId;
use crate::links::shm_ring::{MappedSegment, Receiver, RecordKind, SegmentAccess};
use crate::state::Core;
use crate::sync::Ordering;
use crate::wakeup::{Deadline, Reasons};

/// After this many records, or bytes of them, the clock is read: timers may be due.
const CLOCK_RECORDS: usize = 8;
const CLOCK_BYTES: usize = 32 << 10;

/// The longest sleep between two reads of the access words.
const ACCESS_PAUSE_MAX: Duration = Duration::from_micros(200);

#[derive(Default)]
struct Batch {
    /// The time, if a record needed it.
    now: Option<Instant>,
    count: usize,
    bytes: usize,
    /// Datagrams forwarded from other hosts are among them.
    datagrams: bool,
}

impl Shared {
    pub(super) fn receive_shm(&self, rings: &mut IncomingRings) -> Polled {
        let mut at = 0;
        let copying = self.wakeup.has(Reasons::COPYING);
        if copying {
            self.finish_copies(rings);
        }
        let mut polled = rings.receive(
            || (self.core.lock(), Batch::default()),
            |(core, batch), link, record| {
                batch.count += 1;
                batch.bytes += record.body.len();
                batch.datagrams |= record.kind == RecordKind::Datagram;
                core.receive_record(|| *batch.now.get_or_insert_with(|| self.now()), link, &record)
            },
            |(mut core, mut batch), waiting| {
                if batch.datagrams {
                    core.finish_staged_writes(|| self.now());
                }
                self.begin_copies(&mut core);
                if batch.count >= CLOCK_RECORDS || batch.bytes >= CLOCK_BYTES {
                    batch.now = Some(self.now());
                }
                at = batch.now.map_or(at, |now| now.0);
                let peer = waiting.and_then(|member| core.rings.connection(member));
                if waiting.is_some() && peer.is_none() {
                    // The waiting sender may be this process.
                    core.unblock_rings();
                }
                // Waking the progress thread for it would cost more than a record.
                if batch.count == 1 && core.endpoint.has_only_acks() && !self.wakeup.is_asleep() {
                    self.delay_ack(core);
                } else if batch.datagrams || waiting.is_some() || !core.has_nothing_to_send() {
                    self.flush_at(core, batch.now.unwrap_or_else(|| self.now()));
                } else if !core.is_idle() || batch.now.is_some() {
                    self.publish_and_unlock(core);
                } else {
                    drop(core);
                }
                if let Some(connection) = peer {
                    connection.wake();
                }
            },
        );
        // Timers run in a drive that polls everything, and do not wait for many long copies.
        if at > self.wakeup.deadline(Deadline::Engine) {
            self.poll_all_next();
        }
        polled.any |= copying;
        polled
    }

    fn begin_copies(&self, core: &mut Core) {
        if !core.copying.copies.is_idle() {
            core.copying.copies.begin();
            // This thread may stop polling once it has what it waits for.
            if self.wakeup.set(Reasons::COPYING, true) {
                self.wakeup.wake_before(0);
            }
        }
    }

    fn finish_copies(&self, rings: &mut IncomingRings) {
        let mut core = self.core.lock();
        let now = self.now();
        let mut waiting = Vec::new();
        if let Some(done) = core.copying.copies.poll() {
            let mut failed = done.failed;
            waiting = rings.release(core.copying.copies.done(), |qpn| failed.push(qpn));
            core.finish_copies(now, &done.staged, failed);
        }
        core.copying.copies.begin();
        core.deliver_deferred(|| now);
        if !core.is_copying() {
            self.wakeup.set(Reasons::COPYING, false);
        }
        let connections: Vec<_> = waiting
            .iter()
            .filter_map(|member| core.rings.connection(*member))
            .collect();
        if connections.len() < waiting.len() {
            // The waiting sender may be this process.
            core.unblock_rings();
        }
        self.flush_at(core, now);
        connections.iter().for_each(|connection| connection.wake());
    }

    /// Waits until no copy and no direct access for `qpn` or of `key`, which was withdrawn, is in
    /// progress. No lock may be held.
    pub(crate) fn wait_for_access(&self, qpn: Option<Qpn>, key: Option<u32>) {
        self.wait_for_copies(qpn, key);
        self.wait_for_direct(qpn, key);
    }

    /// Waits for the direct accesses of peers alone. A peer that is stopped during one delays it.
    pub(crate) fn wait_for_direct(&self, qpn: Option<Qpn>, key: Option<u32>) {
        let names = |access: Access| qpn == Some(access.qpn) || key == Some(access.key);
        let mut pause = Duration::ZERO;
        while self.rx.lock().rings.is_accessed(names) {
            // A copy takes microseconds, unless the peer has no processor.
            thread::yield_now();
            thread::sleep(pause);
            pause = (2 * pause + Duration::from_nanos(100)).min(ACCESS_PAUSE_MAX);
        }
    }

    /// Waits until no copy for `qpn` or of `key` is in flight, then unpins. No lock may be held.
    pub(crate) fn wait_for_copies(&self, qpn: Option<Qpn>, key: Option<u32>) {
        while self.wakeup.has(Reasons::COPYING) && self.core.lock().copying.copies.uses(qpn, key) {
            self.drive();
            thread::yield_now();
        }
        if let Some(key) = key {
            let pinned = self.core.lock().copying.copies.unpin(key);
            pinned.release();
        }
    }

    /// GPU memory is registered here: from now on peers may share theirs.
    pub(crate) fn enable_device_memory(&self, range: &gpu::Range) {
        let memory = range.allocation.memory();
        let is_prepared = self.core.lock().copying.copies.is_prepared(memory);
        if !is_prepared {
            let mut device = gpu::PreparedDevice::new(memory);
            let mut core = self.core.lock();
            core.memory.prepare_udp_staging(device.udp.take());
            core.copying.copies.add(device);
        }
        self.rx.lock().rings.enable_device_memory();
    }

    /// Sends what waited for credits on rings that have space again.
    pub(super) fn unblock_rings(&self) {
        let mut core = self.core.lock();
        core.unblock_rings();
        self.flush(core);
    }

    /// Makes senders wake the progress thread. `false` when records are queued already.
    pub(crate) fn prepare_shm_sleep(&self) -> bool {
        // The credit wake-up may have been consumed before the ring was known to be full. So the
        // sleeper polls again, and requests another wake-up if there are still no credits.
        if self.wakeup.has(Reasons::RING_BLOCKED) {
            self.unblock_rings();
        }
        self.rx.lock().rings.sleep()
    }

    pub(crate) fn end_shm_sleep(&self) {
        self.rx.lock().rings.awake();
    }

    pub(crate) fn enable_shm(&self, me: MemberId, receiver: Receiver) {
        self.core.lock().copying.copies.set_loopback_link(link_to(me));
        self.rx.lock().rings.add(me, receiver);
        self.shm_enabled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn handle_host_event(&self, event: HostEvent) {
        match event {
            HostEvent::Gone(member) => self.remove_member(member),
            HostEvent::Message {
                from,
                pid,
                message,
                fds,
            } => {
                let fd = fds.into_iter().next();
                match (message, fd) {
                    (Message::Ring, Some(fd)) => match Receiver::attach(fd) {
                        Ok(receiver) => self.rx.lock().rings.add(from, receiver),
                        Err(error) => tracing::warn!("another process sent an invalid shm ring: {error}"),
                    },
                    (Message::Segment { id }, Some(fd)) => {
                        if let Ok(id) = u32::try_from(id) {
                            self.rx.lock().rings.add_segment(from, SegmentId(id), fd);
                        }
                    }
                    (Message::Released { id }, _) => {
                        if let Ok(id) = u32::try_from(id) {
                            self.rx.lock().rings.remove_segment(from, SegmentId(id));
                            let mut core = self.core.lock();
                            core.copying.copies.remove_import(link_to(from), SegmentId(id));
                            core.direct.peers.remove_segment(link_to(from), SegmentId(id));
                        }
                    }
                    (Message::Device { id, len, own }, Some(fd)) => {
                        let imported = self.import(from, pid, (id, len), (fd, own));
                        self.rx.lock().rings.add_device_memory(from, imported);
                    }
                    (Message::Tables, Some(fd)) => self.core.lock().add_direct_peer(link_to(from), pid, fd),
                    (Message::Exposed { id, writable }, Some(fd)) => self.add_exposed(from, id, fd, writable),
                    (_, None) => {}
                }
            }
        }
    }

    fn add_exposed(&self, from: MemberId, id: u64, fd: OwnedFd, writable: bool) {
        let Ok(id) = u32::try_from(id) else {
            return;
        };
        let access = if writable {
            SegmentAccess::Write
        } else {
            SegmentAccess::Read
        };
        // Mapping may take milliseconds: not under the lock.
        match MappedSegment::new(SegmentId(id), fd, access) {
            Ok(segment) => self.core.lock().direct.peers.add_segment(link_to(from), segment),
            Err(error) => tracing::debug!("{error}"),
        }
    }

    fn import(&self, from: MemberId, pid: Option<i32>, (id, len): (u64, u64), (fd, own): (OwnedFd, bool)) -> bool {
        let (Ok(id), Ok(len)) = (u32::try_from(id), usize::try_from(len)) else {
            return false;
        };
        let (link, id) = (link_to(from), SegmentId(id));
        if pid.is_some_and(|pid| u32::try_from(pid) == Ok(std::process::id())) {
            return self.core.lock().copying.copies.add_local(link, id);
        }
        match Handle::from_descriptor(fd, own) {
            Ok(handle) => self.core.lock().copying.copies.add_import(link, id, handle, len),
            Err(error) => {
                tracing::warn!("another process sent an invalid handle of GPU memory: {error}");
                false
            }
        }
    }

    /// A member is gone: what it sent is still received, what is sent to it is dropped.
    fn remove_member(&self, member: MemberId) {
        let mut rx = self.rx.lock();
        let mut core = self.core.lock();
        let now = self.now();
        rx.rings
            .remove(member, |link, record| core.receive_record(|| now, link, &record));
        core.finish_staged_writes(|| now);
        self.begin_copies(&mut core);
        core.remove_member(now, member);
        self.flush(core);
    }
}

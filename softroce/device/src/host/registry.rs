//! The registry of a group: a sealed memfd that all members map.
//!
//! It holds atomics only: a process may die between any two instructions. Members write their own
//! entries; a dead one's generation marks its entries as free. A member may write anything here: a
//! wrong value at worst misroutes packets.
//!
//! Magic, name, holder and count of services need no model: one word each. A reader of an outdated
//! holder finds out by connecting; the count is the last step of adding.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::size_of;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;

use doorbell_roce_proto::{Qpn, QpnBlock};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::ProtFlags;
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use super::Flags;
use crate::mapping::SharedMapping;
use crate::sync::{AtomicU64, Ordering};

mod blocks;
mod guarded;

use blocks::Blocks;
use guarded::Guarded;

/// The most members of a group.
pub const SLOTS: usize = 1024;

const SERVICES: usize = 4096;

const MAGIC: u64 = u64::from_be_bytes(*b"doorbell");

/// Version of layout and messages. Part of the names, so that incompatible builds do not meet.
pub(super) const VERSION: u32 = 4;

/// A process with the device open. Unique: the slot's next member has another generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MemberId {
    slot: u16,
    generation: u32,
}

impl MemberId {
    const PRESENT: u64 = 1 << 63;

    pub(crate) fn new(slot: u16, generation: u32) -> Self {
        Self { slot, generation }
    }

    /// Its index among the members, below [`SLOTS`].
    pub fn slot(self) -> u16 {
        self.slot
    }

    /// How many members had the slot before it, modulo 2^32.
    pub fn generation(self) -> u32 {
        self.generation
    }

    pub(super) fn pack(self) -> u64 {
        Self::PRESENT | u64::from(self.generation) << 16 | u64::from(self.slot)
    }

    pub(super) fn unpack(word: u64) -> Option<Self> {
        let slot = word as u16;
        (word & Self::PRESENT != 0 && usize::from(slot) < SLOTS).then_some(Self {
            slot,
            generation: (word >> 16) as u32,
        })
    }

    fn live_guard(self) -> u64 {
        u64::from(self.generation) << 1 | 1
    }
}

/// A cache line each: the guard, and the member's attributes.
#[repr(C, align(64))]
struct Member(Guarded);

#[repr(C)]
struct Layout {
    magic: AtomicU64,
    name: AtomicU64,
    /// The holder of the well-known port, packed; or 0.
    holder: AtomicU64,
    members: [Member; SLOTS],
    blocks: Blocks<{ QpnBlock::COUNT }>,
    /// The listening members, packed, and their services.
    services: [Guarded; SERVICES],
    /// How many were ever added: a change means that a failed search is to be repeated.
    added: AtomicU64,
}

const LEN: NonZeroUsize = NonZeroUsize::new(size_of::<Layout>()).unwrap();

pub(super) struct Registry {
    fd: OwnedFd,
    map: SharedMapping,
}

impl Registry {
    pub(super) fn create() -> io::Result<Self> {
        let fd = memfd_create(
            c"doorbell-registry",
            MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
        )?;
        ftruncate(&fd, LEN.get() as libc::off_t)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
        let registry = Self::map(fd)?;
        let name = RandomState::new().hash_one(std::process::id());
        registry.layout().name.store(name, Ordering::Relaxed);
        registry.layout().magic.store(MAGIC, Ordering::Release);
        Ok(registry)
    }

    pub(super) fn name(&self) -> u64 {
        self.layout().name.load(Ordering::Relaxed)
    }

    /// Maps the registry of a descriptor from a member. `InvalidData` when it is no registry.
    pub(super) fn attach(fd: OwnedFd) -> io::Result<Self> {
        let seals = fcntl(&fd, FcntlArg::F_GET_SEALS).map_or(SealFlag::empty(), SealFlag::from_bits_truncate);
        // A file that cannot shrink raises no SIGBUS here.
        if !seals.contains(SealFlag::F_SEAL_SHRINK) || fstat(&fd)?.st_size != LEN.get() as libc::off_t {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let registry = Self::map(fd)?;
        if registry.layout().magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(registry)
    }

    fn map(fd: OwnedFd) -> io::Result<Self> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let map = SharedMapping::new(&fd, LEN, protection)?;
        Ok(Self { fd, map })
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping is readable and writable, page-aligned, as long as Layout (the file
        // has that size and is sealed against shrinking), and lives as long as `self`. Layout is
        // atomics, for which every bit pattern is a value, and which others may change at any time.
        unsafe { self.map.start().cast().as_ref() }
    }

    /// Makes the caller, the holder of the slot's name, its next member.
    pub(super) fn add_member(&self, slot: u16, flags: Flags, udp_port: u16) -> MemberId {
        let entry = self.entry(slot);
        let last = (entry.guard() >> 1) as u32;
        let me = MemberId::new(slot, last.wrapping_add(1));
        // The last one is dead: its name was free.
        let dead = MemberId::new(slot, last).live_guard() & !1;
        entry.set(dead, u64::from(flags.0) << 16 | u64::from(udp_port), me.live_guard());
        me
    }

    /// The entry of a slot; of another one for an invalid slot.
    fn entry(&self, slot: u16) -> &Guarded {
        &self.layout().members[usize::from(slot) % SLOTS].0
    }

    pub(super) fn mark_gone(&self, member: MemberId) {
        self.entry(member.slot)
            .change(member.live_guard(), member.live_guard() & !1);
    }

    /// Whether it is not known to be gone.
    pub(super) fn is_alive(&self, member: MemberId) -> bool {
        usize::from(member.slot) < SLOTS && self.entry(member.slot).guard() == member.live_guard()
    }

    /// Whether its slot has had no later member, be it dead or alive.
    pub(super) fn is_latest(&self, member: MemberId) -> bool {
        usize::from(member.slot) < SLOTS && self.entry(member.slot).guard() | 1 == member.live_guard()
    }

    fn attributes(&self, member: MemberId) -> Option<u64> {
        let entry = self.layout().members.get(usize::from(member.slot))?;
        entry.0.get(member.live_guard())
    }

    pub(super) fn flags(&self, member: MemberId) -> Option<Flags> {
        self.attributes(member)
            .map(|attributes| Flags((attributes >> 16) as u32))
    }

    pub(super) fn udp_port(&self, member: MemberId) -> Option<u16> {
        self.attributes(member)
            .map(|attributes| attributes as u16)
            .filter(|&port| port != 0)
    }

    pub(super) fn member(&self, slot: u16) -> Option<MemberId> {
        let guard = self.layout().members.get(usize::from(slot))?.0.guard();
        (guard & 1 != 0).then(|| MemberId::new(slot, (guard >> 1) as u32))
    }

    pub(super) fn port_holder(&self) -> Option<MemberId> {
        MemberId::unpack(self.layout().holder.load(Ordering::Acquire)).filter(|&member| self.is_alive(member))
    }

    pub(super) fn set_port_holder(&self, member: MemberId) {
        self.layout().holder.store(member.pack(), Ordering::Release);
    }

    /// As `Blocks::claim`.
    pub(super) fn claim(&self, me: MemberId, start: u16) -> Option<QpnBlock> {
        let index = self
            .layout()
            .blocks
            .claim(me, start.into(), |member| self.is_alive(member))?;
        QpnBlock::new(index as u16)
    }

    pub(super) fn owner_of(&self, qpn: Qpn) -> Option<MemberId> {
        let owner = self.layout().blocks.owner(QpnBlock::of(qpn).index());
        owner.filter(|&owner| self.is_alive(owner))
    }

    // Services: added under the services lock; read without

    /// Adds one; false when there is no space.
    pub(super) fn add_service(&self, id: u64, me: MemberId) -> bool {
        let free = |service: &&Guarded| !MemberId::unpack(service.guard()).is_some_and(|member| self.is_alive(member));
        let Some(service) = self.layout().services.iter().find(free) else {
            return false;
        };
        service.set(0, id, me.pack());
        // A reader of the new count also finds the service.
        self.layout().added.fetch_add(1, Ordering::Release);
        true
    }

    pub(super) fn services_added(&self) -> u64 {
        self.layout().added.load(Ordering::Acquire)
    }

    pub(super) fn remove_service(&self, id: u64, me: MemberId) {
        let services = self.layout().services.iter();
        services
            .filter(|service| service.get(me.pack()) == Some(id))
            .for_each(|service| service.change(me.pack(), 0));
    }

    pub(super) fn find_service(&self, id: u64) -> Option<MemberId> {
        self.layout().services.iter().find_map(|service| {
            let word = service.guard();
            let member = MemberId::unpack(word).filter(|&member| self.is_alive(member))?;
            (service.get(word) == Some(id)).then_some(member)
        })
    }

    pub(super) fn leave(&self, me: MemberId) {
        self.layout()
            .services
            .iter()
            .for_each(|service| service.change(me.pack(), 0));
        let _ = self
            .layout()
            .holder
            .compare_exchange(me.pack(), 0, Ordering::AcqRel, Ordering::Relaxed);
        self.layout().blocks.release_all(me);
        self.mark_gone(me);
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests;

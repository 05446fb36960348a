//! The registration cache: no region in use is evicted, and the limits hold for the rest.

use core::ptr::NonNull;
use std::collections::BTreeSet;
use std::sync::Arc;

use doorbell_verbs::{Buffer, CacheLimits, Local, Memory, MemoryError, PeerWrite, ProtectionDomain, RegistrationCache};
use doorbell_verbs_sys as sys;
use proptest::prelude::*;

use crate::stub::{Stub, Verb};

const PAGE: usize = 4096;
const PAGES: usize = 16;

fn cache(stub: &'static Stub, regions: usize, bytes: u64) -> (ProtectionDomain, RegistrationCache) {
    let pd = stub.open().protection_domain().unwrap();
    let cache = RegistrationCache::new(&pd, CacheLimits { regions, bytes });
    (pd, cache)
}

/// `PAGES` pages that outlive the cache and its buffers: created first, so dropped last.
fn arena() -> (Memory, NonNull<u8>) {
    let mut memory = Memory::zeroed(PAGES * PAGE);
    let start = NonNull::new(memory.as_mut_ptr()).unwrap();
    (memory, start)
}

/// # Safety
/// As for [`RegistrationCache::foreign`].
unsafe fn local(cache: &RegistrationCache, start: NonNull<u8>, at: usize, len: usize) -> Buffer {
    // SAFETY: in the arena by contract.
    unsafe { cache.foreign(start.add(at), len, Local) }.unwrap()
}

#[test]
fn memory_is_registered_once_in_whole_pages() {
    let stub = Stub::new();
    let (_memory, start) = arena();
    let (_pd, cache) = cache(stub, 8, 1 << 20);
    // SAFETY: the arena outlives the cache; no two buffers of it live at once.
    let first = unsafe { local(&cache, start, 5000, 100) }.region();
    assert_eq!((first.addr, first.len), (start.addr().get() as u64 + 4096, 4096));
    // SAFETY: as above.
    let second = unsafe { local(&cache, start, 8000, 192) }.region();
    assert_eq!(first, second);
    assert_eq!((cache.stats().hits, cache.stats().misses, stub.live("mr")), (1, 1, 1));
    // Across the page's end: one region replaces the old one. SAFETY: as above.
    let both = unsafe { local(&cache, start, 8000, 200) }.region();
    assert_eq!((both.addr, both.len, stub.live("mr")), (first.addr, 8192, 1));
    assert_eq!((cache.stats().regions, cache.stats().bytes), (1, 8192));
}

#[test]
fn what_peers_may_reach_is_registered_exactly() {
    let stub = Stub::new();
    let (_memory, start) = arena();
    let (_pd, cache) = cache(stub, 8, 1 << 20);
    let register = |at: usize, len| {
        // SAFETY: the arena outlives the cache; no two buffers of it live at once.
        unsafe { cache.foreign(start.add(at), len, PeerWrite) }
            .unwrap()
            .region()
    };
    let region = register(10, 20);
    assert_eq!((region.addr, region.len), (start.addr().get() as u64 + 10, 20));
    assert_eq!(register(10, 20), region);
    assert_ne!(register(10, 10), region);
    assert_eq!((cache.stats().hits, stub.live("mr")), (1, 2));
}

#[test]
fn shared_memory_is_read_only_and_kept_alive() {
    let stub = Stub::new();
    let (_pd, cache) = cache(stub, 8, 1 << 20);
    let owner = Arc::new(vec![7_u8; 100]);
    let weak = Arc::downgrade(&owner);
    let buffer = cache.shared(&owner, 10..30).unwrap();
    assert_eq!(buffer.region().access & sys::IBV_ACCESS_LOCAL_WRITE, 0);
    assert_eq!((buffer.region().len, buffer.len()), (100, 20));
    assert_eq!(cache.shared(&owner, 0..100).unwrap().region(), buffer.region());
    let error = cache.shared(&owner, 90..101).unwrap_err();
    assert_eq!(
        error.to_string(),
        "bytes 90..101 are beyond the 100 bytes of their owner"
    );
    assert!(matches!(cache.shared(&owner, 5..5), Err(MemoryError::Empty)));
    drop(owner);
    assert!(weak.upgrade().is_some());
    assert_eq!(cache.clear(), 1);
    assert_eq!((&*buffer, stub.live("mr")), (&[7; 20][..], 1));
    drop(buffer);
    assert!(weak.upgrade().is_none());
    assert_eq!(stub.live("mr"), 0);
}

#[test]
fn idle_regions_are_evicted_when_the_device_is_full() {
    let stub = Stub::new();
    let (_memory, start) = arena();
    let (_pd, cache) = cache(stub, 8, 1 << 20);
    // SAFETY: the arena outlives the cache; the buffers don't overlap.
    let (used, _) = unsafe { (local(&cache, start, 0, 1), drop(local(&cache, start, 2 * PAGE, 1))) };
    stub.fail(Verb::RegMr, libc::ENOMEM);
    // SAFETY: as above.
    let other = unsafe { local(&cache, start, 4 * PAGE, 1) };
    assert_eq!((cache.stats().evictions, stub.live("mr")), (1, 2));
    drop((used, other));
    stub.fail(Verb::RegMr, libc::EINVAL);
    // SAFETY: as above.
    assert!(unsafe { cache.foreign(start.add(6 * PAGE), 1, Local) }.is_err());
    assert_eq!((cache.stats().regions, stub.live("mr")), (2, 2));
}

#[derive(Debug, Clone)]
enum Step {
    /// Registers bytes of some pages, and keeps the buffer.
    Take(usize, usize),
    Drop(usize),
    Invalidate(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..PAGES, 1..4_usize).prop_map(|(first, pages)| Step::Take(first, pages)),
        2 => (0..8_usize).prop_map(Step::Drop),
        1 => (0..PAGES, 1..4_usize).prop_map(|(first, pages)| Step::Invalidate(first, pages)),
    ]
}

/// The pages that contain `len` bytes at `start`, counted from `base`.
fn pages(base: u64, start: u64, len: u64) -> BTreeSet<u64> {
    ((start - base) / PAGE as u64..(start - base + len).div_ceil(PAGE as u64)).collect()
}

proptest! {
    /// The model: pages to keep, and buffers given out. A buffer's region is registered and covers
    /// it; the limits hold unless buffers keep more; at the end nothing is registered.
    #[test]
    fn every_buffer_given_out_is_registered(steps in prop::collection::vec(step(), 1..60)) {
        const REGIONS: usize = 3;
        let stub = Stub::new();
        let (memory, start) = arena();
        let (pd, cache) = cache(stub, REGIONS, 8 * PAGE as u64);
        let base = start.addr().get() as u64;
        let mut buffers: Vec<Buffer> = Vec::new();
        for step in steps {
            let misses = cache.stats().misses;
            match step {
                Step::Take(first, count) => {
                    let (at, end) = (first * PAGE + 100, (first + count).min(PAGES) * PAGE - 100);
                    // One byte, at an offset of no other buffer.
                    let at = at + buffers.len();
                    let len = end - at;
                    let overlaps = buffers.iter().any(|other| other.addr() < base + end as u64 && base + (at as u64) < other.addr() + other.len() as u64);
                    if overlaps {
                        continue;
                    }
                    // SAFETY: the arena outlives all, and the buffers don't overlap.
                    buffers.push(unsafe { local(&cache, start, at, len) });
                }
                Step::Drop(index) if index < buffers.len() => drop(buffers.swap_remove(index)),
                Step::Drop(_) => {}
                Step::Invalidate(first, count) => {
                    let range = base + (first * PAGE) as u64..base + ((first + count) * PAGE) as u64;
                    let touched: BTreeSet<u32> = buffers
                        .iter()
                        .map(Buffer::region)
                        .filter(|region| region.addr < range.end && range.start < region.addr + region.len)
                        .map(|region| region.lkey)
                        .collect();
                    prop_assert!(cache.invalidate(range) <= touched.len());
                }
            }
            for buffer in &buffers {
                let region = buffer.region();
                let (addr, len, _) = stub.region(region.lkey).expect("registered");
                prop_assert!(addr <= buffer.addr() && buffer.addr() + buffer.len() as u64 <= addr + len);
                prop_assert_eq!((addr % PAGE as u64, len % PAGE as u64), (0, 0));
            }
            let in_use: BTreeSet<u32> = buffers.iter().map(|buffer| buffer.region().lkey).collect();
            let stats = cache.stats();
            prop_assert!(stub.live("mr") as usize <= stats.regions + in_use.len());
            let used_pages: BTreeSet<u64> = buffers
                .iter()
                .map(Buffer::region)
                .flat_map(|region| pages(base, region.addr, region.len))
                .collect();
            if stats.misses > misses {
                prop_assert!(stats.regions <= REGIONS.max(in_use.len()), "{stats:?}");
                prop_assert!(stats.bytes <= (8 * PAGE as u64).max(used_pages.len() as u64 * PAGE as u64), "{stats:?}");
            }
        }
        cache.invalidate(base..base + (PAGES * PAGE) as u64);
        prop_assert_eq!(cache.stats().regions, 0);
        drop(buffers);
        prop_assert_eq!(stub.live("mr"), 0);
        drop((cache, pd, memory));
        prop_assert_eq!(stub.live("context"), 0);
    }
}

//! A registration cache: registering costs a system call and pins pages, too much per message.
//!
//! The cache records that memory *is* registered; the buffers it gives out decide who may access
//! it. Each holds a reference to its region; idle regions are evicted in LRU order at the limits.
//!
//! There are no hooks into the allocator or munmap(2): they miss what a static linker resolved. The
//! region keeps its user's memory alive; for other memory [`RegistrationCache::invalidate`] must be
//! called.

use core::ffi::c_uint;
use core::ops::Range;
use core::ptr::NonNull;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::buffer::Buffer;
use super::clonable::Frozen;
use super::region::{Backing, Region, check_buffer};
use super::rights::Rights;
use super::storage::PAGE;
use crate::error::MemoryError;
use crate::pd::ProtectionDomain;
use crate::sync::{self, Mutex, MutexGuard};

/// The limits of a [`RegistrationCache`]. Regions in use count, but are never evicted; idle regions
/// beyond the limits are evicted at the next registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Regions at most.
    pub regions: usize,
    /// Bytes of all regions together, at most.
    pub bytes: u64,
}

impl Default for CacheLimits {
    /// 1024 regions, 1 GiB.
    fn default() -> Self {
        Self {
            regions: 1024,
            bytes: 1 << 30,
        }
    }
}

/// The counters of a [`RegistrationCache`], and its current size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStats {
    /// Requests for registered memory.
    pub hits: u64,
    /// Requests that registered it.
    pub misses: u64,
    /// Regions evicted because of the limits.
    pub evictions: u64,
    /// Regions it holds.
    pub regions: usize,
    /// Bytes of these regions, rounded to whole pages.
    pub bytes: u64,
}

/// A cache of registered memory by address.
///
/// A hit costs one uncontended mutex, one search among the regions, and the buffer's header;
/// registering holds the mutex, so that no memory is registered twice.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use doorbell_verbs::{ProtectionDomain, RegistrationCache, QueuePair};
/// # fn example(pd: &ProtectionDomain, qp: &mut QueuePair, weights: Arc<Vec<u8>>) -> Result<(), Box<dyn std::error::Error>> {
/// let cache = RegistrationCache::new(pd, Default::default());
/// // Registers all of the weights once; later calls find them.
/// qp.send(cache.shared(&weights, 0..4096)?)?;
/// qp.send(cache.shared(&weights, 4096..8192)?)?;
/// # Ok(())
/// # }
/// ```
pub struct RegistrationCache {
    pd: ProtectionDomain,
    limits: CacheLimits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Memory without remote rights, in whole pages, by first address. No two overlap.
    local: BTreeMap<u64, Entry>,
    /// As requested: what peers reach must not grow to pages, and shared memory is its owner's.
    exact: HashMap<ExactKey, Entry>,
    clock: u64,
    stats: CacheStats,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ExactKey {
    start: u64,
    len: usize,
    access: c_uint,
}

struct Entry {
    region: Arc<Region>,
    used: u64,
}

impl Entry {
    /// Whether no buffer of it is left. New ones come only from the cache, which is locked.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }

    fn touches(&self, range: &Range<u64>) -> bool {
        let start = self.region.start();
        start < range.end && range.start < start + self.region.len() as u64
    }
}

/// Evicted regions, dropped after unlocking the cache: deregistering may take long.
type Evicted = Vec<Arc<Region>>;

impl RegistrationCache {
    /// An empty cache of regions in `pd`.
    #[must_use]
    pub fn new(pd: &ProtectionDomain, limits: CacheLimits) -> Self {
        Self {
            pd: pd.clone(),
            limits,
            state: Mutex::default(),
        }
    }

    /// The bytes `range` of what `owner` lends by `as_ref`, as the source of requests. All of it is
    /// registered, for reading; cache and buffers keep `owner` alive.
    ///
    /// # Errors
    /// When the range is empty, beyond what the owner lends or too long for one message, or the
    /// device refuses.
    pub fn shared<T>(&self, owner: &Arc<T>, range: Range<usize>) -> Result<Buffer<Frozen>, MemoryError>
    where
        T: AsRef<[u8]> + Send + Sync + 'static,
    {
        let whole = T::as_ref(owner);
        let Some(part) = whole.get(range.clone()) else {
            return Err(MemoryError::BeyondOwner {
                start: range.start,
                end: range.end,
                len: whole.len(),
            });
        };
        check_buffer(part.len())?;
        let key = ExactKey {
            start: whole.as_ptr().expose_provenance() as u64,
            len: whole.len(),
            access: 0,
        };
        let keep = || Backing::KeepAlive(Arc::clone(owner) as _);
        // SAFETY: what `as_ref` lends stays lent as long as `owner` is neither dropped nor reached
        // by `&mut`; the region holds a private reference, and the device only reads.
        let region = unsafe { self.exact(key, keep) }?;
        Ok(Buffer::new(region, part.as_ptr() as u64, part.len()))
    }

    /// The `len` bytes at `start` as a buffer. Memory without remote rights is registered in whole
    /// pages, merged with overlapping registrations; with remote rights exactly as given.
    ///
    /// # Safety
    /// The bytes are initialised and mapped, and stay so until the buffer and all that was made
    /// from it are gone *and* [`invalidate`](Self::invalidate) was called for them (or the cache is
    /// gone). While the buffer lives, this process touches them through it alone; and peers may
    /// while the cache holds them, if they have rights.
    ///
    /// # Errors
    /// When `len` is 0 or too long for one message, or the device refuses.
    pub unsafe fn foreign<R: Rights>(&self, start: NonNull<u8>, len: usize, _: R) -> Result<Buffer<R>, MemoryError> {
        check_buffer(len)?;
        let addr = start.expose_provenance().get() as u64;
        let region = if R::ACCESS == super::rights::LOCAL {
            // SAFETY: by contract.
            unsafe { self.pages(addr, len) }?
        } else {
            let key = ExactKey {
                start: addr,
                len,
                access: R::ACCESS,
            };
            // SAFETY: by contract.
            unsafe { self.exact(key, || Backing::External) }?
        };
        Ok(Buffer::new(region, addr, len))
    }

    /// Forgets all memory that overlaps `range`, which stays mapped until then. Returns how many of
    /// its regions are still in use: their memory must stay mapped until their last buffer is gone.
    pub fn invalidate(&self, range: Range<u64>) -> usize {
        self.forget(|entry| entry.touches(&range))
    }

    /// Forgets everything. Returns the same count as [`invalidate`](Self::invalidate).
    pub fn clear(&self) -> usize {
        self.forget(|_| true)
    }

    /// Its counters and current size.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.state().stats
    }

    fn state(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    fn forget(&self, which: impl Fn(&Entry) -> bool) -> usize {
        let mut state = self.state();
        let mut evicted = Evicted::new();
        evicted.extend(
            state
                .local
                .extract_if(.., |_, entry| which(entry))
                .map(|(_, entry)| entry.region),
        );
        evicted.extend(
            state
                .exact
                .extract_if(|_, entry| which(entry))
                .map(|(_, entry)| entry.region),
        );
        let in_use = evicted.iter().filter(|region| Arc::strong_count(region) > 1).count();
        state.count();
        drop(state);
        drop(evicted);
        in_use
    }

    /// # Safety
    /// As for [`Region::register`], whose backing `keep` makes.
    unsafe fn exact(&self, key: ExactKey, keep: impl Fn() -> Backing) -> Result<Arc<Region>, MemoryError> {
        let mut state = self.state();
        let used = state.tick();
        if let Some(entry) = state.exact.get_mut(&key) {
            entry.used = used;
            let region = Arc::clone(&entry.region);
            state.stats.hits += 1;
            return Ok(region);
        }
        // SAFETY: by contract.
        let (region, mut evicted) = unsafe { self.register(&mut state, key, keep) }?;
        let entry = Entry {
            region: Arc::clone(&region),
            used,
        };
        state.exact.insert(key, entry);
        state.evict(self.limits, &mut evicted);
        drop(state);
        drop(evicted);
        Ok(region)
    }

    /// # Safety
    /// As for [`Region::register`].
    unsafe fn pages(&self, addr: u64, len: usize) -> Result<Arc<Region>, MemoryError> {
        let mut state = self.state();
        let used = state.tick();
        let (start, end) = whole_pages(addr, len);
        if let Some((_, entry)) = state.local.range_mut(..=start).next_back()
            && entry.region.start() + entry.region.len() as u64 >= end
        {
            entry.used = used;
            let region = Arc::clone(&entry.region);
            state.stats.hits += 1;
            return Ok(region);
        }
        let overlapping = state.overlapping(start..end);
        let union = overlapping.iter().fold(start..end, |union, key| {
            let region = &state.local[key].region;
            union.start.min(region.start())..union.end.max(region.start() + region.len() as u64)
        });
        let key = ExactKey {
            start: union.start,
            len: (union.end - union.start) as usize,
            access: super::rights::LOCAL,
        };
        // SAFETY: the pages of the range are mapped since the range is, and so are those of the
        // regions it is merged with (else invalidated). Only requests touch them.
        let (region, mut evicted) = unsafe { self.register(&mut state, key, || Backing::External) }?;
        for key in overlapping {
            evicted.extend(state.local.remove(&key).map(|entry| entry.region));
        }
        let entry = Entry {
            region: Arc::clone(&region),
            used,
        };
        state.local.insert(union.start, entry);
        state.evict(self.limits, &mut evicted);
        drop(state);
        drop(evicted);
        Ok(region)
    }

    /// Registers; if there is no room, once more after evicting all idle regions.
    ///
    /// # Safety
    /// As for [`Region::register`].
    unsafe fn register(
        &self,
        state: &mut State,
        key: ExactKey,
        keep: impl Fn() -> Backing,
    ) -> Result<(Arc<Region>, Evicted), MemoryError> {
        let mut evicted = Evicted::new();
        let register = || {
            let start = core::ptr::with_exposed_provenance_mut(key.start as usize);
            // SAFETY: by contract; the address was exposed.
            unsafe { Region::register(self.pd.inner(), start, key.len, key.access, keep()) }
        };
        let mut registered = register();
        if matches!(&registered, Err(error) if error.is_out_of_memory()) {
            let none = CacheLimits { regions: 0, bytes: 0 };
            state.evict(none, &mut evicted);
            // Deregister now: the retry needs their room.
            evicted.clear();
            registered = register();
        }
        state.stats.misses += 1;
        Ok((registered?, evicted))
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn overlapping(&self, range: Range<u64>) -> Vec<u64> {
        let before = self.local.range(..range.start).next_back();
        let from_there = self.local.range(range.clone());
        let both = before.into_iter().chain(from_there);
        both.filter(|(_, entry)| entry.touches(&range))
            .map(|(&key, _)| key)
            .collect()
    }

    /// Evicts idle regions in LRU order; the scan for each is cheap beside registering.
    fn evict(&mut self, limits: CacheLimits, evicted: &mut Evicted) {
        self.count();
        while self.stats.regions > limits.regions || self.stats.bytes > limits.bytes {
            let local = self.local.iter().filter(|(_, entry)| entry.is_idle());
            let local = local.map(|(&key, entry)| (entry.used, CacheKey::Local(key)));
            let exact = self.exact.iter().filter(|(_, entry)| entry.is_idle());
            let exact = exact.map(|(&key, entry)| (entry.used, CacheKey::Exact(key)));
            let Some((_, oldest)) = local.chain(exact).min_by_key(|&(used, _)| used) else {
                return;
            };
            let entry = match oldest {
                CacheKey::Local(key) => self.local.remove(&key),
                CacheKey::Exact(key) => self.exact.remove(&key),
            };
            evicted.extend(entry.map(|entry| entry.region));
            self.stats.evictions += 1;
            self.count();
        }
    }

    fn count(&mut self) {
        let entries = || self.local.values().chain(self.exact.values());
        (self.stats.regions, self.stats.bytes) = (
            entries().count(),
            entries().map(|entry| entry.region.len() as u64).sum(),
        );
    }
}

enum CacheKey {
    Local(u64),
    Exact(ExactKey),
}

fn whole_pages(addr: u64, len: usize) -> (u64, u64) {
    let page = PAGE as u64;
    let start = addr & !(page - 1);
    (start, (addr + len as u64).next_multiple_of(page))
}

impl core::fmt::Debug for RegistrationCache {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RegistrationCache")
            .field("limits", &self.limits)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

//! Registrations kept for the next time: registering costs a system call and pins pages, which a library that sends from its users' memory cannot afford per message.
//!
//! The cache says that memory *is* registered, never who may touch it: that is the business of the buffers it gives out. Each holds a reference to its region, so
//! that nothing in use is deregistered; what is idle goes by age when the limits are reached.
//!
//! There are no hooks into the allocator or munmap(2), as other caches have them: they miss what a static linker resolved, and a region that is forgotten without its
//! owner's knowledge is no safer. Memory of the cache's owner's own keeping is kept alive by the region; for other memory [`RegistrationCache::invalidate`] must be called.

use core::ffi::c_uint;
use core::ops::Range;
use core::ptr::NonNull;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::buffer::{Buffer, Frozen};
use super::region::{Backing, Region, check_buffer};
use super::rights::Rights;
use super::storage::PAGE;
use crate::error::MemoryError;
use crate::pd::ProtectionDomain;
use crate::sync::{self, Mutex, MutexGuard};

/// How much a [`RegistrationCache`] keeps registered. What is in use counts too, but stays whatever the limits; what is idle beyond them goes when memory is next
/// registered.
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

/// What a [`RegistrationCache`] has done so far, and holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStats {
    /// Requests for memory that was registered already.
    pub hits: u64,
    /// Requests that registered it.
    pub misses: u64,
    /// Regions let go of because of the limits.
    pub evictions: u64,
    /// Regions it holds.
    pub regions: usize,
    /// Bytes of these, with the rest of the pages they begin and end in.
    pub bytes: u64,
}

/// Registered memory, found again by its address.
///
/// Looking memory up costs one uncontended mutex, one search among the regions, and the allocation of the buffer's header; registering holds the mutex, so that
/// two threads don't register the same memory twice.
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
    /// Memory that no peer has rights in, in whole pages, by its first address. No two overlap.
    local: BTreeMap<u64, Entry>,
    /// Memory registered exactly as asked for: what peers may reach must not grow to whole pages, and what is shared belongs to its owner.
    exact: HashMap<ExactKey, Entry>,
    /// Counts requests, to tell what was used last.
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
    /// Whether no buffer of it is left. No new one can come but through the cache, which is locked.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.region) == 1
    }

    fn touches(&self, range: &Range<u64>) -> bool {
        let start = self.region.start();
        start < range.end && range.start < start + self.region.len() as u64
    }
}

/// Regions taken out of the cache, to be dropped when it is no longer locked: deregistering may take long.
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

    /// The bytes `range` of what `owner` lends by `as_ref`, as the source of requests. All that it lends is registered, for the device to read, and `owner` kept alive as
    /// long as it is, in the cache or in buffers.
    ///
    /// # Errors
    /// When the range is empty, beyond what the owner lends or too long for one message, or the device refuses.
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
        // SAFETY: what `as_ref` lends stays lent as long as `owner` is neither dropped nor reached by `&mut`, as it cannot know when the borrow ends; the region holds
        // a reference that it gives nobody. The device may only read.
        let region = unsafe { self.exact(key, keep) }?;
        Ok(Buffer::new(region, part.as_ptr() as u64, part.len()))
    }

    /// The `len` bytes at `start` as a buffer. Memory without remote rights is registered in whole pages, and joined with what is registered of it already; with
    /// remote rights exactly as it is.
    ///
    /// # Safety
    /// The bytes are initialised and mapped, and stay so until the buffer and all that came of it are gone *and* [`invalidate`](Self::invalidate) was called for them (or
    /// the cache is gone). While the buffer lives, this process touches them through it alone; and peers may while the cache holds them, if they have rights.
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

    /// Forgets all memory that touches `range`: to be called before it is unmapped. Returns how many of the regions are still in use, and will be deregistered
    /// with their last buffer: until then it must stay.
    pub fn invalidate(&self, range: Range<u64>) -> usize {
        self.forget(|entry| entry.touches(&range))
    }

    /// Forgets everything. Returns what [`invalidate`](Self::invalidate) does.
    pub fn clear(&self) -> usize {
        self.forget(|_| true)
    }

    /// What it has done so far, and holds now.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.state().stats
    }

    fn state(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    fn forget(&self, which: impl Fn(&Entry) -> bool) -> usize {
        let mut state = self.state();
        let mut gone = Evicted::new();
        gone.extend(
            state
                .local
                .extract_if(.., |_, entry| which(entry))
                .map(|(_, entry)| entry.region),
        );
        gone.extend(
            state
                .exact
                .extract_if(|_, entry| which(entry))
                .map(|(_, entry)| entry.region),
        );
        let in_use = gone.iter().filter(|region| Arc::strong_count(region) > 1).count();
        state.count();
        drop(state);
        drop(gone);
        in_use
    }

    /// The region registered exactly so.
    ///
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
        let (region, mut gone) = unsafe { self.register(&mut state, key, keep) }?;
        let entry = Entry {
            region: Arc::clone(&region),
            used,
        };
        state.exact.insert(key, entry);
        state.evict(self.limits, &mut gone);
        drop(state);
        drop(gone);
        Ok(region)
    }

    /// A region without remote rights that has the `len` bytes at `addr`.
    ///
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
        // SAFETY: the pages of the range are mapped since the range is, and so are those of the regions it is joined with: they would have been invalidated. The device
        // touches only what requests name.
        let (region, mut gone) = unsafe { self.register(&mut state, key, || Backing::External) }?;
        for key in overlapping {
            gone.extend(state.local.remove(&key).map(|entry| entry.region));
        }
        let entry = Entry {
            region: Arc::clone(&region),
            used,
        };
        state.local.insert(union.start, entry);
        state.evict(self.limits, &mut gone);
        drop(state);
        drop(gone);
        Ok(region)
    }

    /// Registers, once more after letting go of all that is idle if there was no room.
    ///
    /// # Safety
    /// As for [`Region::register`].
    unsafe fn register(
        &self,
        state: &mut State,
        key: ExactKey,
        keep: impl Fn() -> Backing,
    ) -> Result<(Arc<Region>, Evicted), MemoryError> {
        let mut gone = Evicted::new();
        let register = || {
            let start = core::ptr::with_exposed_provenance_mut(key.start as usize);
            // SAFETY: by contract; the address was exposed.
            unsafe { Region::register(self.pd.inner(), start, key.len, key.access, keep()) }
        };
        let mut registered = register();
        if matches!(&registered, Err(error) if error.is_out_of_memory()) {
            let none = CacheLimits { regions: 0, bytes: 0 };
            state.evict(none, &mut gone);
            // Now, as it is their room that is wanted.
            gone.clear();
            registered = register();
        }
        state.stats.misses += 1;
        Ok((registered?, gone))
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The keys of the local regions that overlap `range`.
    fn overlapping(&self, range: Range<u64>) -> Vec<u64> {
        let before = self.local.range(..range.start).next_back();
        let from_there = self.local.range(range.clone());
        let both = before.into_iter().chain(from_there);
        both.filter(|(_, entry)| entry.touches(&range))
            .map(|(&key, _)| key)
            .collect()
    }

    /// Lets go of the idle regions used longest ago, until the limits are kept. It looks at all of them for each: that is little beside registering.
    fn evict(&mut self, limits: CacheLimits, gone: &mut Evicted) {
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
            gone.extend(entry.map(|entry| entry.region));
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

/// Where an entry is.
enum CacheKey {
    Local(u64),
    Exact(ExactKey),
}

/// The pages that the `len` bytes at `addr` lie in.
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

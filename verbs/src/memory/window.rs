//! Memory windows (MW): remote rights by work requests, not registering (IBTA vol 1, 10.6.7).
//!
//! A window is unbound ([`MemoryWindow`]), bound ([`BoundWindow`]), or in its request's slot.
//!
//! Dropping a window deallocates it before the region is released. One of type 2 is deallocated
//! before the queue pair that bound it ([`TiedWindows`]), as some devices require.

use core::marker::PhantomData;
use core::ops::RangeBounds;
use std::io;
use std::sync::{Arc, Weak};

use doorbell_verbs_sys::{self as sys, inline};

use super::buffer::{Buffer, bytes_of};
use super::range::{Buffers, Range};
use super::region::Region;
use super::remote::Remote;
use super::rights::{Bindable, KeyAccess};
use crate::error::{MemoryError, check};
use crate::pd::PdInner;
use crate::qp::QpId;
use crate::sync::{self, Mutex, MutexGuard};
use crate::types::RKey;
use crate::wr::op::{BindError, Binding};

mod sealed {
    pub trait Sealed {
        const KIND: doorbell_verbs_sys::ibv_mw_type;
        const TAG: u16;
    }
}
use sealed::Sealed;

/// The type of a memory window: [`WindowType1`] or [`WindowType2`].
#[doc(alias = "ibv_mw_type")]
pub trait WindowType: Sealed + 'static {}

/// A window for every queue pair of its domain, bound by a verb of its own (ibv_bind_mw(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "IBV_MW_TYPE_1")]
pub struct WindowType1;

/// A window for the queue pair that bound it, bound and invalidated by work requests; the peer may
/// invalidate it too (IBTA vol 1, 10.6.7.2: type 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "IBV_MW_TYPE_2")]
pub struct WindowType2;

impl Sealed for WindowType1 {
    const KIND: sys::ibv_mw_type = sys::IBV_MW_TYPE_1;
    const TAG: u16 = 1 << 11;
}
impl Sealed for WindowType2 {
    const KIND: sys::ibv_mw_type = sys::IBV_MW_TYPE_2;
    const TAG: u16 = 0;
}
impl WindowType for WindowType1 {}
impl WindowType for WindowType2 {}

/// Tag bit: the request unbinds it.
const UNBIND: u16 = 1 << 10;
const REQUEST: u16 = UNBIND | WindowType1::TAG;
/// Tag bits: the rights (`ibv_access_flags`).
const ACCESS: u16 = 0xff;

/// An unbound memory window: it gives no access (ibv_alloc_mw(3); IBTA vol 1, 10.6.7).
///
/// Bound to [`Windowed`](crate::Windowed) memory, it grants a peer rights in a part of it and
/// revokes them, without registering. The completion of binding returns it as a [`BoundWindow`]:
///
/// ```no_run
/// use doorbell_verbs::{ProtectionDomain, QueuePair, CompletionQueue, Windowed, WriteAccess};
///
/// # fn example(pd: &ProtectionDomain, qp: &mut QueuePair, cq: &mut CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// let inbox = pd.register(vec![0_u8; 1 << 20], Windowed)?;
/// qp.bind(pd.memory_window()?, &inbox, 0..4096, WriteAccess)?;
/// let mut bound = None;
/// while bound.is_none() {
///     for mut completion in cq.poll()? {
///         completion.result()?;
///         bound = completion.take_bound_window::<WriteAccess, _>();
///     }
/// }
/// let window = bound.ok_or("none")?;
/// let key = window.remote(); // to be sent to the peer, which may write those 4096 bytes with it
/// qp.invalidate(window)?; // revokes the key
/// # drop(key);
/// # Ok(())
/// # }
/// ```
///
/// A window whose request fails is dropped with its completion.
#[doc(alias("ibv_mw", "ibv_alloc_mw", "ibv_dealloc_mw"))]
pub struct MemoryWindow<T: WindowType = WindowType2> {
    inner: Arc<WindowInner>,
    kind: PhantomData<T>,
}

/// A bound memory window: its [`remote`](Self::remote) grants the rights `K` until it is dropped.
///
/// The region stays registered meanwhile. One of type 2 is invalid without its queue pair.
#[doc(alias("ibv_mw", "ibv_mw_bind_info"))]
pub struct BoundWindow<K: KeyAccess, T: WindowType = WindowType2> {
    inner: Arc<WindowInner>,
    region: Arc<Region>,
    addr: u64,
    len: u64,
    rkey: u32,
    rights: PhantomData<(K, T)>,
}

/// That a message of the peer has invalidated a window's key. Each is of one completion, by
/// [`Completion::into_invalidation`](crate::Completion::into_invalidation), and unbinds one window.
#[derive(Debug)]
pub struct Invalidation<'a> {
    rkey: RKey,
    qp: QpId,
    completion: PhantomData<&'a ()>,
}

impl Invalidation<'_> {
    pub(crate) fn new(rkey: RKey, qp: QpId) -> Self {
        Self {
            rkey,
            qp,
            completion: PhantomData,
        }
    }
}

pub(crate) struct WindowInner {
    state: Mutex<State>,
    pd: Arc<PdInner>,
}

struct State {
    /// Null once deallocated.
    mw: *mut sys::ibv_mw,
    /// The queue pair that binds or has bound it, with which it is to be deallocated.
    tied: Option<QpId>,
}

// SAFETY: `mw` is only passed to verbs, which any thread may call; written under the lock.
unsafe impl Send for State {}

#[repr(C)]
pub(super) struct InFlightWindow {
    /// First, so that the slot's pointer is a range's; of the region that the window is bound to.
    range: Range,
    inner: Arc<WindowInner>,
    addr: u64,
    len: u64,
    rkey: u32,
}

impl Drop for InFlightWindow {
    /// Not taken: it is deallocated before its region may be deregistered.
    fn drop(&mut self) {
        self.inner.deallocate();
    }
}

impl WindowInner {
    fn state(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    /// ibv_dealloc_mw(3), once; unbinds it.
    fn deallocate(&self) {
        let mut state = self.state();
        let mw = core::mem::replace(&mut state.mw, core::ptr::null_mut());
        if mw.is_null() {
            return;
        }
        // SAFETY: live until here, and unreachable from now on.
        if let Err(error) = check(unsafe { inline::dealloc_mw(mw) }) {
            tracing::error!(device = %self.pd.context.name, %error, "ibv_dealloc_mw failed; the window is leaked");
        }
    }

    /// Stores the current key, which the provider reads when it next binds the window: for type 2
    /// the consumer maintains it (ibv_bind_mw(3)), for type 1 the value is there already.
    fn store_rkey(&self, rkey: u32) {
        let state = self.state();
        let mw = state.mw;
        if !mw.is_null() {
            // SAFETY: live unless null; under the lock nothing else reads a key not in flight.
            unsafe { (*mw).rkey = rkey };
        }
    }

    fn untie(&self) {
        self.state().tied = None;
    }
}

impl Drop for WindowInner {
    fn drop(&mut self) {
        self.deallocate();
    }
}

/// The windows tied to a queue pair. To be dropped before it is destroyed.
#[derive(Default)]
pub(crate) struct TiedWindows {
    windows: Vec<Weak<WindowInner>>,
}

impl TiedWindows {
    pub(crate) fn tie(&mut self, window: &Arc<WindowInner>, qp: QpId) {
        window.state().tied = Some(qp);
        let weak = Arc::downgrade(window);
        if self.windows.iter().any(|other| other.ptr_eq(&weak)) {
            return;
        }
        if self.windows.len() == self.windows.capacity() {
            self.windows.retain(|other| other.strong_count() > 0);
        }
        self.windows.push(weak);
    }
}

impl Drop for TiedWindows {
    fn drop(&mut self) {
        for window in self.windows.iter().filter_map(Weak::upgrade) {
            let tied = window.state().tied;
            if tied.is_some() {
                window.deallocate();
            }
        }
    }
}

impl<T: WindowType> MemoryWindow<T> {
    pub(crate) fn new(pd: &Arc<PdInner>) -> Result<Self, MemoryError> {
        // SAFETY: the domain is live.
        let mw = unsafe { inline::alloc_mw(pd.raw, T::KIND) };
        if mw.is_null() {
            return Err(MemoryError::Window {
                device: pd.context.name.clone(),
                kind: T::KIND,
                error: io::Error::last_os_error(),
            });
        }
        // SAFETY: just made in this domain.
        Ok(unsafe { Self::adopt(pd, mw) })
    }

    /// # Safety
    /// `mw` is a live, unbound window of this domain and type, which nothing else uses.
    pub(crate) unsafe fn adopt(pd: &Arc<PdInner>, mw: *mut sys::ibv_mw) -> Self {
        let state = State { mw, tied: None };
        Self {
            inner: Arc::new(WindowInner {
                state: Mutex::new(state),
                pd: Arc::clone(pd),
            }),
            kind: PhantomData,
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_mw {
        self.inner.state().mw
    }

    /// # Panics
    /// If the range is beyond the buffer.
    pub(crate) fn binding<K: KeyAccess>(
        self,
        over: &Buffer<impl Bindable>,
        range: impl RangeBounds<usize>,
    ) -> (Binding, Arc<WindowInner>, Buffers) {
        let (offset, len) = bytes_of(over.len(), range);
        let (offset, len) = (offset as u64, len as u64);
        let (addr, region) = (over.addr() + offset, Arc::clone(&over.header().region));
        let mw = self.inner.state().mw;
        let objection = if mw.is_null() {
            Some(BindError::Gone)
        } else if !Arc::ptr_eq(&self.inner.pd, region.pd()) {
            Some(BindError::Foreign)
        } else if len == 0 {
            Some(BindError::Empty)
        } else {
            None
        };
        // SAFETY: null, or live, and unbound, so that no queue pair deallocates it.
        let rkey = unsafe { mw.as_ref() }.map_or(0, |mw| inline::inc_rkey(mw.rkey));
        let info = sys::ibv_mw_bind_info {
            mr: region.raw(),
            addr,
            length: len,
            mw_access_flags: K::ACCESS,
        };
        let cell = InFlightWindow {
            range: Range::of_window(region, T::TAG | K::ACCESS as u16),
            inner: Arc::clone(&self.inner),
            addr,
            len,
            rkey,
        };
        let binding = Binding {
            mw,
            rkey,
            info,
            objection,
        };
        (binding, self.inner, Buffers::of_window(Box::new(cell)))
    }

    /// Takes the window of a request that has unbound it, or was rejected binding it.
    pub(crate) fn take(buffers: &mut Buffers, unbound: bool) -> Option<Self> {
        let what = if unbound { UNBIND | T::TAG } else { T::TAG };
        let cell = buffers.take_window(|tag| tag & REQUEST == what)?;
        let (inner, region) = cell.into_parts();
        inner.untie();
        drop(region);
        Some(Self {
            inner,
            kind: PhantomData,
        })
    }
}

impl InFlightWindow {
    fn into_parts(self) -> (Arc<WindowInner>, Arc<Region>) {
        let cell = core::mem::ManuallyDrop::new(self);
        // SAFETY: each is taken once, as the cell is not dropped; the rest of it is plain data.
        unsafe {
            (
                core::ptr::read(&raw const cell.inner),
                core::ptr::read(&raw const cell.range.region),
            )
        }
    }
}

impl<K: KeyAccess, T: WindowType> BoundWindow<K, T> {
    /// The address and key for the peer, with the rights that were bound.
    #[must_use]
    pub fn remote(&self) -> Remote<K> {
        Remote::from_raw(self.addr, self.rkey, self.len)
    }

    /// Its rkey, by which a peer invalidates it.
    #[must_use]
    pub fn rkey(&self) -> RKey {
        RKey(self.rkey)
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_mw {
        self.inner.state().mw
    }

    pub(crate) fn unbinding(self) -> (Binding, Buffers) {
        let mw = self.inner.state().mw;
        // Type 1: unbinding is binding to a length of 0.
        let info = sys::ibv_mw_bind_info {
            mr: self.region.raw(),
            addr: self.addr,
            length: 0,
            mw_access_flags: 0,
        };
        let binding = Binding {
            mw,
            rkey: self.rkey,
            info,
            objection: mw.is_null().then_some(BindError::Gone),
        };
        let (addr, len, rkey) = (self.addr, self.len, self.rkey);
        let (inner, region) = self.into_parts();
        let cell = InFlightWindow {
            range: Range::of_window(region, UNBIND | T::TAG | K::ACCESS as u16),
            inner,
            addr,
            len,
            rkey,
        };
        (binding, Buffers::of_window(Box::new(cell)))
    }

    fn into_parts(self) -> (Arc<WindowInner>, Arc<Region>) {
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: each is taken once, as `this` is not dropped; the rest of it is plain data.
        unsafe {
            (
                core::ptr::read(&raw const this.inner),
                core::ptr::read(&raw const this.region),
            )
        }
    }

    /// Takes the window of a request that has bound it, or was rejected unbinding it.
    pub(crate) fn take(buffers: &mut Buffers, bound: bool) -> Option<Self> {
        let what = if bound { T::TAG } else { UNBIND | T::TAG };
        let cell = buffers.take_window(|tag| tag & (REQUEST | ACCESS) == what | K::ACCESS as u16)?;
        let (addr, len, rkey) = (cell.addr, cell.len, cell.rkey);
        let (inner, region) = cell.into_parts();
        inner.store_rkey(rkey);
        Some(Self {
            inner,
            region,
            addr,
            len,
            rkey,
            rights: PhantomData,
        })
    }
}

impl<K: KeyAccess> BoundWindow<K> {
    /// Unbinds the window, which a message of the peer has invalidated.
    ///
    /// # Errors
    /// Returns it if the key is another window's, or the message another queue pair's.
    pub fn invalidated(self, by: Invalidation<'_>) -> Result<MemoryWindow, Self> {
        let tied = self.inner.state().tied;
        if by.rkey.0 != self.rkey || tied != Some(by.qp) {
            return Err(self);
        }
        let (inner, region) = self.into_parts();
        inner.untie();
        drop(region);
        Ok(MemoryWindow {
            inner,
            kind: PhantomData,
        })
    }
}

impl<K: KeyAccess, T: WindowType> Drop for BoundWindow<K, T> {
    fn drop(&mut self) {
        // Before the region may go, even if a queue pair that is being dropped holds a reference.
        self.inner.deallocate();
    }
}

impl<T: WindowType> core::fmt::Debug for MemoryWindow<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("MemoryWindow").field("type", &T::KIND).finish()
    }
}

impl<K: KeyAccess, T: WindowType> core::fmt::Debug for BoundWindow<K, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("BoundWindow")
            .field("type", &T::KIND)
            .field("remote", &self.remote())
            .finish()
    }
}

//! Identifiers: `rdma_cm_id`, their life cycle and options.
//!
//! An identifier is a C struct followed by its Rust state. The application reads the struct, which
//! is modified only in calls on the identifier and when its events are taken; all that other
//! threads modify is in [`Shared`], under a lock.

use core::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::{fs, ptr};

use doorbell_roce_proto::Gid;
use doorbell_roce_proto::cm::Ece;
use doorbell_verbs_sys::rdmacm::{
    RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, RDMA_OPTION_ID_AFONLY,
    RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_TOS, RDMA_PS_IB, RDMA_PS_TCP, RDMA_PS_UDP, rdma_cm_event, rdma_cm_id,
    rdma_event_channel, rdma_port_space,
};
use doorbell_verbs_sys::{IBV_QPT_RC, IBV_QPT_UD, ibv_ece};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::channel::{
    EventInfo, Pending, Queue, queue_of, rdma_ack_cm_event, rdma_create_event_channel, rdma_destroy_event_channel, take,
};
use crate::connection::CmLink;
use crate::devices::{OpenDevice, PORT};
use crate::endpoint::PassiveQpInit;
use crate::errno::{self, Errno};
use crate::multicast::Membership;
use crate::ports::PortBinding;
use crate::{address, connection, route};

/// The P_Key of every device, with full membership (IBTA vol 1, 10.9.1).
pub(crate) const PKEY: u16 = 0xffff;

/// ip-sysctl: whether an IPv6 wildcard has no IPv4 addresses.
const BIND_V6_ONLY: &str = "/proc/sys/net/ipv6/bindv6only";

#[repr(C)]
struct SoftId {
    base: rdma_cm_id,
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    /// Live until [`State::queue`] is `None`, and while one of its events is unacknowledged.
    id: *mut rdma_cm_id,
    pub(crate) space: rdma_port_space,
    state: Mutex<State>,
    counts: Mutex<Counts>,
    acknowledged: Condvar,
}

// SAFETY: the pointer is constant; what it points to is modified as the module describes.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Its events that the application has taken, and has acknowledged.
#[derive(Default)]
struct Counts {
    taken: u64,
    acknowledged: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    /// It has an entry in the connection manager: connecting, connected or disconnected.
    CmActive,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    pub(crate) traffic_class: u8,
    pub(crate) reuse: bool,
    /// Set by RDMA_OPTION_ID_AFONLY.
    afonly: Option<bool>,
    /// A code of 5 bits.
    pub(crate) ack_timeout: Option<u8>,
}

impl Options {
    /// Whether `local` excludes the other family. By default IPv4 does, and IPv6 where the system
    /// says so, as in Linux.
    pub(crate) fn afonly(&self, local: IpAddr) -> bool {
        let by_default = || local.is_ipv4() || fs::read_to_string(BIND_V6_ONLY).is_ok_and(|text| text.trim() == "1");
        self.afonly.unwrap_or_else(by_default)
    }
}

pub(crate) struct State {
    /// The queue of its events; `None` while it is being destroyed.
    pub(crate) queue: Option<Arc<Queue>>,
    pub(crate) phase: Phase,
    pub(crate) options: Options,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) binding: Option<PortBinding>,
    pub(crate) opened: Option<&'static OpenDevice>,
    pub(crate) link: CmLink,
    pub(crate) groups: Vec<Membership>,
    /// For queue pairs of its requests that the library creates (rdma_create_ep(3)).
    pub(crate) passive: Option<PassiveQpInit>,
    /// Synchronous: calls wait for their result, on a channel of its own (rdma_create_id(3)).
    pub(crate) synchronous: bool,
}

impl State {
    /// Options that changed since it was bound.
    fn update_binding(&mut self) {
        if let (Some(local), Some(binding)) = (self.local, &mut self.binding) {
            binding.set_options(self.options.reuse, self.options.afonly(local.ip()));
        }
    }
}

impl Shared {
    pub(crate) fn as_ptr(&self) -> *mut rdma_cm_id {
        self.id
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Queues an event for it, unless it is being destroyed.
    pub(crate) fn notify(self: &Arc<Self>, info: EventInfo) {
        let pending = Pending {
            to: Arc::clone(self),
            info,
        };
        // Under the lock, so that nothing is queued after the destruction has drained the queue. An
        // event that cannot be queued is dropped after unlocking.
        let state = self.state.lock();
        let Some(queue) = &state.queue else {
            drop(state);
            return drop(pending);
        };
        queue.push(pending);
    }

    pub(crate) fn count_taken(&self) {
        self.counts.lock().taken += 1;
    }

    pub(crate) fn count_acknowledged(&self) {
        self.counts.lock().acknowledged += 1;
        self.acknowledged.notify_all();
    }

    fn wait_for_acknowledgements(&self) {
        let mut counts = self.counts.lock();
        while counts.acknowledged != counts.taken {
            self.acknowledged.wait(&mut counts);
        }
    }

    /// Binds it to a device, and updates the C struct.
    pub(crate) fn set_device(&self, state: &mut State, opened: &'static OpenDevice) {
        state.opened = Some(opened);
        // SAFETY: called in a call on the identifier, or before it is shared.
        unsafe {
            (*self.id).verbs = opened.context;
            (*self.id).port_num = PORT;
            // If there is none, creating the queue pair reports the error.
            (*self.id).pd = opened.default_pd().unwrap_or(ptr::null_mut());
            let ib = &raw mut (*self.id).route.addr.addr.ibaddr;
            (*ib).sgid.raw = Gid::from(opened.ip()).0;
            (*ib).pkey = PKEY.to_be();
        }
    }

    /// Sets its address, also in the C struct.
    pub(crate) fn set_local(&self, state: &mut State, local: SocketAddr) {
        state.local = Some(local);
        // SAFETY: as in `set_device`.
        unsafe { (*self.id).route.addr.anon_1.src_storage = address::to_storage(local) };
    }

    pub(crate) fn set_peer(&self, state: &mut State, peer: SocketAddr) {
        state.peer = Some(peer);
        // SAFETY: as in `set_device`.
        unsafe {
            (*self.id).route.addr.anon_2.dst_storage = address::to_storage(peer);
            (*self.id).route.addr.addr.ibaddr.dgid.raw = Gid::from(peer.ip()).0;
        }
    }
}

/// # Errors
/// `EINVAL` for a null pointer.
///
/// # Safety
/// `id` is null, or live and ours.
pub(crate) unsafe fn shared(id: *mut rdma_cm_id) -> Result<Arc<Shared>, Errno> {
    if id.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: ours by contract, `base` first; the handle is written at creation only.
    Ok(Arc::clone(unsafe { &(*id.cast::<SoftId>()).shared }))
}

/// An identifier not yet passed to the application. Dropping it destroys it.
pub(crate) struct UnownedId(*mut rdma_cm_id);

// SAFETY: no other thread knows it; see `Shared` for what it points to.
unsafe impl Send for UnownedId {}

impl UnownedId {
    pub(crate) fn new(
        space: rdma_port_space,
        context: *mut c_void,
        channel: *mut rdma_event_channel,
        queue: Arc<Queue>,
    ) -> Self {
        let allocation = Box::into_raw(Box::<SoftId>::new_uninit()).cast::<SoftId>();
        // SAFETY: all-zero is a valid rdma_cm_id: integers and pointers.
        let mut base: rdma_cm_id = unsafe { core::mem::zeroed() };
        base.channel = channel;
        base.context = context;
        base.ps = space;
        base.qp_type = if space == RDMA_PS_UDP { IBV_QPT_UD } else { IBV_QPT_RC };
        let state = State {
            queue: Some(queue),
            phase: Phase::Idle,
            options: Options::default(),
            local: None,
            peer: None,
            binding: None,
            opened: None,
            link: CmLink::default(),
            groups: Vec::new(),
            passive: None,
            synchronous: false,
        };
        let shared = Arc::new(Shared {
            id: allocation.cast(),
            space,
            state: Mutex::new(state),
            counts: Mutex::default(),
            acknowledged: Condvar::new(),
        });
        // SAFETY: just allocated for it.
        unsafe { allocation.write(SoftId { base, shared }) };
        Self(allocation.cast())
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        // SAFETY: live until it is dropped.
        unsafe { &(*self.0.cast::<SoftId>()).shared }
    }

    /// The C pointer; the application owns it from here on.
    pub(crate) fn into_raw(self) -> *mut rdma_cm_id {
        let id = self.0;
        core::mem::forget(self);
        id
    }
}

impl Drop for UnownedId {
    fn drop(&mut self) {
        // SAFETY: the only pointer to it.
        unsafe { destroy(self.0) };
    }
}

/// rdma_create_id(3): synchronous without a channel. Port spaces: TCP, UDP, and IB (RC only).
///
/// # Safety
/// `channel` is null or live and ours; `id` is writable.
pub unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    space: rdma_port_space,
) -> c_int {
    if id.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: the same contract.
    let created = unsafe { create(channel, context, space) };
    // SAFETY: writable by contract.
    errno::result(created.map(|unowned| unsafe { id.write(unowned.into_raw()) }))
}

/// # Safety
/// `channel` is null or live and ours.
pub(crate) unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    space: rdma_port_space,
) -> Result<UnownedId, Errno> {
    if !matches!(space, RDMA_PS_TCP | RDMA_PS_IB | RDMA_PS_UDP) {
        return Err(libc::EPROTONOSUPPORT);
    }
    let synchronous = channel.is_null();
    let channel = if synchronous { own_channel()? } else { channel };
    // SAFETY: live.
    let queue = unsafe { queue_of(channel) };
    let unowned = UnownedId::new(space, context, channel, queue);
    unowned.shared().state().synchronous = synchronous;
    Ok(unowned)
}

fn own_channel() -> Result<*mut rdma_event_channel, Errno> {
    let channel = rdma_create_event_channel();
    if channel.is_null() {
        return Err(errno::last());
    }
    Ok(channel)
}

/// rdma_destroy_id(3): stops listening, rejects a request, disconnects a connection. Waits until
/// its events are acknowledged. Its queue pair must have been destroyed.
///
/// # Safety
/// `id` is null, or live and ours, and not used again.
pub unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    if id.is_null() {
        return errno::result(Err(libc::EINVAL));
    }
    // SAFETY: by contract.
    unsafe { destroy(id) };
    0
}

/// # Safety
/// `id` is live and ours, and not used again.
unsafe fn destroy(id: *mut rdma_cm_id) {
    // SAFETY: live by contract.
    let shared = unsafe { Arc::clone(&(*id.cast::<SoftId>()).shared) };
    let (queue, synchronous) = {
        let mut state = shared.state();
        (state.queue.take(), state.synchronous)
    };
    connection::destroy_cm(&shared);
    if let Some(queue) = queue {
        // Including requests not yet taken, which are rejected by this.
        drop(queue.take(|pending| Arc::ptr_eq(&pending.to, &shared)));
    }
    // SAFETY: still live.
    unsafe { ack_stored_event(id) };
    shared.wait_for_acknowledgements();
    // SAFETY: still live.
    unsafe { route::free_path(id) };
    // SAFETY: not used again, and nothing references it any more: it came from a Box. A channel of
    // its own is destroyed with it.
    unsafe {
        if synchronous {
            rdma_destroy_event_channel((*id).channel);
        }
        drop(Box::from_raw(id.cast::<SoftId>()));
    }
}

/// # Safety
/// `id` is live and ours, and in a call on it.
pub(crate) unsafe fn ack_stored_event(id: *mut rdma_cm_id) {
    // SAFETY: by contract.
    let event = unsafe { ptr::replace(&raw mut (*id).event, ptr::null_mut()) };
    if !event.is_null() {
        // SAFETY: the application may not acknowledge it itself; it is no longer stored.
        unsafe { rdma_ack_cm_event(event) };
    }
}

/// Waits for the result of a call on a synchronous identifier: the event is stored in the
/// identifier until the next call. Returns at once for others.
///
/// # Errors
/// The event's status as an errno; `ECONNREFUSED` for a rejection.
///
/// # Safety
/// `id` is live and ours, and in a call on it.
pub(crate) unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    let queue = {
        let state = shared.state();
        match &state.queue {
            Some(queue) if state.synchronous => Arc::clone(queue),
            _ => return Ok(()),
        }
    };
    // SAFETY: by contract.
    unsafe { ack_stored_event(id) };
    let event = take(&queue)?;
    // SAFETY: just taken; by contract the identifier may be modified.
    unsafe { store_event(id, event) }
}

/// # Errors
/// As for [`complete`].
///
/// # Safety
/// `id` is live and ours, in a call on it, and stores no event; `event` was just taken.
pub(crate) unsafe fn store_event(id: *mut rdma_cm_id, event: *mut rdma_cm_event) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (kind, status) = unsafe {
        (*id).event = event;
        ((*event).event, (*event).status)
    };
    match status {
        0 => Ok(()),
        _ if kind == doorbell_verbs_sys::rdmacm::RDMA_CM_EVENT_REJECTED => Err(libc::ECONNREFUSED),
        status => Err(status.saturating_abs()),
    }
}

/// rdma_migrate_id(3): waits until taken events are acknowledged; queued ones move.
///
/// # Safety
/// `id` is null or live and ours; `channel` is null, or live and ours.
pub unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { migrate(id, channel) })
}

/// # Safety
/// As for [`rdma_migrate_id`].
pub(crate) unsafe fn migrate(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    let synchronous = channel.is_null();
    let channel = if synchronous { own_channel()? } else { channel };
    // SAFETY: live and ours, both; in a call on the identifier.
    let new = unsafe {
        ack_stored_event(id);
        queue_of(channel)
    };
    shared.wait_for_acknowledgements();
    move_events(&shared, new);
    let was_synchronous = core::mem::replace(&mut shared.state().synchronous, synchronous);
    // SAFETY: in a call on the identifier; a channel of its own is used by no other thread.
    unsafe {
        let old = ptr::replace(&raw mut (*id).channel, channel);
        if was_synchronous {
            rdma_destroy_event_channel(old);
        }
    }
    Ok(())
}

pub(crate) fn move_events(shared: &Arc<Shared>, queue: Arc<Queue>) {
    let mut state = shared.state();
    if let Some(old) = state.queue.replace(Arc::clone(&queue)) {
        for pending in old.take(|pending| Arc::ptr_eq(&pending.to, shared)) {
            queue.push(pending);
        }
    }
}

/// rdma_set_option(3): `ENOSYS` for unsupported options, such as RDMA_OPTION_IB_PATH.
///
/// # Safety
/// `id` is null or live and ours; `value` points to `len` bytes.
pub unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { set_option(id, level as u32, option as u32, value, len) })
}

unsafe fn set_option(
    id: *mut rdma_cm_id,
    level: u32,
    option: u32,
    value: *mut c_void,
    len: usize,
) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    let byte = || match len {
        // SAFETY: one byte is there.
        1 if !value.is_null() => Ok(unsafe { value.cast::<u8>().read() }),
        _ => Err(libc::EINVAL),
    };
    let int = || match len {
        // SAFETY: `len` bytes are readable; read without alignment.
        len if len == size_of::<c_int>() && !value.is_null() => Ok(unsafe { value.cast::<c_int>().read_unaligned() }),
        _ => Err(libc::EINVAL),
    };
    let mut state = shared.state();
    match (level, option) {
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => state.options.traffic_class = byte()?,
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => {
            let code = byte()?;
            if code > 31 {
                return Err(libc::EINVAL);
            }
            state.options.ack_timeout = Some(code);
        }
        // As Linux's rdma_set_reuseaddr and rdma_set_afonly.
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => {
            let reuse = int()? != 0;
            if state.phase != Phase::Idle && (!reuse || state.phase == Phase::Listening) {
                return Err(libc::EINVAL);
            }
            state.options.reuse = reuse;
            state.update_binding();
        }
        (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => {
            let afonly = int()? != 0;
            if !matches!(state.phase, Phase::Idle | Phase::Bound) {
                return Err(libc::EINVAL);
            }
            state.options.afonly = Some(afonly);
            state.update_binding();
        }
        (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) => return Err(libc::ENOSYS),
        _ => return Err(libc::ENOSYS),
    }
    Ok(())
}

/// rdma_set_local_ece(3), for an identifier with an external queue pair: sent in its REQ or REP.
///
/// # Safety
/// `id` is null or live and ours; `ece` is null or live.
pub unsafe extern "C" fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { external(id, ece) }.and_then(|shared| {
        // SAFETY: not null, so live.
        let ece = unsafe { *ece };
        if ece.vendor_id == 0 || ece.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        shared.state().link.local_ece = Ece {
            vendor_id: ece.vendor_id,
            options: ece.options,
        };
        Ok(())
    }))
}

/// rdma_get_remote_ece(3): of the peer's REQ or REP; zeros when it has offered none.
///
/// # Safety
/// `id` is null or live and ours; `ece` is null or writable.
pub unsafe extern "C" fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { external(id, ece) }.map(|shared| {
        let Ece { vendor_id, options } = shared.state().link.remote_ece;
        let remote = ibv_ece {
            vendor_id,
            options,
            comp_mask: 0,
        };
        // SAFETY: not null, so writable.
        unsafe { ece.write(remote) };
    }))
}

/// Checks that the identifier has no queue pair, and `ece` is not null.
///
/// # Safety
/// `id` is null or live and ours.
unsafe fn external(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> Result<Arc<Shared>, Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    // SAFETY: not null, so live.
    if ece.is_null() || !unsafe { (*id).qp }.is_null() {
        return Err(libc::EINVAL);
    }
    Ok(shared)
}

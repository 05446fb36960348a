//! An open device: its queries, and the objects created from it.

use core::mem::MaybeUninit;
use core::sync::atomic::AtomicBool;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, Api, inline};

use crate::clock::DeviceClock;
use crate::cq::{BestCompletionQueue, CompletionQueue, ExtendedCompletionQueueBuilder};
use crate::error::{CompletionQueueError, DeviceError, EventError, IndexOrAny, MemoryError, check};
use crate::event::{CompletionChannel, Events};
use crate::memory::DeviceMemory;
use crate::pd::ProtectionDomain;
use crate::port::{GidEntry, GidType, LinkLayer, PortAttr};
use crate::raw::Lender;
use crate::types::Gid;

/// An open device (ibv_open_device(3)), closed with the last clone and object created from it.
#[doc(alias("ibv_context", "ibv_open_device", "ibv_close_device"))]
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

pub(crate) struct ContextInner {
    pub(crate) api: &'static Api,
    pub(crate) raw: *mut sys::ibv_context,
    pub(crate) name: String,
    pub(crate) attr: DeviceAttr,
    pub(crate) has_event_reader: AtomicBool,
    lender: Lender,
}

// SAFETY: every verb may be called from any thread at any time (libibverbs is thread-safe except
// for objects created as single-threaded, of which this crate creates none); `raw` is only passed
// to verbs, and its fields that are read (device, ops) are constant after opening.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

/// A device's attributes and limits (ibv_query_device(3)).
#[doc(alias("ibv_device_attr", "ibv_query_device", "ibv_query_device_ex"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
// fields: a flat mirror of `ibv_device_attr`.
pub struct DeviceAttr {
    /// The number of ports; they are numbered from 1.
    #[doc(alias = "phys_port_cnt")]
    pub ports: u8,
    /// Maximum work requests of a send or receive queue (`max_qp_wr`).
    pub max_qp_wr: u32,
    /// Maximum scatter-gather elements of a request.
    pub max_sge: u32,
    /// Maximum entries of a completion queue.
    pub max_cqe: u32,
    /// Maximum receives of a shared receive queue (`max_srq_wr`); 0 without support.
    pub max_srq_wr: u32,
    /// Maximum scatter-gather elements of a receive of a shared receive queue.
    pub max_srq_sge: u32,
    /// Maximum READs and atomics that a queue pair serves at once (`max_qp_rd_atom`).
    #[doc(alias = "max_qp_rd_atom")]
    pub max_rd_atomic: u8,
    /// Maximum READs and atomics that a queue pair has outstanding (`max_qp_init_rd_atom`).
    #[doc(alias = "max_qp_init_rd_atom")]
    pub max_qp_init_rd_atomic: u8,
    /// Maximum size of a memory region in bytes (`max_mr_size`).
    #[doc(alias = "max_mr_size")]
    pub max_region_bytes: u64,
    /// Whether it supports atomics.
    #[doc(alias = "atomic_cap")]
    pub atomics: bool,
    /// The clock of its completion timestamps, if it has one.
    #[doc(alias = "hca_core_clock")]
    pub clock: Option<DeviceClock>,
    /// The types of [memory windows](crate::MemoryWindow) that it supports.
    pub windows: MemoryWindowSupport,
    /// Its vendor's IEEE OUI.
    pub vendor_id: u32,
    /// On-demand paging: see [`Registration::on_demand`](crate::Registration::on_demand).
    #[doc(alias("IBV_ODP_SUPPORT", "odp_caps"))]
    pub on_demand_paging: bool,
    /// The size of its on-chip device memory in bytes: see [`Context::device_memory`].
    #[doc(alias = "max_dm_size")]
    pub device_memory_bytes: u64,
}

/// The types of memory windows that a device supports (ibv_query_device(3)).
#[doc(alias = "IBV_DEVICE_MEM_WINDOW")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryWindowSupport {
    /// Type 1.
    #[doc(alias = "IBV_DEVICE_MEM_WINDOW")]
    pub type_1: bool,
    /// Type 2.
    #[doc(alias("IBV_DEVICE_MEM_WINDOW_TYPE_2A", "IBV_DEVICE_MEM_WINDOW_TYPE_2B"))]
    pub type_2: bool,
}

impl MemoryWindowSupport {
    fn from_sys(flags: sys::ibv_device_cap_flags) -> Self {
        let type_2 = sys::IBV_DEVICE_MEM_WINDOW_TYPE_2A | sys::IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        Self {
            type_1: flags & sys::IBV_DEVICE_MEM_WINDOW != 0,
            type_2: flags & type_2 != 0,
        }
    }
}

impl DeviceAttr {
    /// Whether it is Doorbell's userspace device, by its vendor.
    #[must_use]
    pub fn is_userspace(&self) -> bool {
        self.vendor_id == sys::SOFT_VENDOR_ID
    }

    fn from_sys(attr: &sys::ibv_device_attr) -> Self {
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let small = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        Self {
            ports: attr.phys_port_cnt,
            max_qp_wr: count(attr.max_qp_wr),
            max_sge: count(attr.max_sge),
            max_cqe: count(attr.max_cqe),
            max_srq_wr: count(attr.max_srq_wr),
            max_srq_sge: count(attr.max_srq_sge),
            max_rd_atomic: small(attr.max_qp_rd_atom),
            max_qp_init_rd_atomic: small(attr.max_qp_init_rd_atom),
            max_region_bytes: attr.max_mr_size,
            atomics: attr.atomic_cap != sys::IBV_ATOMIC_NONE,
            clock: None,
            windows: MemoryWindowSupport::from_sys(attr.device_cap_flags),
            vendor_id: attr.vendor_id,
            on_demand_paging: false,
            device_memory_bytes: 0,
        }
    }
}

impl DeviceAttr {
    fn extended(self, attr: &sys::ibv_device_attr_ex) -> Self {
        Self {
            on_demand_paging: attr.odp_caps.general_caps & u64::from(sys::IBV_ODP_SUPPORT) != 0,
            device_memory_bytes: attr.max_dm_size,
            clock: DeviceClock::from_sys(attr),
            ..self
        }
    }
}

impl Context {
    pub(crate) fn adopt(api: &'static Api, raw: *mut sys::ibv_context, name: String) -> Result<Self, DeviceError> {
        Self::new(api, raw, name, None).inspect_err(|_| {
            // SAFETY: opened by the caller, and nothing was made from it.
            unsafe { (api.close_device)(raw) };
        })
    }

    /// Uses a context that `lender` keeps open as long as it lives.
    pub(crate) fn borrow(
        api: &'static Api,
        raw: *mut sys::ibv_context,
        name: String,
        lender: Arc<dyn Send + Sync>,
    ) -> Result<Self, DeviceError> {
        Self::new(api, raw, name, Some(lender))
    }

    fn new(api: &'static Api, raw: *mut sys::ibv_context, name: String, lender: Lender) -> Result<Self, DeviceError> {
        let mut attr = MaybeUninit::<sys::ibv_device_attr>::zeroed();
        // SAFETY: `raw` is live and `attr` may be written.
        let queried = check(unsafe { (api.query_device)(raw, attr.as_mut_ptr()) });
        if let Err(error) = queried {
            return Err(DeviceError::Query {
                verb: "ibv_query_device",
                object: name,
                error,
            });
        }
        // SAFETY: all-zero is valid for integers, and the query may have filled any part of it.
        let mut attr = DeviceAttr::from_sys(unsafe { attr.assume_init_ref() });
        let mut more = MaybeUninit::<sys::ibv_device_attr_ex>::zeroed();
        // SAFETY: `raw` is live, `more` may be written. Without the call nothing is supported.
        if unsafe { inline::query_device_ex(raw, more.as_mut_ptr()) } == 0 {
            // SAFETY: all-zero is valid for integers, and the query may have filled any part.
            attr = attr.extended(unsafe { more.assume_init_ref() });
        }
        Ok(Self {
            inner: Arc::new(ContextInner {
                api,
                raw,
                name,
                attr,
                has_event_reader: AtomicBool::new(false),
                lender,
            }),
        })
    }

    pub(crate) fn inner(&self) -> &Arc<ContextInner> {
        &self.inner
    }

    pub(crate) fn from_inner(inner: Arc<ContextInner>) -> Self {
        Self { inner }
    }

    /// The device's name.
    #[doc(alias = "ibv_get_device_name")]
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The device's attributes, as queried when it was opened (they are constant).
    #[doc(alias = "ibv_query_device")]
    #[must_use]
    pub fn attr(&self) -> &DeviceAttr {
        &self.inner.attr
    }

    /// Queries port `port`, from 1 (ibv_query_port(3)).
    ///
    /// # Errors
    /// When there is no such port or the query fails.
    #[doc(alias = "ibv_query_port")]
    pub fn port(&self, port: u8) -> Result<PortAttr, DeviceError> {
        self.port_exists(port)?;
        let mut attr = MaybeUninit::<sys::ibv_port_attr>::zeroed();
        // SAFETY: the context is live and was made by this Api; `attr` may be written.
        let result = unsafe { inline::query_port(self.inner.api, self.inner.raw, port, attr.as_mut_ptr()) };
        check(result).map_err(|error| self.query_failed("ibv_query_port", format!("port {port}"), error))?;
        // SAFETY: query_port zeroes all and fills what the library supports; integers throughout.
        Ok(PortAttr::from_sys(unsafe { attr.assume_init_ref() }))
    }

    /// The GID at `index` of port `port`'s table.
    ///
    /// # Errors
    /// When the port or index does not exist, or the entry is empty (the error lists the rest).
    #[doc(alias("ibv_query_gid", "ibv_query_gid_ex"))]
    pub fn gid(&self, port: u8, index: u32) -> Result<GidEntry, DeviceError> {
        let entries = self.gids(port)?;
        match entries.iter().find(|entry| entry.index == index) {
            Some(&entry) => Ok(entry),
            None => Err(self.no_gid(port, IndexOrAny::Index(index), &entries)),
        }
    }

    /// Port `port`'s GIDs, without the empty entries of its table.
    ///
    /// # Errors
    /// When there is no such port or the query fails.
    #[doc(alias = "ibv_query_gid_table")]
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, DeviceError> {
        let len = self.port(port)?.gid_table_len;
        match self.gids_by_table(port, len) {
            Some(entries) => Ok(entries),
            None => (0..len)
                .filter_map(|index| self.gid_by_index(port, index).transpose())
                .collect(),
        }
    }

    /// The default source GID of a RoCE port: that of the widest scope (RoCEv2 with IPv4 first).
    ///
    /// # Errors
    /// When there is no such port, it has no GID, or a query fails.
    #[doc(alias = "ibv_query_gid")]
    pub fn default_gid(&self, port: u8) -> Result<GidEntry, DeviceError> {
        let entries = self.gids(port)?;
        // The first of the best: max_by_key alone would return the last.
        let best = entries.iter().rev().max_by_key(|entry| entry.preference());
        best.copied().ok_or_else(|| self.no_gid(port, IndexOrAny::Any, &[]))
    }

    /// The source GID of packets: that at `index`, or the default where the link layer needs one.
    pub(crate) fn source_gid(
        &self,
        port: u8,
        index: Option<u8>,
        attr: &PortAttr,
    ) -> Result<Option<GidEntry>, DeviceError> {
        match (index, attr.link_layer) {
            (Some(index), _) => Ok(Some(self.gid(port, index.into())?)),
            (None, LinkLayer::Ethernet) => Ok(Some(self.default_gid(port)?)),
            (None, _) => Ok(None),
        }
    }

    fn gids_by_table(&self, port: u8, len: u32) -> Option<Vec<GidEntry>> {
        let query = self.inner.api.query_gid_table?;
        // The call returns the entries of all ports together.
        let room = len as usize * usize::from(self.inner.attr.ports).max(1);
        let mut entries: Vec<sys::ibv_gid_entry> = Vec::with_capacity(room);
        // SAFETY: the context is live, and `entries` has capacity for `room` entries of this size.
        let found = unsafe {
            query(
                self.inner.raw,
                entries.as_mut_ptr(),
                room,
                0,
                size_of::<sys::ibv_gid_entry>(),
            )
        };
        let found = usize::try_from(found).ok().filter(|&found| found <= room)?;
        // SAFETY: the library has written `found` entries, at most `room`.
        unsafe { entries.set_len(found) };
        Some(
            entries
                .iter()
                .filter(|entry| entry.port_num == u32::from(port))
                .map(|entry| GidEntry {
                    index: entry.gid_index,
                    gid: Gid::from_sys(&entry.gid),
                    kind: GidType::from_sys(entry.gid_type),
                    interface: entry.ndev_ifindex,
                })
                .filter(|entry| !entry.gid.is_zero())
                .collect(),
        )
    }

    fn gid_by_index(&self, port: u8, index: u32) -> Result<Option<GidEntry>, DeviceError> {
        if let Some(query) = self.inner.api.query_gid_ex {
            let mut entry = MaybeUninit::<sys::ibv_gid_entry>::zeroed();
            // SAFETY: the context is live and `entry`, of the size given, may be written.
            let result = unsafe {
                query(
                    self.inner.raw,
                    port.into(),
                    index,
                    entry.as_mut_ptr(),
                    0,
                    size_of::<sys::ibv_gid_entry>(),
                )
            };
            // ENODATA: empty. Otherwise the call is missing: fall back to ibv_query_gid.
            match check(result) {
                Ok(()) => {
                    // SAFETY: zeroed before and filled by the library; all integers and bytes.
                    let entry = unsafe { entry.assume_init_ref() };
                    let gid = Gid::from_sys(&entry.gid);
                    return Ok((!gid.is_zero()).then_some(GidEntry {
                        index,
                        gid,
                        kind: GidType::from_sys(entry.gid_type),
                        interface: entry.ndev_ifindex,
                    }));
                }
                Err(error) if error.raw_os_error() == Some(ENODATA) => return Ok(None),
                Err(_) => {}
            }
        }
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        let c_index = i32::try_from(index).unwrap_or(i32::MAX);
        // SAFETY: the context is live and `gid` may be written.
        let result = unsafe { (self.inner.api.query_gid)(self.inner.raw, port, c_index, &mut gid) };
        check(result)
            .map_err(|error| self.query_failed("ibv_query_gid", format!("port {port} index {index}"), error))?;
        let gid = Gid::from_sys(&gid);
        Ok((!gid.is_zero()).then_some(GidEntry {
            index,
            gid,
            kind: GidType::Unknown,
            interface: 0,
        }))
    }

    /// Allocates a protection domain (ibv_alloc_pd(3), IBTA vol 1, 10.2.3).
    ///
    /// # Errors
    /// When the device refuses.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn protection_domain(&self) -> Result<ProtectionDomain, DeviceError> {
        ProtectionDomain::new(self)
    }

    /// Allocates `len` bytes of on-chip device memory, aligned to `align` (ibv_alloc_dm(3)).
    ///
    /// # Errors
    /// When the device has none, or not as much (see [`DeviceAttr::device_memory_bytes`]).
    #[doc(alias = "ibv_alloc_dm")]
    pub fn device_memory(&self, len: usize, align: usize) -> Result<DeviceMemory, MemoryError> {
        DeviceMemory::new(self, len, align)
    }

    /// Creates a completion queue of at least `entries` entries (ibv_create_cq(3), IBTA vol 1,
    /// 10.2.6).
    ///
    /// Queue pairs reserve entries for their outstanding completions, so it cannot overflow.
    ///
    /// # Errors
    /// When the device refuses, or has no queues as large.
    #[doc(alias = "ibv_create_cq")]
    pub fn completion_queue(&self, entries: u32) -> Result<CompletionQueue, CompletionQueueError> {
        CompletionQueue::classic(self, entries, None, 0)
    }

    /// As [`completion_queue`](Self::completion_queue), on `channel`, which reports completions.
    ///
    /// # Errors
    /// As for a queue without channel, and when the channel is another device's.
    #[doc(alias = "ibv_create_cq")]
    pub fn completion_queue_on(
        &self,
        channel: &CompletionChannel,
        entries: u32,
    ) -> Result<CompletionQueue, CompletionQueueError> {
        CompletionQueue::classic(self, entries, Some(channel), 0)
    }

    /// As [`completion_queue_on`](Self::completion_queue_on), with events on completion `vector`,
    /// of [`completion_vectors`](Self::completion_vectors) (default 0): often one CPU's interrupt.
    ///
    /// # Errors
    /// As for the default vector, and when there is no such vector.
    #[doc(alias("ibv_create_cq", "comp_vector"))]
    pub fn completion_queue_on_vector(
        &self,
        channel: &CompletionChannel,
        vector: u32,
        entries: u32,
    ) -> Result<CompletionQueue, CompletionQueueError> {
        let vectors = self.completion_vectors();
        if vector >= vectors {
            return Err(CompletionQueueError::NoVector {
                device: self.name().to_owned(),
                vector,
                vectors,
            });
        }
        CompletionQueue::classic(self, entries, Some(channel), vector)
    }

    /// The number of completion vectors (`num_comp_vectors`).
    #[doc(alias = "num_comp_vectors")]
    #[must_use]
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is live; the field is constant.
        u32::try_from(unsafe { (*self.inner().raw).num_comp_vectors }).unwrap_or(0)
    }

    /// Builds an extended completion queue of at least `entries` entries (ibv_create_cq_ex(3)).
    #[doc(alias = "ibv_create_cq_ex")]
    pub fn extended_completion_queue(&self, entries: u32) -> ExtendedCompletionQueueBuilder<'_> {
        ExtendedCompletionQueueBuilder::new(self, entries)
    }

    /// As [`completion_queue`](Self::completion_queue), of the best kind that the device supports.
    ///
    /// # Errors
    /// As for [`completion_queue`](Self::completion_queue).
    #[doc(alias("ibv_create_cq", "ibv_create_cq_ex"))]
    pub fn best_completion_queue(&self, entries: u32) -> Result<BestCompletionQueue, CompletionQueueError> {
        BestCompletionQueue::new(self, entries)
    }

    /// Creates a completion channel to wait on (ibv_create_comp_channel(3)).
    ///
    /// # Errors
    /// When the device refuses, or the process has no file descriptor left.
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn completion_channel(&self) -> Result<CompletionChannel, EventError> {
        CompletionChannel::new(self)
    }

    /// The reader of its asynchronous events, one at a time; events are queued while there is none.
    ///
    /// # Errors
    /// When there is one already.
    #[doc(alias = "ibv_get_async_event")]
    pub fn events(&self) -> Result<Events, EventError> {
        Events::new(self)
    }

    fn port_exists(&self, port: u8) -> Result<(), DeviceError> {
        let ports = self.inner.attr.ports;
        if (1..=ports).contains(&port) {
            return Ok(());
        }
        Err(DeviceError::NoPort {
            device: self.inner.name.clone(),
            port,
            ports,
        })
    }

    fn no_gid(&self, port: u8, index: IndexOrAny, entries: &[GidEntry]) -> DeviceError {
        DeviceError::NoGid {
            device: self.inner.name.clone(),
            port,
            index,
            available: entries.iter().map(|entry| (entry.index, entry.gid)).collect(),
        }
    }

    fn query_failed(&self, verb: &'static str, what: String, error: io::Error) -> DeviceError {
        DeviceError::Query {
            verb,
            object: format!("{} {what}", self.inner.name),
            error,
        }
    }
}

const ENODATA: i32 = 61;

impl core::fmt::Debug for Context {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Context")
            .field("name", &self.inner.name)
            .finish_non_exhaustive()
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if self.lender.is_some() {
            return;
        }
        // SAFETY: the last reference: its objects hold one until destroyed (or leak it).
        let result = unsafe { (self.api.close_device)(self.raw) };
        if let Err(error) = check(result) {
            tracing::error!(device = %self.name, %error, "ibv_close_device failed; the context is leaked");
        }
    }
}

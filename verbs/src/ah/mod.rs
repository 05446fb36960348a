//! Address handles (AH): the destinations of datagrams (ibv_create_ah(3), IBTA vol 1, 10.2.2).

mod deferred;

use core::mem::MaybeUninit;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

pub(crate) use deferred::DeferredHandles;

use crate::error::DeviceError;
use crate::memory::{Buffer, HostMemory};
use crate::pd::{PdInner, ProtectionDomain};
use crate::qp::{GRH_BYTES, UdEndpoint};
use crate::raw::Lender;
use crate::types::{Gid, Lid};
use crate::wr::datagram::Datagram;

/// An address handle: the path to a port, at which many queue pairs may be.
///
/// Cloning is cheap. It may be dropped as soon as a post with it has returned: the protection
/// domain keeps what the device may still need (ibv_post_send(3)).
#[doc(alias("ibv_ah", "ibv_create_ah", "ibv_destroy_ah"))]
#[derive(Clone)]
pub struct AddressHandle {
    inner: Arc<AhInner>,
}

struct AhInner {
    raw: *mut sys::ibv_ah,
    port: u8,
    /// The longest datagram that its destination takes, in bytes, if known.
    max_len: u32,
    pd: Arc<PdInner>,
    lender: Lender,
}

// SAFETY: `raw` is only passed to verbs, which may be called from any thread.
unsafe impl Send for AhInner {}
// SAFETY: as above.
unsafe impl Sync for AhInner {}

/// The destination's MTU is unknown.
pub(crate) const ANY_LENGTH: u32 = u32::MAX;

impl AddressHandle {
    /// # Safety
    /// `raw` was just created in `pd`, for `port`.
    unsafe fn new(raw: *mut sys::ibv_ah, port: u8, max_len: u32, pd: &Arc<PdInner>) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(raw, (port, max_len), pd, None) }
    }

    /// # Safety
    /// `raw` is a live handle of `pd`, for `port`, which only the lender, if any, destroys.
    pub(crate) unsafe fn adopt(
        raw: *mut sys::ibv_ah,
        (port, max_len): (u8, u32),
        pd: &Arc<PdInner>,
        lender: Lender,
    ) -> Self {
        let pd = Arc::clone(pd);
        Self {
            inner: Arc::new(AhInner {
                raw,
                port,
                max_len,
                pd,
                lender,
            }),
        }
    }

    #[inline(always)]
    pub(crate) fn raw(&self) -> *mut sys::ibv_ah {
        self.inner.raw
    }

    #[inline(always)]
    pub(crate) fn max_len(&self) -> u32 {
        self.inner.max_len
    }

    /// Whether a queue pair on `port`, in the domain at the address `pd`, may use it.
    #[inline(always)]
    pub(crate) fn is_usable_on(&self, pd: usize, port: u8) -> bool {
        Arc::as_ptr(&self.inner.pd).addr() == pd && self.inner.port == port
    }
}

impl core::fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("AddressHandle")
            .field("device", &self.inner.pd.context.name)
            .field("port", &self.inner.port)
            .finish_non_exhaustive()
    }
}

impl Drop for AhInner {
    fn drop(&mut self) {
        // SAFETY: created by `new`, released here, once. A post in progress would borrow a handle.
        unsafe {
            self.pd
                .handles
                .destroy_or_defer(&self.pd.context, self.raw, self.lender.take())
        };
    }
}

/// Flow labels have 20 bits (IBTA vol 1, 8.3.3).
pub(crate) const MAX_FLOW_LABEL: u32 = (1 << 20) - 1;

#[derive(Debug, Clone, Copy)]
pub(crate) struct AddressVector {
    pub(crate) port: u8,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) service_level: u8,
    pub(crate) flow_label: u32,
}

impl AddressVector {
    /// The path of a vector, and the index of its source GID.
    pub(crate) fn of(vector: &sys::ibv_ah_attr) -> (Self, Option<u8>) {
        let path = Self {
            port: vector.port_num,
            traffic_class: vector.grh.traffic_class,
            hop_limit: vector.grh.hop_limit,
            service_level: vector.sl,
            flow_label: vector.grh.flow_label,
        };
        (path, (vector.is_global != 0).then_some(vector.grh.sgid_index))
    }

    /// To `gid` or, without the index of a source GID, to `lid` (IBTA vol 1, 11.2.2.1).
    pub(crate) fn ah_attr(&self, gid: Gid, lid: Lid, source: Option<u32>) -> sys::ibv_ah_attr {
        // SAFETY: all-zero is a valid value of this struct of integers.
        let mut vector: sys::ibv_ah_attr = unsafe { core::mem::zeroed() };
        vector.dlid = lid.0;
        vector.sl = self.service_level;
        vector.port_num = self.port;
        if let Some(index) = source {
            vector.is_global = 1;
            vector.grh.dgid = gid.to_sys();
            // The default GID's index may exceed this; the device reports an invalid index.
            vector.grh.sgid_index = u8::try_from(index).unwrap_or(u8::MAX);
            vector.grh.hop_limit = self.hop_limit;
            vector.grh.traffic_class = self.traffic_class;
            vector.grh.flow_label = self.flow_label;
        }
        vector
    }
}

/// Builds an address handle (ibv_create_ah(3)) for queue pairs of the same port and source GID.
#[doc(alias("ibv_ah_attr", "ibv_create_ah"))]
#[derive(Debug, Clone, Copy)]
#[must_use = "a builder does nothing until to(), to_gid() or reply_to() is called"]
pub struct AddressHandleBuilder<'a> {
    pd: &'a ProtectionDomain,
    route: AddressVector,
    gid_index: Option<u8>,
}

impl<'a> AddressHandleBuilder<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain) -> Self {
        let route = AddressVector {
            port: 1,
            traffic_class: 0,
            hop_limit: 64,
            service_level: 0,
            flow_label: 0,
        };
        Self::along(pd, route, None)
    }

    pub(crate) fn along(pd: &'a ProtectionDomain, route: AddressVector, gid_index: Option<u8>) -> Self {
        Self { pd, route, gid_index }
    }

    /// The port that packets leave by, from 1 (default 1).
    #[doc(alias = "port_num")]
    pub fn port(mut self, port: u8) -> Self {
        self.route.port = port;
        self
    }

    /// The source GID's index (default on RoCE: [`default_gid`](crate::Context::default_gid)).
    #[doc(alias = "sgid_index")]
    pub fn gid_index(mut self, index: u8) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// The traffic class of the packets: on RoCEv2 the IP header's DSCP and ECN (default 0).
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.route.traffic_class = class;
        self
    }

    /// The hop limit of the packets (default 64).
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.route.hop_limit = hops;
        self
    }

    /// The flow label, 20 bits (default 0); over IPv4 adapters derive the UDP source port from it.
    pub fn flow_label(mut self, label: u32) -> Self {
        self.route.flow_label = label;
        self
    }

    /// The InfiniBand service level, at most 15 (default 0).
    #[doc(alias = "sl")]
    pub fn service_level(mut self, level: u8) -> Self {
        self.route.service_level = level;
        self
    }

    /// The handle for the port of `endpoint`.
    ///
    /// # Errors
    /// When the device has no datagrams, port or GID do not exist, or the peer is not resolved.
    #[doc(alias = "ibv_create_ah")]
    pub fn to(self, endpoint: &UdEndpoint) -> Result<AddressHandle, AddressHandleError> {
        self.create(endpoint.gid, endpoint.lid, endpoint.mtu.bytes())
    }

    /// The handle for the port with this GID.
    ///
    /// # Errors
    /// As for [`to`](Self::to).
    #[doc(alias = "ibv_create_ah")]
    pub fn to_gid(self, gid: Gid) -> Result<AddressHandle, AddressHandleError> {
        self.create(gid, Lid(0), ANY_LENGTH)
    }

    /// The handle for the sender of `datagram`, which lies in the buffer `received` behind its GRH
    /// (ibv_create_ah_from_wc(3)). Of the builder's settings only the port is used: the reply takes
    /// the reverse path.
    ///
    /// # Errors
    /// As for [`to`](Self::to), and when the buffer is too short to hold the header.
    #[doc(alias("ibv_create_ah_from_wc", "ibv_init_ah_from_wc"))]
    pub fn reply_to<K: HostMemory>(
        self,
        datagram: &Datagram,
        received: &Buffer<K>,
    ) -> Result<AddressHandle, AddressHandleError> {
        let len = received.len();
        if len < GRH_BYTES {
            return Err(AddressHandleError::NoHeader { len });
        }
        let mut header = [0; GRH_BYTES];
        received.read_at(0, &mut header);
        // SAFETY: all-zero is valid for structs of integers, and any bytes are a valid header.
        let (mut wc, mut grh) = unsafe { (datagram.to_sys(), MaybeUninit::<sys::ibv_grh>::zeroed().assume_init()) };
        const { assert!(size_of::<sys::ibv_grh>() == GRH_BYTES) };
        // SAFETY: both are 40 bytes, and any bytes are a valid ibv_grh.
        unsafe { core::ptr::copy_nonoverlapping(header.as_ptr(), (&raw mut grh).cast(), GRH_BYTES) };
        let pd = self.pd.inner();
        let Some(create) = pd.context.api.create_ah_from_wc else {
            return Err(self.unsupported());
        };
        self.check()?;
        pd.handles.destroy_completed(&pd.context);
        // SAFETY: the domain is live, and completion and header are of one datagram.
        let raw = unsafe { create(pd.raw, &mut wc, &mut grh, self.route.port) };
        self.finish("ibv_create_ah_from_wc", raw, ANY_LENGTH, || {
            format!("the sender of a datagram, queue pair {}", datagram.source())
        })
    }

    fn create(&self, gid: Gid, lid: Lid, max_len: u32) -> Result<AddressHandle, AddressHandleError> {
        let pd = self.pd.inner();
        let Some(create) = pd.context.api.create_ah else {
            return Err(self.unsupported());
        };
        self.check()?;
        let context = self.pd.context();
        let port = context.port(self.route.port)?;
        let source = context.source_gid(self.route.port, self.gid_index, &port)?;
        let mut vector = self.route.ah_attr(gid, lid, source.map(|entry| entry.index));
        pd.handles.destroy_completed(&pd.context);
        // SAFETY: the domain is live, and the vector may be read.
        let raw = unsafe { create(pd.raw, &mut vector) };
        self.finish("ibv_create_ah", raw, max_len, || match source {
            Some(source) => format!("{gid} from {}", source.gid),
            None => format!("LID {lid}"),
        })
    }

    fn check(&self) -> Result<(), AddressHandleError> {
        match (self.route.service_level, self.route.flow_label) {
            (0..=15, 0..=MAX_FLOW_LABEL) => Ok(()),
            (0..=15, label) => Err(AddressHandleError::FlowLabel { label }),
            (level, _) => Err(AddressHandleError::ServiceLevel { level }),
        }
    }

    fn unsupported(&self) -> AddressHandleError {
        AddressHandleError::Unsupported {
            device: self.pd.inner().context.name.clone(),
        }
    }

    fn finish(
        &self,
        verb: &'static str,
        raw: *mut sys::ibv_ah,
        max_len: u32,
        destination: impl FnOnce() -> String,
    ) -> Result<AddressHandle, AddressHandleError> {
        let pd = self.pd.inner();
        if raw.is_null() {
            return Err(AddressHandleError::Create {
                verb,
                object: format!("{} port {}, {}", pd.context.name, self.route.port, destination()),
                error: io::Error::last_os_error(),
            });
        }
        // SAFETY: just created, in this domain and for this port.
        Ok(unsafe { AddressHandle::new(raw, self.route.port, max_len, pd) })
    }
}

/// An address handle could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressHandleError {
    /// The library or device has no address handles.
    #[error("{device} has no datagrams: its library lacks ibv_create_ah")]
    Unsupported {
        /// The device's name.
        device: String,
    },
    /// Service levels have four bits.
    #[error("service level {level}: the highest is 15")]
    ServiceLevel {
        /// The service level requested.
        level: u8,
    },
    /// Flow labels have twenty bits.
    #[error("flow label {label:#x}: the highest is {MAX_FLOW_LABEL:#x}")]
    FlowLabel {
        /// The flow label requested.
        label: u32,
    },
    /// The buffer does not hold the GRH of a datagram.
    #[error(
        "a buffer of {len} bytes does not hold the {GRH_BYTES} of a datagram's header: give the one that it was received in"
    )]
    NoHeader {
        /// Its length in bytes.
        len: usize,
    },
    /// ibv_create_ah(3) or ibv_create_ah_from_wc(3) failed.
    #[error("{verb}({object}): {error}; {}", create_advice(.error))]
    Create {
        /// The verb.
        verb: &'static str,
        /// Device, port and destination.
        object: String,
        /// The library's error.
        error: io::Error,
    },
    /// A port or a GID could not be queried.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn create_advice(error: &io::Error) -> &'static str {
    use io::ErrorKind::{HostUnreachable, InvalidInput, NetworkUnreachable, OutOfMemory, TimedOut};
    match error.kind() {
        TimedOut | HostUnreachable | NetworkUnreachable => "the address cannot be resolved: check routing to the peer",
        InvalidInput => "is the peer's GID of the same kind as this side's (IPv4 or IPv6), and a unicast address?",
        OutOfMemory => {
            "the device has no room for another address handle: drop some, and poll the completions of sends with them"
        }
        _ => "see the kernel's log",
    }
}

//! Access rights as types: of a region ([`Local`], [`PeerRead`] …, of [`Buffer`](super::Buffer)),
//! and of its key ([`ReadAccess`] …, of [`Remote`](super::Remote)). Every region has LOCAL_WRITE,
//! so that any buffer can receive (and remote write and atomics require it: IBTA vol 1, 10.6.3.1).

use core::ffi::c_uint;
use core::marker::PhantomData;

use doorbell_verbs_sys as sys;

use super::clonable::{Frozen, Scratch};

mod sealed {
    pub trait Sealed {}
}
use sealed::Sealed;

/// The kind of a buffer: one of the [`Rights`], [`Frozen`], [`Scratch`] or [`Opaque`].
pub trait MemoryKind: Sealed + 'static {
    /// Identifies the kind where the type is erased.
    #[doc(hidden)]
    const TAG: u8;
}

/// Kinds of memory that this process reaches by load and store: all but [`Opaque`].
pub trait HostMemory: MemoryKind {}

/// Rights that memory can be registered with (ibv_reg_mr(3); IBTA vol 1, 10.6.3).
#[doc(alias = "ibv_access_flags")]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a set of access rights, as memory that a device writes has",
    note = "`Frozen` memory is only read: receive and READ into a buffer of `Local` or another of the rights below"
)]
pub trait Rights: HostMemory + Copy {
    /// `ibv_access_flags` of the region.
    #[doc(hidden)]
    const ACCESS: c_uint;
}

/// Kinds of memory that no peer can write: it can be lent as `&[u8]`.
#[diagnostic::on_unimplemented(
    message = "memory of `{Self}` is not lent as a slice: a peer may write it at any time, or the CPU does not reach it",
    note = "what a peer may write is copied out by `read_at`, and a flag in it is loaded by `load_u64`"
)]
pub trait Readable: MemoryKind {}

/// Rights under which a peer may write at any time: the memory is never lent as `&[u8]`.
pub trait PeerWritable: Rights {}

/// Rights that give peers access, by a key.
pub trait PeerAccessible: Rights {
    /// The rights that a key to such memory grants.
    type Key: KeyAccess;
}

/// The rights that a key grants a peer.
pub trait KeyAccess: Sealed + Copy + 'static {
    /// The `ibv_access_flags` it grants, as in its serialised form.
    #[doc(hidden)]
    const ACCESS: c_uint;
    /// Its name in error messages.
    #[doc(hidden)]
    const NAME: &'static str;
}

/// Keys that grant RDMA READ (IBTA vol 1, 9.4.4).
#[diagnostic::on_unimplemented(
    message = "a key of `{Self}` does not grant RDMA READ",
    label = "this key grants no READ",
    note = "the memory's owner registers it as `PeerRead`, `PeerReadWrite` or `PeerAll`, and gives out its `remote()`"
)]
pub trait GrantsRead: KeyAccess {}
/// Keys that grant RDMA WRITE (IBTA vol 1, 9.4.3).
#[diagnostic::on_unimplemented(
    message = "a key of `{Self}` does not grant RDMA WRITE",
    label = "this key grants no WRITE",
    note = "the memory's owner registers it as `PeerWrite`, `PeerReadWrite` or `PeerAll`, and gives out its `remote()`"
)]
pub trait GrantsWrite: KeyAccess {}
/// Keys that grant atomic operations (IBTA vol 1, 9.4.5).
#[diagnostic::on_unimplemented(
    message = "a key of `{Self}` does not grant atomic operations",
    label = "this key grants no atomics",
    note = "the memory's owner registers it as `PeerAtomic` or `PeerAll`, and gives out its `remote()`"
)]
pub trait GrantsAtomic: KeyAccess {}

macro_rules! rights {
    ($( $(#[$doc:meta])* $name:ident = $tag:literal, $access:expr; )*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name;
        impl Sealed for $name {}
        impl MemoryKind for $name { const TAG: u8 = $tag; }
        impl HostMemory for $name {}
        impl Rights for $name { const ACCESS: c_uint = sys::IBV_ACCESS_LOCAL_WRITE | $access; }
    )* };
}

macro_rules! keys {
    ($( $(#[$doc:meta])* $name:ident: $rights:ident = $access:expr, $( $grants:ident )*; )*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name;
        impl Sealed for $name {}
        impl KeyAccess for $name { const ACCESS: c_uint = $access; const NAME: &'static str = stringify!($name); }
        $( impl $grants for $name {} )*
        impl PeerAccessible for $rights { type Key = $name; }
    )* };
}

pub(super) const LOCAL: c_uint = Local::ACCESS;

const READ: c_uint = sys::IBV_ACCESS_REMOTE_READ;
const WRITE: c_uint = sys::IBV_ACCESS_REMOTE_WRITE;
const ATOMIC: c_uint = sys::IBV_ACCESS_REMOTE_ATOMIC;

rights! {
    /// Local access only: peers have no rights. The default.
    #[doc(alias = "IBV_ACCESS_LOCAL_WRITE")]
    Local = 1, 0;
    /// Peers may read.
    #[doc(alias = "IBV_ACCESS_REMOTE_READ")]
    PeerRead = 2, READ;
    /// Peers may write.
    #[doc(alias = "IBV_ACCESS_REMOTE_WRITE")]
    PeerWrite = 3, WRITE;
    /// Peers may read and write.
    #[doc(alias("IBV_ACCESS_REMOTE_READ", "IBV_ACCESS_REMOTE_WRITE"))]
    PeerReadWrite = 4, READ | WRITE;
    /// Peers may perform atomic operations.
    #[doc(alias = "IBV_ACCESS_REMOTE_ATOMIC")]
    PeerAtomic = 5, ATOMIC;
    /// Peers may read, write and perform atomic operations.
    #[doc(alias("IBV_ACCESS_REMOTE_READ", "IBV_ACCESS_REMOTE_WRITE", "IBV_ACCESS_REMOTE_ATOMIC"))]
    PeerAll = 6, READ | WRITE | ATOMIC;
    /// Peers have the rights of [memory windows](crate::MemoryWindow) only; never lent as `&[u8]`.
    #[doc(alias = "IBV_ACCESS_MW_BIND")]
    Windowed = 8, sys::IBV_ACCESS_MW_BIND;
}

keys! {
    /// Grants RDMA READ.
    #[doc(alias = "IBV_ACCESS_REMOTE_READ")]
    ReadAccess: PeerRead = READ, GrantsRead;
    /// Grants RDMA WRITE.
    #[doc(alias = "IBV_ACCESS_REMOTE_WRITE")]
    WriteAccess: PeerWrite = WRITE, GrantsWrite;
    /// Grants RDMA READ and WRITE.
    #[doc(alias("IBV_ACCESS_REMOTE_READ", "IBV_ACCESS_REMOTE_WRITE"))]
    ReadWriteAccess: PeerReadWrite = READ | WRITE, GrantsRead GrantsWrite;
    /// Grants atomic operations.
    #[doc(alias = "IBV_ACCESS_REMOTE_ATOMIC")]
    AtomicAccess: PeerAtomic = ATOMIC, GrantsAtomic;
    /// Grants RDMA READ, WRITE and atomic operations.
    #[doc(alias("IBV_ACCESS_REMOTE_READ", "IBV_ACCESS_REMOTE_WRITE", "IBV_ACCESS_REMOTE_ATOMIC"))]
    AllAccess: PeerAll = READ | WRITE | ATOMIC, GrantsRead GrantsWrite GrantsAtomic;
}

impl Sealed for Frozen {}
impl MemoryKind for Frozen {
    const TAG: u8 = 7;
}
impl HostMemory for Frozen {}

impl Sealed for Scratch {}
impl MemoryKind for Scratch {
    const TAG: u8 = 9;
}

/// Memory with rights `R` that only devices reach, not this process: a GPU's, shared as a dma-buf
/// ([`register_dmabuf`](crate::ProtectionDomain::register_dmabuf)), or the adapter's own
/// ([`DeviceMemory`](crate::DeviceMemory); ibv_alloc_dm(3)). A `Buffer<Opaque<R>>` is posted like
/// any other, and gives no access to its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opaque<R: Rights = Local>(PhantomData<R>);

impl<R: Rights> Sealed for Opaque<R> {}
impl<R: Rights> MemoryKind for Opaque<R> {
    const TAG: u8 = R::TAG | 0x80;
}

impl Readable for Local {}
impl Readable for PeerRead {}
impl Readable for Frozen {}

impl PeerWritable for PeerWrite {}
impl PeerWritable for PeerReadWrite {}
impl PeerWritable for PeerAtomic {}
impl PeerWritable for PeerAll {}
impl PeerWritable for Windowed {}

/// Kinds of memory that memory windows can be bound to: [`Windowed`], also where it is [`Opaque`].
pub trait Bindable: MemoryKind {}
impl Bindable for Windowed {}
impl Bindable for Opaque<Windowed> {}

//! Registered memory: owned, typed by peers' rights, and out of safe code's reach while posted.
//!
//! [`Memory`] is an allocation; registering it (`region`) gives a [`Buffer`], a unique range of the
//! region: a thin pointer to a header (`range`). [`Remote`] is what a peer gets.

mod alias;
mod buffer;
mod cache;
mod clonable;
mod copy;
mod device;
mod pool;
mod range;
mod region;
pub(crate) mod registration;
mod remote;
mod rights;
mod source;
mod storage;
mod window;

mod word;

pub use alias::BufferAlias;
pub use buffer::{Buffer, BufferPart, Chunks, IntoMemoryError, ReregisterError};
pub use cache::{CacheLimits, CacheStats, RegistrationCache};
pub use clonable::{Frozen, Scratch};
pub use device::DeviceMemory;
pub use pool::{BufferPool, BufferPoolDrain};
pub use range::Buffers;
pub(crate) use range::RangePtr;
pub use region::RegionAttr;
pub(crate) use region::adopt_region;
pub use registration::Registration;
pub use remote::{ParseRemoteError, Remote, RemoteChunks, RemoteWord};
pub use rights::{
    AllAccess, AtomicAccess, Bindable, GrantsAtomic, GrantsRead, GrantsWrite, HostMemory, KeyAccess, Local, MemoryKind,
    Opaque, PeerAccessible, PeerAll, PeerAtomic, PeerRead, PeerReadWrite, PeerWritable, PeerWrite, ReadAccess,
    ReadWriteAccess, Readable, Rights, Windowed, WriteAccess,
};
pub use source::{Sink, Source};
pub use storage::{HugePage, Memory};
pub(crate) use window::TiedWindows;
pub use window::{BoundWindow, Invalidation, MemoryWindow, WindowType, WindowType1, WindowType2};
pub use word::AtomicWord;

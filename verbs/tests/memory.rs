//! Memory options, owners, huge pages, dma-bufs, device memory and changed rights.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use doorbell_verbs::{
    Buffer, BufferPool, HugePage, IntoMemoryError, Local, Memory, MemoryError, Opaque, PeerRead, PeerReadWrite,
    PeerWrite, ReadAccess, Remote, ReregisterError,
};
use doorbell_verbs_sys as sys;

use crate::rig::{PEER, opened};
use crate::stub::memory::DEVICE_MEMORY;
use crate::stub::{Stub, Verb};

#[test]
fn options_reach_the_device_beside_the_rights() {
    let stub = Stub::new();
    stub.extend();
    let pd = stub.open().protection_domain().unwrap();
    let registration = pd.registration().relaxed_ordering().on_demand().huge_pages();
    let buffer = registration.register(vec![0; 64], PeerWrite).unwrap();
    let region = buffer.region();
    let options = sys::IBV_ACCESS_RELAXED_ORDERING | sys::IBV_ACCESS_ON_DEMAND | sys::IBV_ACCESS_HUGETLB;
    let access = options | sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE;
    assert_eq!(stub.region(region.lkey), Some((region.addr, 64, access)));
    assert_eq!(region.access, access);
    buffer.prefetch(false).unwrap();
    buffer.prefetch(true).unwrap();
    assert_eq!(stub.log(), ["prefetch", "prefetch_write"]);
}

#[test]
fn a_device_without_paging_on_demand_says_so_before_anything_is_registered() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let error = pd.registration().on_demand().register(vec![0; 64], Local).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("register without on_demand, which pins the memory"),
        "{error}"
    );
    assert_eq!(stub.live("mr"), 0);
    let error = pd.register(vec![0; 64], Local).unwrap().prefetch(false).unwrap_err();
    assert!(matches!(error, MemoryError::Prefetch { .. }), "{error}");
}

struct Owner {
    bytes: [u8; 100],
    dropped: std::sync::mpsc::Sender<u8>,
}

impl AsMut<[u8]> for Owner {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[10..20]
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.dropped.send(self.bytes[10]).unwrap();
    }
}

#[test]
fn an_owner_is_dropped_after_its_region() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let (dropped, drops) = std::sync::mpsc::channel();
    let memory = Memory::from_owner(Owner {
        bytes: [1; 100],
        dropped,
    });
    let mut buffer = pd.register(memory, Local).unwrap();
    assert_eq!(buffer.len(), 10);
    buffer[0] = 7;
    let memory = buffer.into_memory().unwrap();
    assert_eq!((stub.live("mr"), memory[0], drops.try_recv().ok()), (0, 7, None));
    drop(pd.register(memory, Local).unwrap());
    assert_eq!((stub.live("mr"), drops.try_recv().ok()), (0, Some(7)));

    let forever: &'static mut [u8] = Box::leak(Box::new([3; 8]));
    assert_eq!(*pd.register(forever, Local).unwrap(), [3; 8]);
    let copied = Memory::from_owner(vec![4; 5]).into_vec();
    assert_eq!(copied, [4; 5]);
}

#[test]
#[cfg_attr(miri, ignore = "Miri maps no huge pages")]
fn huge_memory_is_aligned_zero_and_ours() {
    let mut memory = Memory::transparent_huge((2 << 20) + 5);
    assert_eq!((memory.len(), memory.as_ptr() as usize % (2 << 20)), ((2 << 20) + 5, 0));
    assert!(memory.iter().all(|&byte| byte == 0));
    memory.fill(1);
    assert!(Memory::transparent_huge(0).is_empty());

    assert!(matches!(Memory::huge(0, HugePage::Size2M), Err(MemoryError::Empty)));
    match Memory::huge(5, HugePage::Size2M) {
        Ok(mut memory) => {
            assert_eq!((memory.len(), memory.as_ptr() as usize % (2 << 20)), (5, 0));
            memory.fill(1);
        }
        Err(error) => assert!(error.to_string().contains("hugepages-2048kB/nr_hugepages"), "{error}"),
    }
    // No machine has reserved that many.
    let error = Memory::huge(1 << 46, HugePage::Size1G).unwrap_err();
    assert!(error.to_string().contains("or use Memory::transparent_huge"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no memfd")]
fn shared_memory_is_a_file_that_keeps_its_length() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    const LEN: usize = 10_000;

    let mut memory = Memory::shared(LEN).unwrap();
    assert_eq!((memory.len(), memory.as_ptr() as usize % 4096), (LEN, 0));
    assert!(memory.iter().all(|&byte| byte == 0));
    memory[LEN - 1] = 7;

    let inode = mapped_inode(memory.as_ptr() as usize).unwrap();
    let file = open_file(inode).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 12_288, "whole pages");
    let mut byte = [0];
    file.read_exact_at(&mut byte, LEN as u64 - 1).unwrap();
    assert_eq!(byte, [7]);
    assert!(file.set_len(0).is_err() && file.set_len(1 << 20).is_err(), "sealed");
    assert_eq!(file.metadata().unwrap().ino(), inode);
    drop(file);
    drop(memory);
    assert!(open_file(inode).is_none(), "closed with the memory");

    assert!(matches!(Memory::shared(0), Err(MemoryError::Empty)));
    let error = Memory::shared(usize::MAX >> 1).unwrap_err();
    assert!(error.to_string().contains("use Memory::zeroed"), "{error}");

    // Registered by its descriptor, or by its address where the device refuses that.
    let (stub, _context, pd) = opened();
    for shares in [true, false] {
        if !shares {
            stub.fail(Verb::RegDmaBuf, libc::EINVAL);
        }
        let mut buffer = pd.register(Memory::shared(LEN).unwrap(), Local).unwrap();
        let (at, len, _) = stub.region(buffer.region().lkey).unwrap();
        assert_eq!((at == 0, len), (shares, LEN as u64));
        buffer[0] = 3;
        assert_eq!(buffer.region().addr, buffer.as_ptr() as u64);
        assert_eq!(buffer.into_memory().unwrap().into_vec()[0], 3);
    }
    // Also where others own it, too; but only as a whole.
    for len in [LEN, LEN - 1] {
        let mut memory = Memory::shared(LEN).unwrap();
        let start = memory.as_mut_ptr();
        // SAFETY: mapped until the owner is dropped; accessed by nothing.
        let buffer = unsafe { pd.register_raw(start, len, Local, Arc::new(memory)) }.unwrap();
        let (at, ..) = stub.region(buffer.region().lkey).unwrap();
        assert_eq!(at == 0, len == LEN);
    }
}

fn mapped_inode(addr: usize) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{addr:08x}-")))?;
    assert_eq!(line.split_whitespace().nth(1), Some("rw-s"));
    line.split_whitespace().nth(4)?.parse().ok()
}

/// A descriptor of this process for the inode of a memfd, opened anew.
fn open_file(inode: u64) -> Option<std::fs::File> {
    use std::os::unix::fs::MetadataExt;
    let mut links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let link = links.find(|link| {
        let memfd = std::fs::read_link(link.path()).is_ok_and(|target| target.starts_with("/memfd:doorbell (deleted)"));
        memfd && std::fs::metadata(link.path()).is_ok_and(|file| file.ino() == inode)
    })?;
    Some(
        std::fs::File::options()
            .read(true)
            .write(true)
            .open(link.path())
            .unwrap(),
    )
}

fn descriptor() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

#[test]
fn a_dma_buf_is_posted_by_its_own_addresses() {
    const IOVA: u64 = 0x7000_0000_1234;
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(256).unwrap();
    let mut qp = pd.queue_pair(&cq).rc().unwrap().connect(&PEER).unwrap();
    assert!(pd.supports_dmabuf());
    let buffer = pd.register_dmabuf(descriptor(), 0x5234, 4096, IOVA, PeerRead).unwrap();
    let remote: Remote<ReadAccess> = buffer.remote();
    assert_eq!((remote.addr(), remote.len()), (IOVA, 4096));
    assert_eq!(stub.region(buffer.region().lkey).unwrap().0, 0x5234);
    let (first, second) = buffer.split_at(96);
    drop(first);
    qp.send(second).unwrap();
    let posted = &stub.pending_sends(qp.qpn().get())[0];
    assert_eq!((posted.sges[0].0, posted.sges[0].1), (IOVA + 96, 4000));
}

#[test]
fn a_dma_buf_that_cannot_be_registered_is_explained() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let error = pd.register_dmabuf(descriptor(), 1, 4096, 0x1000, Local).unwrap_err();
    assert!(error.to_string().contains("the same place in their page"), "{error}");
    for errno in [libc::EOPNOTSUPP, libc::EPROTONOSUPPORT] {
        stub.fail(Verb::RegDmaBuf, errno);
        assert!(!pd.supports_dmabuf());
        stub.fail(Verb::RegDmaBuf, errno);
        let error = pd.register_dmabuf(descriptor(), 0, 4096, 0, Local).unwrap_err();
        assert!(matches!(error, MemoryError::NoDmaBuf { .. }), "{error}");
    }
    stub.fail(Verb::RegDmaBuf, libc::EINVAL);
    let error = pd.register_dmabuf(descriptor(), 0, 4096, 0, Local).unwrap_err();
    assert!(error.to_string().contains("is the descriptor a dma-buf"), "{error}");
    assert_eq!(stub.live("mr"), 0);
}

#[test]
fn device_memory_is_copied_registered_and_outlives_its_regions() {
    let stub = Stub::new();
    stub.extend();
    let context = stub.open();
    assert_eq!(context.attr().device_memory_bytes, DEVICE_MEMORY);
    let memory = context.device_memory(256, 64).unwrap();
    memory.write(16, b"doorbell").unwrap();
    let mut read = [0; 10];
    memory.read(15, &mut read).unwrap();
    assert_eq!(&read, b"\0doorbell\0");
    assert!(matches!(
        memory.read(250, &mut [0; 7]),
        Err(MemoryError::BeyondDeviceMemory {
            offset: 250,
            len: 7,
            whole: 256
        })
    ));
    let pd = context.protection_domain().unwrap();
    let buffer: Buffer<Opaque<PeerReadWrite>> = pd.register_device_memory(&memory, 64, 128, PeerReadWrite).unwrap();
    assert_eq!((buffer.addr(), buffer.remote().addr(), buffer.len()), (0, 0, 128));
    let (at, _, access) = stub.region(buffer.region().lkey).unwrap();
    assert_eq!(
        (at, access & sys::IBV_ACCESS_ZERO_BASED),
        (64, sys::IBV_ACCESS_ZERO_BASED)
    );
    drop(memory);
    assert_eq!(stub.live("dm"), 1);
    drop(buffer);
    assert_eq!((stub.live("mr"), stub.live("dm")), (0, 0));

    let error = context.device_memory(DEVICE_MEMORY as usize + 1, 1).unwrap_err();
    assert!(error.to_string().contains("device_memory_bytes"), "{error}");
    let other = Stub::new();
    let foreign = other.open().protection_domain().unwrap();
    let memory = context.device_memory(16, 1).unwrap();
    let error = foreign.register_device_memory(&memory, 0, 16, Local).unwrap_err();
    assert!(matches!(error, MemoryError::ForeignDeviceMemory { .. }), "{error}");
    let error = foreign.context().device_memory(16, 1).unwrap_err();
    assert!(error.to_string().contains("use the host's"), "{error}");
}

#[test]
fn rights_change_with_the_keys_if_the_buffer_is_the_last() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let buffer = pd
        .registration()
        .relaxed_ordering()
        .register(vec![5; 64], Local)
        .unwrap();
    let before = buffer.region();
    let exposed = buffer.with_rights(PeerWrite).unwrap();
    let after = exposed.region();
    assert_ne!(before.lkey, after.lkey);
    assert_eq!(exposed.remote().rkey(), after.rkey);
    let access = sys::IBV_ACCESS_RELAXED_ORDERING | sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE;
    assert_eq!(stub.region(after.lkey), Some((before.addr, 64, access)));

    let (first, second) = exposed.split_at(32);
    let Err(ReregisterError::Shared(second)) = second.with_rights(Local) else {
        panic!("the first is still alive")
    };
    drop(first);
    stub.fail(Verb::ReregMr, sys::IBV_REREG_MR_ERR_INPUT);
    let Err(ReregisterError::Refused(second, error)) = second.with_rights(Local) else {
        panic!("refused")
    };
    assert!(error.to_string().starts_with("ibv_rereg_mr("), "{error}");
    assert_eq!(second.region(), after);
    stub.fail(Verb::ReregMr, libc::EOPNOTSUPP);
    let Err(ReregisterError::Refused(second, _)) = second.with_rights(Local) else {
        panic!("nothing has changed")
    };
    stub.fail(Verb::ReregMr, sys::IBV_REREG_MR_ERR_CMD);
    assert!(matches!(second.with_rights(Local), Err(ReregisterError::Lost(_))));
    assert_eq!(stub.live("mr"), 0);

    let mut local = pd.register(vec![1; 8], PeerWrite).unwrap().with_rights(Local).unwrap();
    local[0] = 2;
    assert!(matches!(local.into_memory(), Ok(memory) if memory[0] == 2));
}

#[test]
fn what_a_cache_registered_is_not_given_back_as_memory() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let cache = doorbell_verbs::RegistrationCache::new(&pd, Default::default());
    let owner = std::sync::Arc::new(vec![9_u8; 100]);
    let buffer = cache.shared(&owner, 10..20).unwrap();
    assert_eq!(*buffer, [9; 10]);
    assert!(matches!(buffer.into_memory(), Err(IntoMemoryError::Borrowed(_))));
}

#[test]
fn a_pool_is_drained_of_so_many_and_keeps_the_rest() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let mut pool: BufferPool = pd.register(vec![0; 8 * 5], Local).unwrap().chunks(8).collect();
    let drained: Vec<_> = pool.drain(2).collect();
    assert_eq!((drained.len(), pool.count()), (2, 3));
    // The last one in is the first out; a partly used iterator leaves the rest in the pool.
    let last = drained[0].addr();
    pool.extend(drained.into_iter().rev());
    assert_eq!(pool.drain(3).next().map(|buffer| buffer.addr()), Some(last));
    assert_eq!(pool.count(), 4);
    let mut drain = pool.drain(1);
    assert!(drain.next().is_some() && drain.next().is_none() && drain.next().is_none());
    drop(drain);
    assert_eq!(pool.drain(9).count(), 3);
    assert!(pool.is_empty() && pool.drain(1).next().is_none());
    // Leaked, it leaks the rest: no buffer is given out twice.
    pool.extend(pd.register(vec![0; 8], Local));
    core::mem::forget(pool.drain(1));
    assert!(pool.is_empty());
    assert_eq!(stub.live("mr"), 1);
}

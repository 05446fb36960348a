//! A queue pair on a device, with memory to send from and to receive into, through the crate's API.

#[path = "../common/address.rs"]
mod address;

use std::fs::File;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use address::own_address;
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{Modify, Path, RemoteAccess, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Completion, Operation, Payload, ReceiveRequest, SendRequest};
use doorbell_roce_proto::{Psn, Qpn, RKey};
use doorbell_softroce::clock::TimestampClocks;
use doorbell_softroce::{
    CopyMode, Cq, CqConfig, Device, DeviceConfig, EventOwner, EventQueue, HostRange, LinkChoice, ModifyQpError, Mr, Pd,
    Qp, QpConfig, Reregister, Rights,
};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::unistd::ftruncate;

/// Longer than any test takes, even on a busy machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) const DEPTH: u32 = 64;

/// What memory of a test is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backing {
    Private,
    /// As doorbell-verbs allocates it: peers may map it.
    Shared,
    /// A memfd that the application made for itself.
    Application,
}

impl From<CopyMode> for Backing {
    fn from(copy_mode: CopyMode) -> Self {
        match copy_mode {
            CopyMode::Shared => Self::Shared,
            CopyMode::Ring => Self::Private,
        }
    }
}

/// Memory that is mapped until it is dropped.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    len: NonZeroUsize,
    backing: Backing,
    /// Keeps it mappable by others.
    file: Option<File>,
}

// SAFETY: a mapping is of the whole process; it is accessed by raw copies only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(len: usize, backing: Backing) -> Self {
        let len = NonZeroUsize::new(len).unwrap();
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let file = (backing != Backing::Private).then(|| {
            let file = memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
            ftruncate(&file, len.get() as i64).unwrap();
            if backing == Backing::Shared {
                fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
            }
            File::from(file)
        });
        // SAFETY: new mappings, at addresses of the kernel's choosing, disturb no other memory.
        let start = unsafe {
            match &file {
                Some(file) => mmap(None, len, rights, MapFlags::MAP_SHARED, file, 0),
                None => mmap_anonymous(None, len, rights, MapFlags::MAP_PRIVATE),
            }
        };
        Self {
            start: start.unwrap().cast(),
            len,
            backing,
            file,
        }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    pub(crate) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Replaces whole pages by others that permit no access, so that no other mapping gets there.
    pub(crate) fn unmap(&self, at: usize, len: usize) {
        assert!(at + len <= self.len.get());
        let (len, fixed) = (
            NonZeroUsize::new(len).unwrap(),
            MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED,
        );
        // SAFETY: `at` is inside the mapping.
        let start = unsafe { self.start.as_ptr().add(at) };
        let start = NonZeroUsize::new(start.expose_provenance());
        // SAFETY: pages of the mapping, to which there is no reference.
        unsafe { mmap_anonymous(start, len, ProtFlags::PROT_NONE, fixed) }.unwrap();
    }

    pub(crate) fn fill(&self, at: usize, len: usize, byte: u8) {
        assert!(at + len <= self.len.get());
        // SAFETY: inside the mapping, without references to it; devices may access it concurrently.
        unsafe { self.start.as_ptr().add(at).write_bytes(byte, len) };
    }

    pub(crate) fn word(&self, at: usize) -> u64 {
        assert!(at + 8 <= self.len.get());
        // SAFETY: as in `fill`.
        unsafe { self.start.as_ptr().add(at).cast::<u64>().read_unaligned() }
    }

    pub(crate) fn is_all(&self, at: usize, len: usize, byte: u8) -> bool {
        assert!(at + len <= self.len.get());
        let mut copy = vec![0; len];
        // SAFETY: inside the mapping; the copy has no other user.
        unsafe {
            copy.as_mut_ptr()
                .copy_from_nonoverlapping(self.start.as_ptr().add(at), len)
        };
        copy.iter().all(|found| *found == byte)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, made in `new`; its owner has dropped its region before.
        unsafe { munmap(self.start.cast(), self.len.get()) }.unwrap();
    }
}

/// A device at a shared address that uses shm links alone, and a copy mode if one is given.
/// With all copy modes its progress thread sleeps at once: others access its private memory then.
pub(crate) fn device(address: IpAddr, copy_mode: impl Into<Option<CopyMode>>) -> Arc<Device> {
    device_on(address, LinkChoice::Local, copy_mode.into())
}

pub(crate) fn device_on(address: IpAddr, link: LinkChoice, copy_mode: Option<CopyMode>) -> Arc<Device> {
    let mut config = DeviceConfig::new("soft0");
    if copy_mode.is_none() {
        config.spin = Duration::ZERO;
    }
    let config = DeviceConfig {
        address: Some(address),
        link,
        copy_mode,
        ..config
    };
    Device::open(&config).unwrap()
}

/// A queue pair, and a region; dropped in this order.
pub(crate) struct Side {
    pub(crate) qp: Option<Qp>,
    pub(crate) mr: Option<Mr>,
    pub(crate) cq: Cq,
    pd: Pd,
    device: Arc<Device>,
    pub(crate) memory: Memory,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) qpn: u32,
    pub(crate) rkey: u32,
    pub(crate) addr: u64,
}

impl Side {
    pub(crate) fn new(device: &Arc<Device>, len: usize, copy_mode: CopyMode) -> Self {
        Self::with(device, len, copy_mode.into())
    }

    pub(crate) fn with(device: &Arc<Device>, len: usize, backing: Backing) -> Self {
        let pd = device.protection_domain().unwrap();
        let owner = EventOwner {
            queue: Arc::new(EventQueue::new().unwrap()),
            token: 0,
        };
        let config = CqConfig {
            entries: 4 * DEPTH,
            notify: None,
            timestamps: TimestampClocks::default(),
        };
        let cq = device.completion_queue(config, owner.clone()).unwrap();
        let config = QpConfig {
            transport: Transport::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_send_sge: 4,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: true,
            srq: None,
        };
        let qp = pd.queue_pair(&config, owner).unwrap();
        let mut side = Self {
            qp: Some(qp),
            mr: None,
            cq,
            pd,
            device: Arc::clone(device),
            memory: Memory::new(len, backing),
        };
        side.register();
        side
    }

    pub(crate) fn register(&mut self) {
        let rights = Rights {
            local_write: true,
            remote_write: true,
            remote_read: true,
            remote_atomic: true,
            ..Rights::default()
        };
        let range = HostRange {
            addr: self.memory.start.as_ptr(),
            len: self.memory.len.get(),
            iova: self.memory.addr(),
        };
        let shared = self.memory.file().filter(|_| self.memory.backing == Backing::Shared);
        // SAFETY: a side's memory is dropped after the region, and accessed by raw copies only; the
        // file is mapped there.
        let registered = unsafe {
            match shared {
                Some(file) => self.pd.register_memfd(file.as_fd(), range, rights),
                None => self.pd.register(range, rights),
            }
        };
        self.mr = Some(registered.unwrap());
    }

    /// Keeps the keys.
    pub(crate) fn reregister_without_rights(&mut self) {
        let change = Reregister {
            rights: Some(Rights {
                local_write: true,
                ..Rights::default()
            }),
            ..Reregister::default()
        };
        // SAFETY: the memory is the same.
        unsafe { self.mr.as_mut().unwrap().reregister(&change) }.unwrap();
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn qp(&self) -> &Qp {
        self.qp.as_ref().unwrap()
    }

    pub(crate) fn key(&self) -> Key {
        Key {
            qpn: self.qp().number().get(),
            rkey: self.mr.as_ref().unwrap().rkey().0,
            addr: self.memory.addr(),
        }
    }

    /// To RTS, with a local ACK timeout of 4.096 µs · 2^`timeout` and 3 retries.
    pub(crate) fn connect(&self, peer: Key, timeout: u8) {
        self.try_connect(peer, timeout).unwrap();
    }

    /// The same, where it may be refused.
    pub(crate) fn try_connect(&self, peer: Key, timeout: u8) -> Result<(), ModifyQpError> {
        let address = self.device.info().gid.to_ip();
        let none = Modify::default();
        for modify in [
            Modify {
                state: Some(State::Init),
                pkey_index: Some(0),
                port: Some(1),
                access: Some(RemoteAccess {
                    write: true,
                    read: true,
                    atomic: true,
                    ..RemoteAccess::default()
                }),
                ..none
            },
            Modify {
                state: Some(State::Rtr),
                path: Some(Path::new(address, address)),
                path_mtu: Some(self.device.info().mtu),
                dest_qpn: Some(Qpn::new(peer.qpn)),
                rq_psn: Some(Psn::new(0)),
                max_dest_rd_atomic: Some(4),
                min_rnr_timer: Some(1),
                ..none
            },
            Modify {
                state: Some(State::Rts),
                timeout: Some(timeout),
                retry_cnt: Some(3),
                rnr_retry: Some(7),
                sq_psn: Some(Psn::new(0)),
                max_rd_atomic: Some(4),
                ..none
            },
        ] {
            self.qp().modify(&modify)?;
        }
        Ok(())
    }

    /// To the error state, which flushes what is outstanding.
    pub(crate) fn fail(&self) {
        let error = Modify {
            state: Some(State::Err),
            ..Modify::default()
        };
        self.qp().modify(&error).unwrap();
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.memory.addr() + at as u64,
            len: len as u32,
            lkey: self.mr.as_ref().unwrap().lkey(),
        }
    }

    pub(crate) fn post(&self, wr_id: u64, operation: Operation, at: usize, len: usize) {
        self.post_list(wr_id, operation, &[(at, len)]);
    }

    pub(crate) fn post_list(&self, wr_id: u64, operation: Operation, parts: &[(usize, usize)]) {
        let sges: Vec<_> = parts.iter().map(|(at, len)| self.sge(*at, *len)).collect();
        let request = SendRequest {
            wr_id,
            operation,
            payload: Payload::Gather(&sges),
            signaled: true,
            fence: false,
            solicited: false,
        };
        self.qp().post_send(|posting| posting.send(&request)).unwrap();
    }

    pub(crate) fn send(&self, wr_id: u64, at: usize, len: usize) {
        self.post(wr_id, Operation::Send { imm: None }, at, len);
    }

    /// To the same offset of the peer's region.
    pub(crate) fn write(&self, wr_id: u64, at: usize, len: usize, peer: Key) {
        let operation = Operation::Write {
            addr: peer.addr + at as u64,
            rkey: RKey(peer.rkey),
            imm: None,
        };
        self.post(wr_id, operation, at, len);
    }

    /// From the same offset of the peer's region.
    pub(crate) fn read(&self, wr_id: u64, at: usize, len: usize, peer: Key) {
        let operation = Operation::Read {
            addr: peer.addr + at as u64,
            rkey: RKey(peer.rkey),
        };
        self.post(wr_id, operation, at, len);
    }

    pub(crate) fn receive(&self, wr_id: u64, at: usize, len: usize) {
        let sges = [self.sge(at, len)];
        let request = ReceiveRequest { wr_id, sges: &sges };
        self.qp().post_receive(|posting| posting.receive(&request)).unwrap();
    }

    pub(crate) fn poll(&self) -> Vec<Completion> {
        let mut found = Vec::new();
        self.cq.poll(16, |completion| found.push(completion)).unwrap();
        found
    }

    pub(crate) fn wait(&self, count: usize) -> Vec<Completion> {
        let (since, mut found) = (Instant::now(), Vec::new());
        while found.len() < count {
            found.extend(self.poll());
            assert!(
                since.elapsed() < TEST_TIMEOUT,
                "{} of {count} completions came",
                found.len()
            );
        }
        found
    }
}

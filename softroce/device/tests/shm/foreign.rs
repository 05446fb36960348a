//! Memory that the application allocated: what registering it does to it, and what it costs.

use std::fs;
use std::os::unix::fs::MetadataExt;

use doorbell_roce_proto::work::Status;
use nix::fcntl::{FcntlArg, fcntl};

use super::side::{Backing, Memory, Side, device, own_address};

const LEN: usize = 1 << 20;

/// How many descriptors and mappings of a file this process has.
fn uses(inode: u64) -> [usize; 2] {
    let descriptors = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::metadata(entry.unwrap().path()).ok())
        .filter(|found| found.ino() == inode)
        .count();
    let number = inode.to_string();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = |line: &&str| line.contains("/memfd:") && line.split_whitespace().nth(4) == Some(&number);
    [descriptors, maps.lines().filter(mapped).count()]
}

/// Both devices are in this process, as is what a peer would have got.
#[test]
fn a_memfd_of_the_application_is_neither_sealed_nor_shared() {
    let address = own_address();
    let [a, b] = [0, 1].map(|_| Side::with(&device(address, None), LEN, Backing::Application));
    a.connect(b.key(), 17);
    b.connect(a.key(), 17);
    for round in 0..50 {
        b.receive(1, 0, LEN);
        a.send(1, 0, LEN);
        a.write(2, 0, LEN, b.key());
        assert!(a.wait(2).iter().all(|done| done.status == Status::Success), "{round}");
        assert_eq!(b.wait(1)[0].status, Status::Success);
    }
    for side in [&a, &b] {
        let file = side.memory.file().unwrap();
        assert_eq!(fcntl(file, FcntlArg::F_GET_SEALS), Ok(0));
        assert_eq!(uses(file.metadata().unwrap().ino()), [1, 1], "the application's own");
        file.set_len(2 * LEN as u64).unwrap();
        file.set_len(LEN as u64).unwrap();
    }
}

/// What this thread has read from files, /proc included, by read(2).
fn bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
    line.parse().unwrap()
}

#[test]
fn registering_reads_no_list_of_mappings() {
    let device = device(own_address(), None);
    for backing in [Backing::Private, Backing::Application, Backing::Shared] {
        let mut side = Side::with(&device, LEN, backing);
        // Every other page of one mapping has other rights: 4001 mappings, of 70 bytes a line.
        let many = Memory::new(8000 * 4096, Backing::Private);
        (0..8000).step_by(2).for_each(|page| many.unmap(page * 4096, 4096));
        let itself = bytes_read();
        let before = bytes_read();
        side.register();
        let read = bytes_read() - before - (before - itself);
        assert!(read < 4096, "{backing:?}: {read} bytes");
    }
}

//! System calls that fail by a seccomp filter of the thread: io_uring, as in containers; registered
//! buffers, as beyond RLIMIT_MEMLOCK; writes, as beyond a quota.

use std::thread;

use doorbell_gpudirect::storage::{Action, File, StorageError, StorageOptions, StoragePath};

use super::{file_with, folder, options, pattern};

/// In this thread `call` fails with `errno` from now on; with an argument and a value only where
/// the lower half of that argument is at least the value.
#[expect(unsafe_code, reason = "seccomp(2)")]
fn forbid(call: libc::c_long, errno: i32, from: Option<(u32, u32)>) {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let jump = |code: u32, k: u32, jf: u8| libc::sock_filter {
        code: (libc::BPF_JMP | code | libc::BPF_K) as u16,
        jt: 0,
        jf,
        k,
    };
    let load = |offset: u32| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    let (argument, value) = from.unwrap_or((0, 0));
    let mut filter = [
        // The number of the call, first in seccomp_data, whose arguments begin at 16.
        load(0),
        jump(libc::BPF_JEQ, call as u32, 3),
        load(16 + 8 * argument),
        jump(libc::BPF_JGE, value, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program is a local array of valid instructions, which the kernel copies.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }
}

#[test]
fn calls_take_the_place_of_io_uring_and_the_reason_is_kept() {
    let folder = folder();
    let bytes = pattern(300_001);
    let file = file_with(folder.path(), &bytes);
    let outcome = thread::spawn(move || {
        forbid(libc::SYS_io_uring_setup, libc::EPERM, None);
        let mut storage = options().host().expect("opened without io_uring");
        assert_eq!(storage.path(), StoragePath::Pread);
        let [refused] = storage.refused() else {
            panic!("{:?}", storage.refused());
        };
        assert_eq!(refused.path, StoragePath::IoUring);
        assert!(refused.why.starts_with("forbidden by "), "{refused}");
        let mut memory = vec![0; bytes.len()];
        storage.read_exact_at(&file, 0, &mut memory).expect("read");
        assert!(memory == bytes);
        let forced = StorageOptions::new().path(StoragePath::IoUring).host();
        assert!(matches!(
            forced,
            Err(StorageError::Refused {
                path: StoragePath::IoUring,
                ..
            })
        ));
    });
    outcome.join().expect("the thread ends");
}

#[test]
fn without_registered_buffers_io_uring_is_used_and_the_reason_is_kept() {
    let folder = folder();
    let bytes = pattern(300_001);
    let file = file_with(folder.path(), &bytes);
    let outcome = thread::spawn(move || {
        forbid(libc::SYS_io_uring_register, libc::ENOMEM, None);
        let mut storage = match options().path(StoragePath::IoUring).host() {
            Ok(storage) => storage,
            Err(refused) => return eprintln!("left out: {refused}"),
        };
        let why = storage.unregistered().expect("a reason").to_owned();
        assert!(
            why.starts_with("196608 bytes are beyond the limit of locked memory ("),
            "{why}"
        );
        assert!(
            why.ends_with("; ulimit -l): Cannot allocate memory (os error 12)"),
            "{why}"
        );
        // Both ends of it go through blocks.
        let mut memory = vec![0; bytes.len() - 2];
        storage.read_exact_at(&file, 1, &mut memory).expect("read");
        assert!(memory == bytes[1..bytes.len() - 1]);
        storage.write_at(&file, 1, &memory[..70_000]).expect("written");
    });
    outcome.join().expect("the thread ends");
}

#[test]
fn a_quota_that_is_used_up_is_an_error_at_its_offset() {
    const QUOTA: u32 = 256 << 10;
    let folder = folder();
    let path = folder.path().join("data");
    let outcome = thread::spawn(move || {
        // The offset is the fourth argument.
        forbid(libc::SYS_pwrite64, libc::EDQUOT, Some((3, QUOTA)));
        let file = File::create_new(&path).expect("created");
        let mut storage = options().path(StoragePath::Pread).host().expect("opened");
        storage
            .write_at(&file, 0, &pattern(QUOTA as usize))
            .expect("within the quota");
        let error = storage
            .write_at(&file, 70_000, &pattern(500_000))
            .expect_err("beyond it");
        let StorageError::Io {
            action,
            offset,
            len,
            error: errno,
            ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((*action, errno.raw_os_error()), (Action::Write, Some(libc::EDQUOT)));
        // The first block that begins beyond it.
        let beyond = u64::from(QUOTA)..u64::from(QUOTA) + (64 << 10);
        assert!(beyond.contains(offset) && offset + *len as u64 <= 570_000, "{error}");
        let text = error.to_string();
        let what = format!("data: cannot write {len} bytes at offset {offset}: ");
        assert!(text.contains(&what), "{text}");
        assert!(
            text.ends_with("; the file is incomplete: the user's or project's quota is used up"),
            "{text}"
        );
    });
    outcome.join().expect("the thread ends");
}

//! io_uring forbidden by a seccomp filter of the thread, as in containers.

use std::thread;

use doorbell_gpudirect::storage::{StorageError, StorageOptions, StoragePath};

use super::{file_with, folder, options, pattern};

/// io_uring_setup(2) fails with `EPERM` in this thread from now on, and nothing else.
#[expect(unsafe_code, reason = "seccomp(2)")]
fn forbid_io_uring() {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut filter = [
        // The number of the call, first in seccomp_data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: libc::SYS_io_uring_setup as u32,
        },
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
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
        forbid_io_uring();
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

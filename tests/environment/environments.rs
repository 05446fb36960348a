//! The environments: how a process is put into each, by a shell script whose arguments are the
//! command.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, process, thread};

use anyhow::{Context, Result, ensure};

/// Where both ends of an operation run, or the client alone.
pub(crate) struct Environment {
    pub(crate) name: &'static str,
    /// `None` where the server stays outside.
    pub(crate) server: Option<&'static str>,
    /// `$SERVER` is the server's process id.
    pub(crate) client: &'static str,
    pub(crate) needs: Needs,
}

/// What is set up beside the scripts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// A filter on the thread that starts the processes.
    Seccomp,
    /// `$CGROUP` is the folder of a memory cgroup.
    Cgroup,
}

const fn client(name: &'static str, client: &'static str) -> Environment {
    Environment {
        name,
        server: None,
        client,
        needs: Needs::Nothing,
    }
}

const fn both(name: &'static str, script: &'static str) -> Environment {
    Environment {
        server: Some(script),
        ..client(name, script)
    }
}

pub(crate) const PLAIN: &str = r#"exec "$@""#;

pub(crate) const ALL: [Environment; 11] = [
    client("same user", PLAIN),
    client(
        "other user",
        r#"exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@""#,
    ),
    client("unmapped user namespace", r#"exec unshare --user "$@""#),
    client(
        "own PID namespace",
        r#"exec unshare --pid --fork --kill-child --mount-proc "$@""#,
    ),
    Environment {
        server: Some(r#"exec unshare --net sh -c 'ip link set lo up && exec "$@"' sh "$@""#),
        ..client(
            "own network namespace",
            r#"exec nsenter --net --target "${SERVER:-$$}" "$@""#,
        )
    },
    Environment {
        needs: Needs::Seccomp,
        ..both("seccomp without process_vm_*", PLAIN)
    },
    both(
        "no /dev/shm",
        r#"exec unshare --mount sh -c 'mount -t tmpfs -o ro none /dev/shm && exec "$@"' sh "$@""#,
    ),
    both(
        "read-only /tmp",
        r#"exec unshare --mount sh -c 'mount --rbind /tmp /tmp && mount -o remount,bind,ro /tmp && exec "$@"' sh "$@""#,
    ),
    both("RLIMIT_NOFILE 64", r#"ulimit -n 64 && exec "$@""#),
    both("RLIMIT_AS 1 GiB", r#"ulimit -v 1048576 && exec "$@""#),
    Environment {
        needs: Needs::Cgroup,
        ..both(
            "memory cgroup of 128 MiB",
            r#"echo $$ > "$CGROUP/cgroup.procs" && exec "$@""#,
        )
    },
];

/// Refuses process_vm_readv(2) and process_vm_writev(2) to this thread and its children.
pub(crate) fn refuse_process_vm() -> Result<()> {
    let statement = |code: u32, jump_true, k| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: 0,
        k,
    };
    let is = |call: libc::c_long, jump| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jump, call as u32);
    let mut filter = [
        // The system call's number is the first field of seccomp_data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        is(libc::SYS_process_vm_readv, 2),
        is(libc::SYS_process_vm_writev, 1),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        statement(
            libc::BPF_RET | libc::BPF_K,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: prctl(2) reads the program and the filter, which are live, with their true length; it
    // restricts system calls alone.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    ensure!(result == 0, "no seccomp filter: {}", io::Error::last_os_error());
    Ok(())
}

/// A cgroup with limited memory, removed when dropped: after its processes.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    pub(crate) fn new() -> Result<Self> {
        // Version 1, and 2.
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        let limited = places.iter().find_map(|(parent, file)| {
            let group = Self(Path::new(parent).join(format!("doorbell-test-{}", process::id())));
            fs::create_dir(group.folder()).ok()?;
            fs::write(group.folder().join(file), (128 << 20).to_string()).ok()?;
            Some(group)
        });
        limited.context("no memory cgroup can be created")
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that were killed are members until they have ended.
        for _ in 0..100 {
            match fs::remove_dir(self.folder()) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(Duration::from_millis(10)),
                _ => return,
            }
        }
    }
}

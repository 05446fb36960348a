//! `/sys/class/infiniband` for programs under `doorbell run`: an `LD_PRELOAD` library in front of
//! libc's functions that take a path.
//!
//! Programs read sysfs in addition to libibverbs: a port's state, the type of a GID, its network
//! interface; and some check that `/dev/infiniband/uverbs0` exists. The kernel does not know a soft
//! device, and mounting needs privileges that plain containers lack. So `doorbell run` creates a
//! folder with the files that the kernel would have, and these functions redirect
//! `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and `/dev/infiniband` to it;
//! `DOORBELL_VIEW` names the folder, which stands for `/`. All other paths are passed to libc
//! unchanged. `path` classifies paths, `calls` has the functions.
//!
//! It is loaded into every process of a job, most of which do not use RDMA: so it starts no thread,
//! keeps no state, allocates and prints nothing, and other calls cost a check of five bytes. Not
//! covered: static programs, programs with their own system calls (Go), and names relative to a
//! descriptor of `/sys/class` itself.

#[cfg(not(test))]
mod calls;
#[cfg(not(test))]
mod next;
mod path;

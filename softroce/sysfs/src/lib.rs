//! `/sys/class/infiniband` for programs under `doorbell run`: an `LD_PRELOAD` library in front of
//! libc's functions that take a path.
//!
//! Programs read sysfs in addition to libibverbs, where the kernel has nothing of a soft device,
//! and mounting needs privileges. So `doorbell run` creates a folder with the kernel's files, and
//! these functions redirect `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and
//! `/dev/infiniband` to it; `DOORBELL_VIEW` names the folder, which stands for `/`.
//!
//! It is loaded into every process of a job: so it starts no thread, keeps no state, allocates and
//! prints nothing, and other paths cost a check of five bytes. Not covered: static programs,
//! programs with their own system calls (Go), names relative to a descriptor of `/sys/class`.

#[cfg(not(test))]
mod calls;
#[cfg(not(test))]
mod next;
mod path;

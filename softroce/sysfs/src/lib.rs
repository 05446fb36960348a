//! `/sys/class/infiniband` as programs under `doorbell run` see it: a library for `LD_PRELOAD`, in front of libc's functions that take a path.
//!
//! Programs read sysfs beside libibverbs: for a port's state, the kind of a GID, the interface behind it; and some look whether `/dev/infiniband/uverbs0` is there. The kernel knows nothing of
//! a soft device, and to mount something there takes privileges that plain containers do not give. So `doorbell run` makes a folder with the files that the kernel would have,
//! and these functions look there for what lies in `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and `/dev/infiniband`; `DOORBELL_VIEW` names the folder, which stands for `/`. All
//! else goes to libc as it came. `path` tells the two apart, `calls` are the functions.
//!
//! It is loaded into every process of a job, most of which have nothing to do with RDMA: so it starts nothing, keeps nothing, allocates nothing and prints nothing, and costs a
//! call elsewhere the look at five bytes. Static programs, those that make system calls themselves (Go's), and names relative to a descriptor of `/sys/class` itself are
//! beyond it.

#[cfg(not(test))]
mod calls;
#[cfg(not(test))]
mod next;
mod path;

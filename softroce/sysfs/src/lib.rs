//! `/sys/class/infiniband` as programs under `doorbell run` see it: a library for `LD_PRELOAD`, in front of libc's functions that take a path.
//!
//! Programs read sysfs beside libibverbs: for a port's state, the kind of a GID, the interface behind it. The kernel knows nothing of a soft device, and to mount something over
//! sysfs takes privileges that plain containers do not give. So `doorbell run` makes a folder with the files that the kernel would have, and these functions
//! look there for what lies in `/sys/class/infiniband` and `/sys/class/infiniband_verbs`; `DOORBELL_SYSFS` names the folder that stands for `/sys`. All else goes
//! to libc as it came. `path` tells the two apart, `calls` are the functions.
//!
//! It is loaded into every process of a job, most of which have nothing to do with RDMA: so it starts nothing, keeps nothing, allocates nothing and prints nothing, and costs a
//! call outside sysfs the look at five bytes. Static programs, those that make system calls themselves (Go's), and names relative to a descriptor of `/sys/class` itself are
//! beyond it.

#[cfg(not(test))]
mod calls;
#[cfg(not(test))]
mod next;
mod path;

//! What the chores need, detected as files, and installed with apt when running as root.

use crate::apt;
use anyhow::{Result, bail};
use std::{env, path::Path, process::Command};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Need {
    pub(crate) package: &'static str,
    pub(crate) found: fn() -> bool,
}

pub(crate) const QEMU: Need = Need {
    package: "qemu-system-x86",
    found: || in_path("qemu-system-x86_64"),
};

/// The folder of Debian's libclang 14. `rdma-sys` 0.3.0 builds with 15 at most.
pub(crate) const LIBCLANG: &str = "/usr/lib/llvm-14/lib";

/// Needed to check the ABI against the C headers, and by crates that run bindgen on them.
pub(crate) const ABI: [Need; 4] = [
    Need {
        package: "pkg-config",
        found: || in_path("pkg-config"),
    },
    Need {
        package: "libibverbs-dev",
        found: || Path::new("/usr/include/infiniband/verbs.h").exists(),
    },
    Need {
        package: "librdmacm-dev",
        found: || Path::new("/usr/include/rdma/rdma_cma.h").exists(),
    },
    Need {
        package: "libclang-14-dev",
        found: || Path::new(LIBCLANG).join("libclang.so").exists(),
    },
];

pub(crate) const STOCK: [Need; 3] = [
    Need {
        package: "ibverbs-utils",
        found: || in_path("ibv_rc_pingpong"),
    },
    Need {
        package: "rdmacm-utils",
        found: || in_path("rping"),
    },
    Need {
        package: "perftest",
        found: || in_path("ib_write_bw"),
    },
];

/// Stock programs, and a C linker for the sanitizer's runtime.
pub(crate) const STOCK_SANITIZED: [Need; 5] = [
    STOCK[0],
    STOCK[1],
    STOCK[2],
    SYMBOLIZER,
    Need {
        package: "gcc",
        found: || in_path("cc") && in_path("ar"),
    },
];

const UCX: Need = Need {
    package: "ucx-utils",
    found: || in_path("ucx_perftest"),
};

const FABRIC: Need = Need {
    package: "libfabric-bin",
    found: || in_path("fi_pingpong"),
};

pub(crate) const PEERS: [Need; 3] = [STOCK[2], UCX, FABRIC];

/// Clients of the short form.
pub(crate) const CLIENTS: [Need; 6] = [
    STOCK[1],
    UCX,
    FABRIC,
    Need {
        package: "python3-pyverbs",
        found: || Path::new("/usr/lib/python3/dist-packages/pyverbs").exists(),
    },
    Need {
        package: "qperf",
        found: || in_path("qperf"),
    },
    Need {
        package: "fio",
        found: || in_path("fio"),
    },
];

/// Clients that only the full form runs.
pub(crate) const LARGE_CLIENTS: [Need; 12] = [
    COLLECTIVE_PEERS[0],
    COLLECTIVE_PEERS[1],
    QEMU,
    Need {
        package: "binutils",
        found: || in_path("as") && in_path("ld"),
    },
    Need {
        package: "tgt",
        found: || in_path("tgtd"),
    },
    Need {
        package: "libiscsi-bin",
        found: || in_path("iscsi-perf"),
    },
    Need {
        package: "qemu-utils",
        found: || in_path("qemu-img"),
    },
    // QEMU's driver of iSCSI.
    Need {
        package: "qemu-block-extra",
        found: || Path::new("/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so").exists(),
    },
    KERNELS[1],
    // With TensorPipe. Its numpy is for the clients from PyPI, too.
    Need {
        package: "python3-torch",
        found: || Path::new("/usr/lib/python3/dist-packages/torch").exists(),
    },
    Need {
        package: "mpich",
        found: || in_path("mpirun.mpich"),
    },
    Need {
        package: "libmpich-dev",
        found: || in_path("mpicc.mpich"),
    },
];

/// Clients from PyPI, for the Python of Debian 12.
pub(crate) const CLIENT_WHEELS: [&str; 3] = [
    "mpi4py==4.1.2",
    "nixl-cu12==1.5.1",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
];
pub(crate) const CLIENT_WHEELS_PYTHON: &str = "--python-version=3.11";

/// What a test of doorbell-nccl runs of vLLM, whose wheel has 400 MB.
pub(crate) const VLLM: &str = "vllm==0.33.0";
pub(crate) const VLLM_FILES: [&str; 2] = [
    "vllm/distributed/device_communicators/pynccl.py",
    "vllm/distributed/device_communicators/pynccl_wrapper.py",
];

pub(crate) const COLLECTIVE_PEERS: [Need; 4] = [
    Need {
        package: "openmpi-bin",
        found: || in_path("mpirun"),
    },
    Need {
        package: "libopenmpi-dev",
        found: || in_path("mpicc"),
    },
    Need {
        package: "g++",
        found: || in_path("c++"),
    },
    Need {
        package: "libgloo-dev",
        found: || Path::new("/usr/include/gloo/context.h").exists(),
    },
];

/// The browser that opens the reports of `doorbell report`, under any of its names.
pub(crate) const BROWSER: Need = Need {
    package: "chromium",
    found: || {
        ["chromium", "chromium-browser", "google-chrome", "chrome"]
            .into_iter()
            .any(in_path)
    },
};

pub(crate) const CXX: Need = Need {
    package: "g++",
    found: || in_path("c++"),
};

/// Needed to build the GPU kernels: pip brings the compiler, which preprocesses with the host's.
pub(crate) const KERNELS: [Need; 2] = [
    CXX,
    Need {
        package: "python3-pip",
        found: || {
            Command::new("python3")
                .args(["-m", "pip", "--version"])
                .output()
                .is_ok_and(|output| output.status.success())
        },
    },
];

pub(crate) const VALGRIND: Need = Need {
    package: "valgrind",
    found: || in_path("valgrind"),
};

/// Resolves function names in sanitizer reports, which suppressions match on.
pub(crate) const SYMBOLIZER: Need = Need {
    package: "llvm",
    found: || in_path("llvm-symbolizer"),
};

pub(crate) const INSTRUCTIONS: [Need; 3] = [
    VALGRIND,
    Need {
        package: "gcc",
        found: || in_path("gcc"),
    },
    Need {
        package: "libibverbs-dev",
        found: || Path::new("/usr/include/infiniband/verbs.h").exists(),
    },
];

/// Needed by the crates that build rdma-core, or a part of it, with cmake.
pub(crate) const RDMA_CORE: [Need; 10] = [
    ABI[0],
    ABI[1],
    ABI[2],
    ABI[3],
    Need {
        package: "cmake",
        found: || in_path("cmake"),
    },
    // cmake's back end; and the C++ compiler that its scripts check for, though there is no C++.
    Need {
        package: "make",
        found: || in_path("make"),
    },
    Need {
        package: "g++",
        found: || in_path("c++"),
    },
    Need {
        package: "python3",
        found: || in_path("python3"),
    },
    Need {
        package: "libnl-3-dev",
        found: || Path::new("/usr/include/libnl3/netlink/netlink.h").exists(),
    },
    Need {
        package: "libnl-route-3-dev",
        found: || Path::new("/usr/include/libnl3/netlink/route/link.h").exists(),
    },
];

pub(crate) const DEBOOTSTRAP: Need = Need {
    package: "debootstrap",
    found: || Path::new("/usr/sbin/debootstrap").exists(),
};

/// Installs what is missing when running as root; returns what is still missing.
pub(crate) fn provide(needs: &[Need]) -> Result<Vec<&'static str>> {
    let missing = |needs: &[Need]| -> Vec<&'static str> {
        needs
            .iter()
            .filter(|need| !(need.found)())
            .map(|need| need.package)
            .collect()
    };
    let before = missing(needs);
    if before.is_empty() || !apt::is_root() || !apt::is_available() {
        return Ok(before);
    }
    eprintln!("setup: installing {}", before.join(" "));
    apt::install(&before)?;
    Ok(missing(needs))
}

pub(crate) fn require_qemu() -> Result<()> {
    match provide(&[QEMU])?.as_slice() {
        [] => Ok(()),
        missing => bail!("missing: {} (as root: apt-get install {0})", missing.join(" ")),
    }
}

pub(crate) fn in_path(program: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

//! The stock programs, their options and known limits: data only.

/// A table of the report: tools by options, each pair a cell.
pub(crate) struct Grid {
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) tools: &'static [&'static str],
    pub(crate) environment: Environment,
    pub(crate) lines: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Environment {
    /// Both under `doorbell run` on this host, on the link that the device chooses.
    Host,
    Udp,
    Ipv6,
    /// The same, on a loopback address of their own: the connection manager's is the device's.
    Managed,
    /// In the guest: one end on rxe, the other under `doorbell run` in the namespace `peer`.
    Wire {
        /// Whether the server is the end on rxe.
        rxe_serves: bool,
        ipv6: bool,
    },
}

const PINGPONGS: &[&str] = &[
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ibv_srq_pingpong",
];

const PERFTEST: &[&str] = &[
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_atomic_bw",
    "ib_atomic_lat",
];

/// The grids on one host, without any privilege.
pub(crate) const HOST: &[Grid] = &[
    Grid {
        title: "Pingpongs of ibverbs-utils",
        about: "Each line with both ends; `-c` makes the receiver check every byte.",
        tools: PINGPONGS,
        environment: Environment::Host,
        lines: &[
            "",
            "-c",
            "-e -c",
            "-n 100000",
            "-c -s 1",
            "-c -s 1000 -r 10",
            "-c -s 100000 -n 200",
            "-c -m 256",
            "-c -m 4096",
            "-c -t",
            "-c -N",
            "-c -j",
            "-c -t -N",
            "-o",
        ],
    },
    Grid {
        title: "perftest",
        about: "`-l 16` wants a number of iterations that is a multiple of 16. Peers of one row are given the same options; `-F` is added to all.",
        tools: PERFTEST,
        environment: Environment::Host,
        lines: &[
            "",
            "-a -n 50",
            "-b",
            "-q 8",
            "-l 16 -n 1600",
            "-e",
            "-c UC",
            "-c UD",
            "-c UD -a -n 500",
            "--use-srq",
            "--use-srq -q 4",
            "-D 2",
            "-b -q 8 -l 16 -n 1600",
            "-n 5000 -s 4000",
            "-n 50 -s 4194304",
            "-I 64 -s 64",
            "-m 256",
            "-m 1024",
            "-m 4096",
            "-t 1 -n 500",
            "-Q 1",
            "-r 16 -n 2000",
            "-o 1",
            "-A CMP_AND_SWAP",
            "--mr_per_qp -q 2",
            "--perform_warm_up",
            "--report_gbits",
            "-H",
            "-c UC -e -b",
        ],
    },
    Grid {
        title: "perftest by the connection manager",
        about: "`-R` connects the queue pairs, `-z` only exchanges their addresses.",
        tools: PERFTEST,
        environment: Environment::Managed,
        lines: &["-R", "-R -q 4", "-R -c UD -n 500", "-R -e", "-z"],
    },
    Grid {
        title: "Over UDP on one host",
        about: "The same programs with `doorbell run --link udp`: the path that they also have between hosts.",
        tools: PINGPONGS,
        environment: Environment::Udp,
        lines: &["-c", "-e -c", "-c -n 20000"],
    },
    Grid {
        title: "perftest over UDP on one host",
        about: "UC and UD lose what a socket has no room for, and perftest's servers wait for ever for what was lost, as on any wire that loses: so there are few messages.",
        tools: PERFTEST,
        environment: Environment::Udp,
        lines: &[
            "",
            "-a -n 10",
            "-b",
            "-q 8",
            "-e",
            "-c UC -s 1024 -n 100",
            "-c UD -s 512 -n 100",
            "--use-srq",
        ],
    },
    Grid {
        title: "On an IPv6 address",
        about: "`doorbell run --address ::1`; the ends find each other at `::1` too.",
        tools: PINGPONGS,
        environment: Environment::Ipv6,
        lines: &["-c", "-c -s 1000 -e"],
    },
    Grid {
        title: "perftest on an IPv6 address",
        about: "",
        tools: PERFTEST,
        environment: Environment::Ipv6,
        lines: &["", "-c UD"],
    },
];

/// The grids across the wire, in the guest. Its processor is emulated: few iterations.
pub(crate) const WIRE: &[Grid] = &[
    wire(
        "ibverbs-utils, IPv4, the server on rxe",
        PINGPONGS,
        true,
        false,
        WIRE_PINGPONGS,
    ),
    wire(
        "ibverbs-utils, IPv4, the client on rxe",
        PINGPONGS,
        false,
        false,
        WIRE_PINGPONGS,
    ),
    wire(
        "ibverbs-utils, IPv6, the server on rxe",
        PINGPONGS,
        true,
        true,
        WIRE_PINGPONGS,
    ),
    wire(
        "ibverbs-utils, IPv6, the client on rxe",
        PINGPONGS,
        false,
        true,
        WIRE_PINGPONGS,
    ),
    wire(
        "perftest, IPv4, the server on rxe",
        PERFTEST,
        true,
        false,
        WIRE_PERFTEST,
    ),
    wire(
        "perftest, IPv4, the client on rxe",
        PERFTEST,
        false,
        false,
        WIRE_PERFTEST,
    ),
    wire("perftest, IPv6, the server on rxe", PERFTEST, true, true, &["-n 100"]),
    wire("perftest, IPv6, the client on rxe", PERFTEST, false, true, &["-n 100"]),
];

const WIRE_PINGPONGS: &[&str] = &["-c -n 100", "-c -e -n 50"];
const WIRE_PERFTEST: &[&str] = &[
    "-n 100",
    "-n 20 -q 2 -b",
    "-n 50 -s 2000 -c UC",
    "-n 50 -c UD",
    "-n 50 --use-srq",
    "-n 50 -e",
];

const fn wire(
    title: &'static str,
    tools: &'static [&'static str],
    rxe_serves: bool,
    ipv6: bool,
    lines: &'static [&'static str],
) -> Grid {
    Grid {
        title,
        about: "",
        tools,
        environment: Environment::Wire { rxe_serves, ipv6 },
        lines,
    }
}

pub(crate) struct Single {
    pub(crate) command: &'static str,
    pub(crate) shows: &'static [&'static str],
    pub(crate) status: i32,
    /// What that proves, for the report.
    pub(crate) about: &'static str,
}

/// Programs that only query; and wrong calls, which must report an error and exit.
pub(crate) const SINGLES: &[Single] = &[
    Single {
        command: "ibv_devices",
        shows: &["soft0"],
        status: 0,
        about: "lists soft0",
    },
    Single {
        command: "ibv_devinfo",
        shows: &["hca_id:\tsoft0", "PORT_ACTIVE", "link_layer:\t\tEthernet"],
        status: 0,
        about: "an active Ethernet port",
    },
    Single {
        command: "ibv_devinfo -v",
        shows: &["max_qp_wr:", "atomic_cap:", "ATOMIC_HCA", "GID[  0]:", "RoCE v2"],
        status: 0,
        about: "capabilities, and a GID of RoCE v2",
    },
    Single {
        command: "ibv_devinfo -l",
        shows: &["1 HCA found:", "soft0"],
        status: 0,
        about: "one device",
    },
    Single {
        command: "ibv_devinfo -d soft9",
        shows: &["IB device 'soft9' wasn't found"],
        status: 255,
        about: "no such device: says so",
    },
    Single {
        command: "ibv_rc_pingpong -d soft9",
        shows: &["IB device soft9 not found"],
        status: 1,
        about: "no such device: says so",
    },
    Single {
        command: "ibv_rc_pingpong -i 2",
        shows: &["Failed to modify QP to INIT"],
        status: 1,
        about: "no such port: says so",
    },
    Single {
        command: "ib_write_bw -d soft9",
        shows: &["IB device soft9 not found"],
        status: 1,
        about: "no such device: says so",
    },
];

/// A pair whose two ends are called differently and connect by the connection manager. `PORT` and
/// `HOST` stand for the server's.
pub(crate) struct Managed {
    pub(crate) server: &'static str,
    pub(crate) client: &'static str,
    /// A string that the client's output must contain, and in how many lines.
    pub(crate) shows: (&'static str, usize),
    /// What that proves, for the report.
    pub(crate) about: &'static str,
}

/// The programs of rdmacm-utils.
pub(crate) const MANAGED: &[Managed] = &[
    Managed {
        server: "rping -s -v -C 100 -a HOST -p PORT",
        client: "rping -c -v -C 100 -a HOST -p PORT",
        shows: ("ping data: ", 100),
        about: "100 messages",
    },
    Managed {
        server: "rping -s -V -v -C 50 -S 4000 -a HOST -p PORT",
        client: "rping -c -V -v -C 50 -S 4000 -a HOST -p PORT",
        shows: ("ping data: ", 50),
        about: "50 messages of 4000 bytes, every byte checked",
    },
    Managed {
        server: "rping -s -q -v -C 10 -a HOST -p PORT",
        client: "rping -c -q -v -C 10 -a HOST -p PORT",
        shows: ("ping data: ", 10),
        about: "queue pairs that the program makes and moves itself",
    },
    Managed {
        server: "ucmatose -p PORT -c 4 -C 100 -S 500",
        client: "ucmatose -p PORT -c 4 -C 100 -S 500 -s HOST",
        shows: ("return status 0", 1),
        about: "four connections",
    },
    Managed {
        server: "udaddy -c 3 -C 100 -S 500",
        client: "udaddy -c 3 -C 100 -S 500 -s HOST",
        shows: ("return status 0", 1),
        about: "three datagram services",
    },
    Managed {
        server: "rdma_server -p PORT",
        client: "rdma_client -p PORT -s HOST",
        shows: ("rdma_client: end 0", 1),
        about: "by the simple calls of rdma_verbs.h",
    },
];

/// Options with which a tool fails on any device, and why.
pub(crate) const FAULTS: &[(&str, &str, &str)] = &[(
    "ib_atomic_bw",
    "--perform_warm_up",
    "the tool waits for completions of requests that it does not signal, on rxe as well",
)];

/// Messages about a limit of an opened device, and whether the tool or our device sets it.
pub(crate) const LIMITS: &[(&str, Limit)] = &[
    ("Requested size larger than port MTU", Limit::OfTheTool),
    ("The device isn't ODP capable", Limit::OfTheDevice),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Limit {
    /// The tool's: any device would be refused.
    OfTheTool,
    OfTheDevice,
}

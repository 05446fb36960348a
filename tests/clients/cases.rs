//! The rows: which client, how it runs, and what its output must show.

mod crates;
mod many;
mod python;
mod rails;
mod storage;
mod virtual_machine;

use crate::read::{self, Report};
use anyhow::Result;

/// When a server is ready for its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ready {
    /// It listens on the row's TCP port.
    Listening,
    /// It is idle: the connection manager's listeners are not in any table.
    Idle,
    /// It has printed this.
    Shows(&'static str),
}

/// What `doorbell run` offers a row's processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Device {
    /// Nothing: they run without it.
    None,
    One,
    /// Two at loopback addresses, with these options for their faults.
    Rails(&'static [&'static str]),
}

/// Lines for sh(1), in which `PORT`, `HOST` and `FILES` stand for the row's first port of
/// [`PORTS`](crate::rig::PORTS), the device's address, and the folder of our own scripts, programs
/// and sources ([`FILES`](crate::rig::FILES)).
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) server: Option<(String, Ready)>,
    pub(crate) client: String,
    pub(crate) variables: Vec<(&'static str, &'static str)>,
    pub(crate) device: Device,
    /// Whether its Python imports from the packages of PyPI.
    pub(crate) from_wheels: bool,
    /// What the client shows once both ends are connected; without it, they are after a while.
    pub(crate) under_way: Option<&'static str>,
    /// How often both ends run; the outputs are read together.
    pub(crate) times: usize,
    /// Judges the output of server and client.
    pub(crate) read: fn(&str, &str) -> Result<Report>,
}

/// Where a client's version is known.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Package {
    Debian(&'static str),
    Wheel(&'static str),
    /// One of crates.io, of this version.
    Crate(&'static str),
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) client: &'static str,
    pub(crate) package: Package,
    pub(crate) mode: String,
    /// Whether only `--full` runs it.
    pub(crate) full: bool,
    pub(crate) run: Run,
    /// The same client without RDMA.
    pub(crate) beside: Option<Run>,
    /// A run that lasts, of which each end in turn is killed.
    pub(crate) lasting: Option<Run>,
}

fn pair(server: &str, ready: Ready, client: &str, read: fn(&str, &str) -> Result<Report>) -> Run {
    Run {
        server: Some((server.to_owned(), ready)),
        client: client.to_owned(),
        variables: Vec::new(),
        device: Device::One,
        from_wheels: false,
        under_way: None,
        times: 1,
        read,
    }
}

fn alone(client: &str, read: fn(&str, &str) -> Result<Report>) -> Run {
    Run {
        server: None,
        client: client.to_owned(),
        variables: Vec::new(),
        device: Device::One,
        from_wheels: false,
        under_way: None,
        times: 1,
        read,
    }
}

impl Run {
    fn with(mut self, variables: &[(&'static str, &'static str)]) -> Self {
        self.variables.extend(variables);
        self
    }

    fn times(mut self, times: usize) -> Self {
        self.times = times;
        self
    }

    fn importing_wheels(mut self) -> Self {
        self.from_wheels = true;
        self
    }

    fn under_way_once(mut self, shown: &'static str) -> Self {
        self.under_way = Some(shown);
        self
    }

    fn on_rails(mut self, faults: &'static [&'static str]) -> Self {
        self.device = Device::Rails(faults);
        self
    }

    fn without_device(mut self) -> Self {
        self.device = Device::None;
        self
    }
}

impl Case {
    fn new(client: &'static str, package: &'static str, mode: &str, run: Run) -> Self {
        Self {
            client,
            package: Package::Debian(package),
            mode: mode.to_owned(),
            full: false,
            run,
            beside: None,
            lasting: None,
        }
    }

    fn beside(mut self, run: Run) -> Self {
        self.beside = Some(run.without_device());
        self
    }

    fn lasting(mut self, run: Run) -> Self {
        self.lasting = Some(run);
        self
    }

    /// Its package is PyPI's.
    fn wheel(mut self) -> Self {
        if let Package::Debian(name) = self.package {
            self.package = Package::Wheel(name);
        }
        self
    }

    fn full(mut self) -> Self {
        self.full = true;
        self
    }
}

/// All rows, in the table's order.
pub(crate) fn all() -> Vec<Case> {
    let mut cases = vec![pyverbs()];
    cases.extend(fabric());
    cases.extend(managed());
    cases.extend(qperf());
    cases.push(fio());
    cases.extend(ucx());
    cases.extend(rails::all());
    cases.extend(mpi());
    cases.extend(storage::cases());
    cases.extend(virtual_machine::cases());
    cases.extend(crates::cases());
    cases.extend(many::cases());
    cases.extend(python::all());
    cases
}

fn pyverbs() -> Case {
    let tests = "cp -r /usr/share/doc/rdma-core/tests . && gunzip tests/*.gz && \
        { /usr/bin/python3 -B tests/run_tests.py --dev soft0 -v || test $? = 1; }";
    let run = alone(tests, read::pyverbs);
    Case::new("pyverbs", "python3-pyverbs", "rdma-core's tests", run)
}

fn fabric() -> Vec<Case> {
    let run = |provider: &str, endpoint: &str, options: &str| {
        let line = format!("fi_pingpong -c -p '{provider}' -e {endpoint} {options}");
        let (server, client) = (format!("{line} -B PORT"), format!("{line} -P PORT HOST"));
        pair(&server, Ready::Listening, &client, read::fabric)
    };
    let case = |mode, provider, endpoint| {
        Case::new("fi_pingpong", "libfabric-bin", mode, run(provider, endpoint, "-I 100"))
            .beside(run("tcp", endpoint.replace("dgram", "msg").as_str(), "-I 100"))
            .lasting(run(provider, endpoint, "-I 100000000 -S 64"))
    };
    vec![
        case("verbs, msg", "verbs", "msg"),
        case("verbs;ofi_rxm, rdm", "verbs;ofi_rxm", "rdm"),
    ]
}

fn managed() -> Vec<Case> {
    let run = |server: &str, client: &str, read| pair(server, Ready::Idle, client, read);
    let rping = |options: &str, read| {
        let server = format!("rping -s {options} -a HOST -p PORT");
        let client = format!("rping -c {options} -a HOST -p PORT");
        run(&server, &client, read)
    };
    vec![
        Case::new(
            "rping",
            "rdmacm-utils",
            "4000 bytes",
            rping("-V -v -C 100 -S 4000", read::rping),
        )
        .lasting(rping("-C 100000000", read::rping)),
        Case::new(
            "ucmatose",
            "rdmacm-utils",
            "four connections",
            run(
                "ucmatose -p PORT -c 4 -C 100 -S 500",
                "ucmatose -p PORT -c 4 -C 100 -S 500 -s HOST",
                read::ucmatose,
            ),
        ),
        Case::new(
            "udaddy",
            "rdmacm-utils",
            "three datagram services",
            run(
                "udaddy -c 3 -C 100 -S 500",
                "udaddy -c 3 -C 100 -S 500 -s HOST",
                read::udaddy,
            ),
        ),
    ]
}

/// The tests that use the connection manager, which RoCE needs: the others address by LID.
const QPERF: [&str; 12] = [
    "rc_lat",
    "rc_bw",
    "rc_bi_bw",
    "rc_rdma_read_lat",
    "rc_rdma_read_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
    "rc_rdma_write_bw",
    "rc_compare_swap_mr",
    "rc_fetch_add_mr",
    "ver_rc_compare_swap",
    "ver_rc_fetch_add",
];

fn qperf() -> Vec<Case> {
    let run = |options: &str, test: &str| {
        let client = format!("qperf -lp PORT {options} -vvs HOST {test} && qperf -lp PORT HOST quit");
        pair("qperf -lp PORT", Ready::Listening, &client, read::qperf)
    };
    let case = |(index, test): (usize, &&'static str)| {
        let mut case = Case::new("qperf", "qperf", test, run("-cm1 -t 1", test));
        if test.ends_with("_lat") {
            case = case.beside(run("-t 1", "tcp_lat"));
        } else if test.ends_with("_bw") {
            case = case.beside(run("-t 1", "tcp_bw"));
        }
        match index {
            0 => case,
            1 => case.full().lasting(run("-cm1 -t 3600", test)),
            _ => case.full(),
        }
    };
    QPERF.iter().enumerate().map(case).collect()
}

/// Its client sends without RNR retries, so the server must have posted all receives: as many as
/// there are blocks. Its engine for TCP does not verify. Its processes would leave their group.
fn fio() -> Case {
    let common = "--thread --ioengine=rdma --port=PORT --bs=64k --size=16m --verify=crc32c";
    let server = format!("fio --name=server {common} --iodepth=256 --rw=read");
    let client = format!("fio --name=client {common} --iodepth=8 --rw=write --verb=send --do_verify=0 --hostname=HOST");
    Case::new(
        "fio",
        "fio",
        "send, crc32c",
        pair(&server, Ready::Shows("waiting for connection"), &client, read::fio),
    )
}

/// Tests of each API of UCX; UCT's for UD are the first two. Of UCT there is no swap over verbs.
const UCT: [&str; 9] = [
    "am_lat",
    "am_bw",
    "put_lat",
    "put_bw",
    "get -D bcopy",
    "add_lat",
    "add_mr",
    "fadd",
    "cswap",
];
const UCT_OF_UD: usize = 2;
const UCP: [&str; 15] = [
    "tag_lat",
    "tag_bw",
    "tag_sync_lat",
    "tag_sync_bw",
    "ucp_put_lat",
    "ucp_put_bw",
    "ucp_get",
    "ucp_add",
    "ucp_fadd",
    "ucp_swap",
    "ucp_cswap",
    "stream_bw",
    "stream_lat",
    "ucp_am_lat",
    "ucp_am_bw",
];

fn ucx() -> Vec<Case> {
    let mut cases = Vec::new();
    for transport in ["rc", "ud"] {
        for test in UCP {
            cases.push(ucp(transport, test));
        }
        let count = if transport == "ud" { UCT_OF_UD } else { UCT.len() };
        for test in &UCT[..count] {
            cases.push(uct(transport, test));
        }
    }
    cases
}

fn ucx_options(test: &str, size: usize, iterations: usize) -> String {
    format!("-t {test} -s {size} -n {iterations} -w 100 -f")
}

/// Bandwidth is of 64 KiB messages, latency of 8 bytes.
fn ucp(transport: &'static str, test: &'static str) -> Case {
    let size = if test.ends_with("_bw") { 65536 } else { 8 };
    let run = |tls: &'static str, iterations: usize, read| {
        let client = format!("ucx_perftest -p PORT HOST {}", ucx_options(test, size, iterations));
        pair("ucx_perftest -p PORT", Ready::Listening, &client, read).with(&[("UCX_TLS", tls)])
    };
    let tls = if transport == "rc" { "rc_v,self" } else { "ud_v,self" };
    let read = if test.ends_with("_bw") {
        read::ucx_bandwidth
    } else {
        read::ucx_latency
    };
    let case = Case::new(
        "ucx_perftest",
        "ucx-utils",
        &format!("{test}, {transport}_verbs"),
        run(tls, 2000, read),
    )
    .beside(run("tcp,self", 2000, read));
    match test {
        "tag_lat" => case,
        "tag_bw" => case.lasting(run(tls, 1_000_000_000, read)),
        _ => case.full(),
    }
}

/// Of 8 bytes, as short messages are.
fn uct(transport: &'static str, test: &'static str) -> Case {
    let run = |device: &str, read| {
        let client = format!("ucx_perftest -p PORT HOST {} {device}", ucx_options(test, 8, 2000));
        pair("ucx_perftest -p PORT", Ready::Listening, &client, read)
    };
    let read = if test.ends_with("_bw") {
        read::ucx_bandwidth
    } else {
        read::ucx_latency
    };
    let device = format!("-x {transport}_verbs -d soft0:1");
    Case::new(
        "ucx_perftest",
        "ucx-utils",
        &format!("UCT {test}, {transport}_verbs"),
        run(&device, read),
    )
    .full()
}

/// Two ranks on one host; without shared memory, which each would otherwise prefer.
fn mpi() -> Vec<Case> {
    let open = |options: &str| {
        let build = "mpicc.openmpi -O2 -o ring FILES/ring.c";
        let line = format!("{build} && exec mpirun.openmpi -n 2 --oversubscribe {options} ./ring");
        alone(&line, read::ring)
    };
    let mpich = |tls| {
        let line = "mpicc.mpich -O2 -o ring FILES/ring.c && exec mpirun.mpich -n 2 ./ring";
        alone(line, read::ring).with(&[("UCX_TLS", tls)])
    };
    let tcp = || open("--mca pml ob1 --mca btl tcp,self");
    vec![
        Case::new(
            "Open MPI",
            "openmpi-bin",
            "pml ucx, rc_verbs",
            open("--mca pml ucx --mca btl ^openib").with(&[("UCX_TLS", "rc_v,self")]),
        )
        .beside(tcp())
        .full(),
        Case::new(
            "Open MPI",
            "openmpi-bin",
            "pml cm, mtl ofi, verbs;ofi_rxm",
            open("--mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include 'verbs;ofi_rxm'"),
        )
        .beside(tcp())
        .full(),
        Case::new("MPICH", "mpich", "ch4:ucx, rc_verbs", mpich("rc_v,self"))
            .beside(mpich("tcp,self"))
            .full(),
        Case::new("MPICH", "mpich", "ch4:ucx, ud_verbs", mpich("ud_v,self"))
            .beside(mpich("tcp,self"))
            .full(),
    ]
}

//! Clients in Python: MPI's, and the transports of machine learning. Each runs a program of ours in
//! `FILES`, which compares every byte. Debian's interpreter, for which the wheels are.

use super::{Case, Ready, Run, alone, pair};
use crate::read;

const PYTHON: &str = "/usr/bin/python3 -B";
/// What a lasting client prints after each exchange.
const EXCHANGED: &str = "exchanged";

pub(super) fn all() -> Vec<Case> {
    let mut cases = mpi();
    cases.extend([tensorpipe(), nixl("rc"), nixl("ud")]);
    cases.extend(mooncake());
    cases.into_iter().map(Case::full).collect()
}

/// The wheel has a module for each ABI. MPICH's library has another name in Debian than in its ABI.
/// Three ranks; two where each polls without pause.
fn mpi() -> Vec<Case> {
    let program = format!("{PYTHON} FILES/mpi.py");
    let run = |line: &str, abi, tls| {
        let variables = [("MPI4PY_MPIABI", abi), ("UCX_TLS", tls)];
        alone(line, read::ring).with(&variables).importing_wheels()
    };
    let open = |options: &str, tls| {
        let line = format!("exec mpirun.openmpi -n 3 --oversubscribe {options} {program}");
        run(&line, "openmpi", tls)
    };
    let mpich = |tls| {
        let library = "/usr/lib/x86_64-linux-gnu/libmpich.so.12";
        let line = format!(
            "ln -s {library} libmpi.so.12 && export LD_LIBRARY_PATH=$PWD:$LD_LIBRARY_PATH && exec mpirun.mpich -n 2 {program}"
        );
        run(&line, "mpich", tls)
    };
    let case = |mode, run| Case::new("mpi4py", "mpi4py", mode, run).wheel();
    vec![
        case(
            "Open MPI, pml ucx, osc ucx, rc_verbs",
            open("--mca pml ucx --mca osc ucx --mca btl ^openib", "rc_v,self"),
        )
        .beside(open("--mca pml ob1 --mca osc pt2pt --mca btl tcp,self", "tcp")),
        case("MPICH, ch4:ucx, rc_verbs", mpich("rc_v,self")).beside(mpich("tcp,self")),
    ]
}

/// Two ends of a program: `arguments` come before its host and port.
fn ends(program: &str, arguments: &str, options: &str) -> Run {
    let line = format!("exec {PYTHON} FILES/{program} {arguments} HOST PORT");
    let (server, client) = (format!("{line} server"), format!("{line} client {options}"));
    pair(&server, Ready::Listening, &client, read::ring).under_way_once(EXCHANGED)
}

/// Debian's PyTorch.
fn tensorpipe() -> Case {
    let run = |transport, options| ends("tensorpipe.py", transport, options);
    Case::new(
        "TensorPipe",
        "python3-torch",
        "PyTorch's RPC, transport ibv",
        run("ibv", ""),
    )
    .beside(run("uv", ""))
    .lasting(run("ibv", "lasting"))
}

/// Its UCX is of the wheel.
fn nixl(transport: &str) -> Case {
    let run = |tls, options| {
        ends("transfer.py", "nixl", options)
            .with(&[("UCX_TLS", tls)])
            .importing_wheels()
    };
    let tls = if transport == "rc" { "rc_v,self" } else { "ud_v,self" };
    let case = Case::new(
        "NIXL",
        "nixl-cu12",
        &format!("UCX backend, {transport}_verbs"),
        run(tls, ""),
    );
    case.wheel().beside(run("tcp,self", "")).lasting(run(tls, "lasting"))
}

/// Its threads poll without pause: one of them an end.
fn mooncake() -> [Case; 2] {
    let run = |devices: &str, options| {
        let run = ends("transfer.py", &format!("mooncake:{devices}"), options);
        run.with(&[("MC_WORKERS_PER_CTX", "1")]).importing_wheels()
    };
    let case = |mode, run| Case::new("Mooncake", "mooncake-transfer-engine-non-cuda", mode, run).wheel();
    let mut survived = run("rdma:soft0,soft1", "lasting 8");
    survived.read = read::survived_rail;
    [
        case("transfer engine, rdma", run("rdma:soft0", ""))
            .beside(run("tcp:", ""))
            .lasting(run("rdma:soft0", "lasting")),
        case(
            "transfer engine, rdma, two rails, one fails",
            survived.on_rails(&["--rails", "2", "--down", "soft1@4s"]),
        ),
    ]
}

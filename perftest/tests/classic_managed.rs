//! The classic tools connected by the connection manager (`-R`, `-z`), on the userspace device;
//! both ends Doorbell's, or the peer misbehaves.

#![forbid(unsafe_code)]

#[path = "common/tools.rs"]
mod tools;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::cm::{Connection, ConnectionManager};
use doorbell_verbs::{CompletionQueue, Context, Library, Local, ProtectionDomain, QueuePair};
use nix::sys::signal::Signal;

use self::tools::{Running, TIME_LIMIT, TOOLS, ToolOutput, Tools, free_port};

/// An address of these tests only: the ports of the connection manager are shared by all processes
/// of an address.
const MANAGED: &str = "127.91.0.11";

fn at_own_address() -> Tools {
    Tools::new().with("DOORBELL_SOFT_ADDR", MANAGED)
}

/// Runs both ends of a test by the connection manager. Returns the client's output and the
/// server's.
fn managed(tools: &Tools, line: &str) -> [ToolOutput; 2] {
    let port = free_port();
    let mut server = tools.start(&format!("{line} -p {port}"));
    server.read_until("Waiting for client");
    let client = tools.start(&format!("{line} -p {port} {MANAGED}"));
    [client.end(), server.end()]
}

#[test]
fn every_tool_runs_over_rdma_cm() {
    let tools = at_own_address();
    for tool in TOOLS {
        for options in ["-R -n 50", "-z -n 50"] {
            let line = format!("{tool} {options}");
            let [client, server] = managed(&tools, &line);
            for ended in [&client, &server] {
                assert_eq!(ended.status, Some(0), "{line}: {ended:?}");
                assert_eq!(ended.complaints(), Vec::<&str>::new(), "{line}");
                assert!(ended.stdout.contains("Data ex. method : rdma_cm"), "{ended:?}");
            }
            assert_eq!(client.rows().len(), 1, "{line}: {client:?}");
            assert_eq!(
                server.stdout.contains("Waiting for client rdma_cm QP to connect"),
                options.starts_with("-R"),
                "{server:?}"
            );
        }
    }
}

#[test]
fn rdma_cm_connects_many_queue_pairs() {
    let tools = at_own_address();
    for line in [
        "ib_write_bw -R -q 4 -n 50",
        "ib_send_bw -R -q 4 -b -n 50",
        "ib_send_bw -R -q 4 --use-srq -n 50",
        "ib_read_bw -R -q 4 -e -n 50",
        "ib_send_bw -R -a -n 20",
        "ib_send_bw -R -c UD -q 4 -n 50",
        "ib_send_bw -R -c UD -b -n 50",
        "ib_send_bw -R -c UD --use-srq -n 50",
        "ib_send_lat -R -c UD -n 50",
        "ib_send_bw -z -c UD -n 50",
        "ib_write_bw -z -c UC -q 2 -b -n 50",
    ] {
        for ended in managed(&tools, line) {
            assert_eq!(ended.status, Some(0), "{line}: {ended:?}");
            assert_eq!(ended.complaints(), Vec::<&str>::new(), "{line}");
        }
    }
}

#[test]
fn without_a_server_the_connection_manager_fails() {
    let tools = at_own_address();
    let port = free_port();
    let client = tools.start(&format!("ib_send_lat -R -p {port} {MANAGED}"));
    client
        .end()
        .failed(1, &["cannot reach the server", "no program listens there"]);
}

#[test]
fn an_rdma_cm_test_notices_ctrl_c_and_a_lost_peer() {
    let tools = at_own_address();
    let port = free_port();
    let mut server = tools.start(&format!("ib_write_bw -R -p {port}"));
    server.read_until("Waiting for client");
    server.signal(Signal::SIGINT);
    assert_eq!(server.end().status, Some(130));
    let mut server = tools.start(&format!("ib_write_bw -R -D 30 -p {port}"));
    server.read_until("Waiting for client");
    let mut client = tools.start(&format!("ib_write_bw -R -D 30 -p {port} {MANAGED}"));
    client.read_until(" #bytes");
    client.signal(Signal::SIGINT);
    assert_eq!(client.end().status, Some(130));
    server.end().failed(1, &["lost"]);
}

#[test]
fn an_rdma_cm_test_notices_a_killed_peer() {
    let tools = at_own_address();
    let port = free_port();
    for killed_first in ["client", "server"] {
        let mut server = tools.start(&format!("ib_write_lat -R -D 30 -p {port}"));
        server.read_until("Waiting for client");
        let mut client = tools.start(&format!("ib_write_lat -R -D 30 -p {port} {MANAGED}"));
        client.read_until(" #bytes");
        let (gone, left) = match killed_first {
            "client" => (client, server),
            _ => (server, client),
        };
        gone.signal(Signal::SIGKILL);
        assert_eq!(gone.end().status, None);
        left.end().failed(1, &[]);
    }
}

/// The address of the misbehaving peer's device.
const FAKE_PEER: &str = "127.91.0.12";

struct FakePeer {
    context: Context,
    manager: ConnectionManager,
}

/// A queue pair in the place of a perftest's control connection.
struct FakeChannel {
    pd: ProtectionDomain,
    qp: QueuePair,
    cq: CompletionQueue,
    _connection: Connection,
}

impl FakePeer {
    /// Only one per process.
    fn new() -> FakePeer {
        let device = DeviceConfig {
            address: Some(FAKE_PEER.parse::<IpAddr>().expect("an address")),
            ..DeviceConfig::new("soft0")
        };
        configure(vec![device]).expect("it is not in use");
        FakePeer {
            context: Library::new(api()).open("soft0").expect("it opens"),
            manager: ConnectionManager::new(&doorbell_softroce_rdmacm::API, api()),
        }
    }

    fn connect(&self, port: u16) -> FakeChannel {
        let server = SocketAddr::new(MANAGED.parse().expect("an address"), port);
        let pd = self.context.protection_domain().expect("a protection domain");
        let cq = self.context.completion_queue(8).expect("a completion queue");
        let mut qp = pd
            .queue_pair(&cq)
            .max_send_wr(4)
            .max_recv_wr(4)
            .rc()
            .expect("a queue pair");
        for _ in 0..2 {
            qp.receive(pd.register(vec![0; 64], Local).expect("memory"))
                .expect("it is posted");
        }
        let route = self.manager.resolve(server, Duration::from_secs(5)).expect("a route");
        let (qp, connection) = route.connect(qp, &[], Duration::from_secs(5)).expect("it is accepted");
        FakeChannel {
            pd,
            qp,
            cq,
            _connection: connection,
        }
    }
}

impl FakeChannel {
    /// Sends a message and waits for its completion, whether or not it succeeds.
    fn send(&mut self, bytes: &[u8]) {
        let message = self.pd.register(bytes.to_vec(), Local).expect("memory");
        let posted = self.qp.post(|batch| {
            batch.send(message).signaled();
        });
        posted.expect("it is posted");
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if self.cq.poll().expect("it is polled").next().is_some() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("nothing completes");
    }
}

#[test]
fn a_misbehaving_peer_on_a_queue_pair_is_refused() {
    let tools = at_own_address();
    let fake_peer = FakePeer::new();
    let serve = || -> (Running, u16) {
        let port = free_port();
        let mut server = tools.start(&format!("ib_write_lat -R -p {port}"));
        server.read_until("Waiting for client");
        (server, port)
    };
    for (says, answer) in [
        (&b"GET / HTTP/1.1\r\n"[..], "version"),
        (b"9", "1 B instead of 16"),
        (&[0xff; 64], "64 B instead of 16"),
        // Longer than any message, and than the receive.
        (&[0; 4096], "peer"),
    ] {
        let (server, port) = serve();
        let started = Instant::now();
        let mut line = fake_peer.connect(port);
        line.send(says);
        server.end().failed(1, &[answer]);
        drop(line);
        assert!(started.elapsed() < TIME_LIMIT / 2, "{answer}: it was waited for");
    }
    let (server, port) = serve();
    drop(fake_peer.connect(port));
    let ended = server.end();
    ended.failed(1, &["peer"]);
    // On a busy machine its disconnect is there before the server has seen it connect.
    let reasons = ["lost", "disconnected before the connection was established"];
    assert!(reasons.iter().any(|reason| ended.stderr.contains(reason)), "{ended:?}");
}

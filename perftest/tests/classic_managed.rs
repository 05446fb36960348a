//! The classic tools where the connection manager connects them (`-R`, `-z`), on the userspace device; both ends ours, or the other one a stranger who says something else.

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

use self::tools::{Ended, HANGS, Running, TOOLS, Tools, free_port};

/// An address that no other test has: the connection manager's port is one of all processes that share an address.
const MANAGED: &str = "127.91.0.11";

/// Tools whose device has that address.
fn at_own_address() -> Tools {
    Tools::new().with("DOORBELL_SOFT_ADDR", MANAGED)
}

/// Runs both ends of a test by the connection manager. Returns the client's output and the server's.
fn managed(tools: &Tools, line: &str) -> [Ended; 2] {
    let port = free_port();
    let mut server = tools.start(&format!("{line} -p {port}"));
    server.read_until("Waiting for client");
    let client = tools.start(&format!("{line} -p {port} {MANAGED}"));
    [client.end(), server.end()]
}

#[test]
fn every_tool_measures_by_the_connection_manager() {
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
fn the_connection_manager_connects_many_queue_pairs() {
    let tools = at_own_address();
    for line in [
        "ib_write_bw -R -q 4 -n 50",
        "ib_send_bw -R -q 4 -b -n 50",
        "ib_send_bw -R -q 4 --use-srq -n 50",
        "ib_read_bw -R -q 4 -e -n 50",
        "ib_send_bw -R -a -n 20",
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
fn without_a_server_the_connection_manager_says_so() {
    let tools = at_own_address();
    let port = free_port();
    let client = tools.start(&format!("ib_send_lat -R -p {port} {MANAGED}"));
    client
        .end()
        .failed(1, &["cannot reach the server", "nobody listens there"]);
}

#[test]
fn an_end_by_the_connection_manager_notices_ctrl_c_and_its_peer_going() {
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
fn an_end_by_the_connection_manager_misses_a_killed_peer() {
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

/// Another address than the tools': a stranger's device.
const STRANGER: &str = "127.91.0.12";

/// A stranger's device, and the connection manager that leads to it.
struct Stranger {
    context: Context,
    manager: ConnectionManager,
}

/// A queue pair that a tool takes for a perftest's.
struct Line {
    pd: ProtectionDomain,
    qp: QueuePair,
    cq: CompletionQueue,
    _connection: Connection,
}

impl Stranger {
    /// There is one in a process.
    fn new() -> Stranger {
        let device = DeviceConfig {
            address: Some(STRANGER.parse::<IpAddr>().expect("an address")),
            ..DeviceConfig::new("soft0")
        };
        configure(vec![device]).expect("nobody has used it before");
        Stranger {
            context: Library::new(api()).open("soft0").expect("it opens"),
            manager: ConnectionManager::new(&doorbell_softroce_rdmacm::API, api()),
        }
    }

    /// Connects to a server, with two receives posted.
    fn connect(&self, port: u16) -> Line {
        let server = SocketAddr::new(MANAGED.parse().expect("an address"), port);
        let pd = self.context.protection_domain().expect("a protection domain");
        let cq = self.context.completion_queue(8).expect("a completion queue");
        let mut qp = pd
            .queue_pair(&cq)
            .send_depth(4)
            .recv_depth(4)
            .rc()
            .expect("a queue pair");
        for _ in 0..2 {
            qp.receive(pd.register(vec![0; 64], Local).expect("memory"))
                .expect("it is posted");
        }
        let route = self.manager.resolve(server, Duration::from_secs(5)).expect("a route");
        let (qp, connection) = route.connect(qp, &[], Duration::from_secs(5)).expect("it is accepted");
        Line {
            pd,
            qp,
            cq,
            _connection: connection,
        }
    }
}

impl Line {
    /// Says something, and waits until it has been said: whether the other end took it does not matter.
    fn say(&mut self, bytes: &[u8]) {
        let message = self.pd.register(bytes.to_vec(), Local).expect("memory");
        let posted = self.qp.post(|batch| {
            batch.send(message).signalled();
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
fn a_stranger_on_a_queue_pair_is_no_peer() {
    let tools = at_own_address();
    let stranger = Stranger::new();
    let serve = || -> (Running, u16) {
        let port = free_port();
        let mut server = tools.start(&format!("ib_write_lat -R -p {port}"));
        server.read_until("Waiting for client");
        (server, port)
    };
    for (says, answer) in [
        (&b"GET / HTTP/1.1\r\n"[..], "version"),
        (b"9", "1 B where 16 belong"),
        (&[0xff; 64], "64 B where 16 belong"),
        // More than any message has, and than there is room for.
        (&[0; 4096], "peer"),
    ] {
        let (server, port) = serve();
        let started = Instant::now();
        let mut line = stranger.connect(port);
        line.say(says);
        server.end().failed(1, &[answer]);
        drop(line);
        assert!(started.elapsed() < HANGS / 2, "{answer}: it was waited for");
    }
    let (server, port) = serve();
    drop(stranger.connect(port));
    server.end().failed(1, &["lost"]);
}

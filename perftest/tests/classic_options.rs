//! Options of the classic tools by their effects: in packets, in the output, in duration. Both ends
//! are Doorbell's, on the userspace device.

#![forbid(unsafe_code)]

#[path = "common/tools.rs"]
mod tools;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use doorbell_cuda_standin::{ExecutionMode, environment};
use nix::sys::signal::Signal;

use self::tools::{Running, ToolOutput, Tools, free_port};

struct Bench {
    tools: Tools,
    /// The capture file of the client.
    capture: Option<PathBuf>,
}

impl Bench {
    fn new() -> Bench {
        Bench::of(Tools::new())
    }

    fn with_gpus() -> Bench {
        let standin = environment(ExecutionMode::Prompt, 2);
        Bench::of(
            standin
                .into_iter()
                .fold(Tools::new(), |tools, (name, value)| tools.with(name, value)),
        )
    }

    fn of(tools: Tools) -> Bench {
        Bench { tools, capture: None }
    }

    fn with(self, name: &str, value: &str) -> Bench {
        Bench {
            tools: self.tools.with(name, value),
            ..self
        }
    }

    fn start_client(&self, line: &str) -> Running {
        match &self.capture {
            Some(file) => self.tools.start_with(line, [("DOORBELL_PCAP", file.into())]),
            None => self.tools.start(line),
        }
    }

    fn alone(&self, line: &str) -> ToolOutput {
        self.tools.start(line).end()
    }

    fn pair(&self, line: &str) -> (ToolOutput, ToolOutput) {
        self.ends(line, line, "127.0.0.1")
    }

    fn ends(&self, server: &str, client: &str, host: &str) -> (ToolOutput, ToolOutput) {
        let port = free_port();
        let mut server = self.tools.start(&format!("{server} -F -p {port}"));
        // A client retries for three seconds, which is enough for a server that prints nothing
        // (--output). A refused one prints nothing either.
        if !client.contains("--output") && !client.contains("--reversed") {
            server.says("Waiting");
        }
        let client = self.start_client(&format!("{client} -F -p {port} {host}")).end();
        (client, server.end())
    }

    #[track_caller]
    fn good(&self, line: &str) -> (ToolOutput, ToolOutput) {
        let (client, server) = self.pair(line);
        assert_eq!(
            (client.status, server.status),
            (Some(0), Some(0)),
            "{line}: {client:?} {server:?}"
        );
        (client, server)
    }
}

/// The lengths of the transport packets in a capture, without the UDP header: those over IPv4 with
/// the default P_Key.
fn packets(capture: &[u8]) -> Vec<usize> {
    let udp_length = |header: &[u8]| usize::from(u16::from_be_bytes([header[24], header[25]]));
    let headers = capture.windows(40);
    // IPv4 without options, UDP; the BTH follows, with the P_Key at its third byte.
    let ours = headers.filter(|header| header[0] == 0x45 && header[9] == 17 && header[30..32] == [0xff, 0xff]);
    ours.map(|header| udp_length(header).saturating_sub(8)).collect()
}

#[test]
fn packets_have_the_requested_mtu() {
    for (line, payload) in [
        ("ib_write_bw -n 10 -s 4096 -m 1024", 1024),
        ("ib_write_bw -n 10 -s 4096 -m 256", 256),
        ("ib_send_bw -n 10 -s 512 -m 512 -c UD", 512),
    ] {
        let files = tempfile::tempdir().unwrap();
        let file = files.path().join("wire.pcap");
        let mut bench = Bench::new().with("DOORBELL_LINK", "udp");
        bench.capture = Some(file.clone());
        bench.good(line);
        let seen = packets(&std::fs::read(file).unwrap());
        // Headers and ICRC of a packet are less than this together.
        let (whole, longer): (Vec<usize>, Vec<usize>) = seen
            .into_iter()
            .filter(|len| *len >= payload)
            .partition(|len| *len < payload + 64);
        assert!(whole.len() >= 10 && longer.is_empty(), "{line}: {whole:?} {longer:?}");
    }
}

#[test]
fn the_header_shows_the_options() {
    let bench = Bench::new();
    let (client, _) = bench.good("ib_write_bw -n 20 -s 64 -I 64 -t 10 -Q 5");
    assert_eq!(client.fact("Max inline data"), "64[B]");
    assert_eq!((client.fact("TX depth"), client.fact("CQ Moderation")), ("10", "5"));
    assert_eq!(client.fact("PCIe relax order"), "ON");
    let (client, server) = bench.good("ib_read_bw -n 20 -o 3 --disable_pcie_relaxed -m 512");
    assert_eq!(
        (client.fact("Outstand reads"), server.fact("Outstand reads")),
        ("3", "3")
    );
    assert_eq!((client.fact("PCIe relax order"), client.fact("Mtu")), ("OFF", "512[B]"));
    // The byte that a WRITE latency test polls must be written last.
    assert_eq!(bench.good("ib_write_lat -n 20").0.fact("PCIe relax order"), "OFF");
}

#[test]
fn every_way_of_connecting_and_posting_measures() {
    let bench = Bench::new();
    for line in [
        "ib_write_bw -n 20 --flow_label 74565 -S 3 -u 16 --retry_count 2 --pkey_index 0",
        "ib_send_bw -n 20 --flow_label 1048575 -S 3 -c UD -s 512",
        "ib_send_lat -n 20 -e -X 0",
        "ib_send_bw -n 64 -l 16 --recv_post_list 8 -r 32 -t 32 -s 64",
        "ib_write_bw -n 20 -q 3 --mr_per_qp",
        "ib_send_bw -n 20 -q 3 --use-srq -r 8 -e",
        "ib_write_bw -n 20 --perform_warm_up",
        "ib_read_lat -n 20 --perform_warm_up",
        "ib_atomic_bw -n 20 -A CMP_AND_SWAP",
        "ib_write_bw -n 20 --reversed",
        // By the link-local GIDs.
        "ib_write_bw -n 20 --ipv6",
    ] {
        let (client, server) = bench.pair(line);
        assert_eq!(
            (client.status, server.status),
            (Some(0), Some(0)),
            "{line}: {client:?} {server:?}"
        );
        let figures = if line.contains("--reversed") {
            server.row()
        } else {
            client.row()
        };
        assert!(figures[1] >= 20.0, "{line}: {figures:?}");
    }
}

#[test]
fn unsupported_options_of_a_device_fail_in_one_line() {
    let bench = Bench::new();
    for (line, says) in [
        ("ib_send_lat -n 20 -e -X 1", "completion vector 1: soft0 has 1"),
        ("ib_write_bw -n 20 --pkey_index 3", "P_Key index 3"),
        ("ib_write_bw -n 20 -s 64 -I 900", "-I 900"),
    ] {
        let (client, _) = bench.pair(line);
        client.failed(1, &[says]);
    }
    bench
        .alone("ib_write_bw --flow_label 1048576")
        .failed(2, &["from 0 to 1048575"]);
    bench
        .alone("ib_write_bw --report-per-port")
        .failed(2, &["it is for -O"]);
    bench
        .alone("ib_write_bw --bind_source_ip 192.0.2.1")
        .failed(1, &["no address of this machine"]);
    bench
        .alone("ib_write_bw --source_ip 192.0.2.1 127.0.0.1")
        .failed(1, &["cannot reach"]);
}

#[test]
fn each_end_uses_its_given_address() {
    let bench = Bench::new();
    let line = "ib_write_bw -n 20 --bind_source_ip 127.0.0.2";
    let (client, server) = bench.ends(line, "ib_write_bw -n 20 --source_ip 127.0.0.3", "127.0.0.2");
    assert_eq!(
        (client.status, server.status),
        (Some(0), Some(0)),
        "{client:?} {server:?}"
    );
    let port = free_port();
    let mut server = bench.tools.start(&format!("{line} -F -p {port}"));
    server.read_until("Waiting");
    let client = bench.alone(&format!("ib_write_bw -n 20 -F -p {port} 127.0.0.1"));
    server.signal(Signal::SIGKILL);
    server.end();
    client.failed(1, &["cannot reach"]);
}

#[test]
fn rates_gaps_and_waits_take_their_time() {
    let bench = Bench::new();
    // 200 messages at 1000 per second, four at a time; without the limit they take a few
    // milliseconds.
    let (client, _) = bench.good("ib_write_bw -n 200 -s 64 --rate_limit 1000 --rate_units p --burst_size 4");
    let rate = client.row()[4] * 1e6;
    assert!((500.0..1100.0).contains(&rate), "{rate}");
    let began = Instant::now();
    bench.good("ib_read_lat -n 100 --latency_gap 3000");
    assert!(began.elapsed() >= Duration::from_millis(300));
    let began = Instant::now();
    bench.good("ib_write_bw -n 20 --wait_destroy 1");
    assert!(began.elapsed() >= Duration::from_secs(1));
}

#[test]
fn limits_are_checked_by_the_client() {
    let bench = Bench::new();
    for (line, says) in [
        ("ib_write_bw -n 20 -w 99999999", "average bandwidth"),
        ("ib_write_bw -n 20 -y 99999", "message rate"),
    ] {
        let (client, server) = bench.pair(line);
        client.failed(1, &[says]);
        assert_eq!(server.status, Some(0), "{server:?}");
    }
    let (client, _) = bench.good("ib_write_bw -n 20 --output=message_rate -w 0.001");
    assert!(client.stdout.trim().parse::<f64>().is_ok(), "{client:?}");
    let (client, _) = bench.good("ib_send_lat -n 20 --output=latency");
    assert!(client.stdout.trim().parse::<f64>().is_ok(), "{client:?}");
}

#[test]
fn messages_are_in_gpu_memory_where_supported() {
    let bench = Bench::with_gpus();
    for line in [
        "ib_write_bw -n 40 -s 70000 --use_cuda 0",
        "ib_write_bw -n 40 -a --use_cuda=1 -q 2 --mr_per_qp",
        "ib_write_bw -n 40 -b -s 100 --use_cuda 1",
        "ib_read_bw -n 40 -s 4096 --use_cuda 0 -q 2",
        "ib_send_bw -n 40 -s 4096 --use_cuda 0 -r 16",
        "ib_send_bw -n 40 -s 512 --use_cuda 0 -c UD",
        "ib_send_bw -n 40 -s 512 --use_cuda 0 --use-srq -q 2 -b",
        "ib_read_lat -n 40 --use_cuda 0",
        "ib_send_lat -n 40 --use_cuda 0 -s 4096",
    ] {
        let (client, server) = bench.pair(line);
        assert_eq!(
            (client.status, server.status),
            (Some(0), Some(0)),
            "{line}: {client:?} {server:?}"
        );
        if !line.contains("read") {
            assert_eq!(client.fact("Max inline data"), "0[B]", "{line}");
        }
        assert!(client.row()[1] >= 40.0, "{line}: {client:?}");
    }
    // GPU memory at one end only, and host memory at the other.
    let (client, server) = bench.ends("ib_write_bw -n 40 --use_cuda 1", "ib_write_bw -n 40", "127.0.0.1");
    assert_eq!(
        (client.status, server.status),
        (Some(0), Some(0)),
        "{client:?} {server:?}"
    );
}

#[test]
fn staged_memory_is_measured_with_its_copies_and_reported() {
    let bench = Bench::with_gpus().with("DOORBELL_GPU_PATH", "staged");
    for line in [
        "ib_send_bw -n 40 -s 4096 --use_cuda 0",
        "ib_read_bw -n 40 --use_cuda 1",
        "ib_send_lat -n 40 --use_cuda 0",
    ] {
        let (client, _) = bench.good(line);
        assert!(client.stderr.contains("staged through the host"), "{line}: {client:?}");
    }
}

#[test]
fn a_gpu_that_cannot_be_used_is_refused_in_one_line() {
    let bench = Bench::with_gpus();
    for (line, status, says) in [
        ("ib_write_bw --use_cuda 7", 2, "there is no GPU 7"),
        ("ib_write_bw --use_cuda_bus_id ff:1f.7", 2, "there is no such GPU"),
        ("ib_write_bw --use_cuda 0 --use_cuda_dmabuf", 1, "dmabuf"),
        ("ib_write_bw --use_cuda_dmabuf", 2, "goes with --use_cuda"),
        (
            "ib_write_lat --use_cuda 0",
            2,
            "ib_write_lat polls the last byte of a message",
        ),
        ("ib_atomic_bw --use_cuda 0", 2, "atomics"),
        ("ib_write_bw --use_cuda 0 -I 64", 2, "-I does not go with --use_cuda"),
        ("ib_send_bw --use_cuda 0 -a", 2, "-a does not go with --use_cuda"),
        ("ib_read_bw --use_cuda 0 --use_hugepages", 2, "leave one out"),
        (
            "ib_read_bw --use_cuda 0 --use_cuda_bus_id 3b:00.0",
            2,
            "both name a GPU",
        ),
    ] {
        bench.alone(line).failed(status, &[says]);
    }
    Bench::new()
        .alone("ib_write_bw --use_cuda 0")
        .failed(2, &["libcuda.so.1"]);
}

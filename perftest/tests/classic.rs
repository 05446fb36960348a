//! The classic tools as a user runs them: the binary, called by each of the eight names.
//!
//! Both ends are Doorbell's here, or the peer is a fake perftest that misbehaves; tests against the
//! C tools are elsewhere. Everything runs on the userspace device, on loopback.

#![forbid(unsafe_code)]

#[path = "common/tools.rs"]
mod tools;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use self::tools::{Running, TIME_LIMIT, TOOLS, Tools, free_port};

struct FakePeer {
    stream: TcpStream,
    is_client: bool,
}

/// The lengths of the messages up to the test itself, of `ib_write_lat`: version, page size, cache
/// line, MTU, QP information, and barriers.
const MESSAGES: [usize; 8] = [16, 4, 4, 2, 108, 108, 108, 108];

impl FakePeer {
    fn connect(port: u16) -> FakePeer {
        FakePeer::over(TcpStream::connect(("127.0.0.1", port)).expect("it listens"), true)
    }

    fn over(stream: TcpStream, is_client: bool) -> FakePeer {
        stream.set_read_timeout(Some(TIME_LIMIT)).expect("a timeout");
        FakePeer { stream, is_client }
    }

    fn message(index: usize) -> Vec<u8> {
        match index {
            0 => b"6.06\0\0\0\0\0\0\0\0\0\0\0\0".to_vec(),
            1 => 0x1000_u32.to_be_bytes().to_vec(),
            2 => 0x40_u32.to_be_bytes().to_vec(),
            3 => b"5\0".to_vec(),
            _ => {
                let gid = "00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01";
                format!("0000:0001:abcdef:123456:00001234:00007f0000000000:{gid}:00000000:\0").into_bytes()
            }
        }
    }

    fn exchange(&mut self, count: usize) {
        for index in 0..count {
            self.exchange_one(index, &FakePeer::message(index));
        }
    }

    /// Sends `ours` as message `index`, and receives the peer's.
    fn exchange_one(&mut self, index: usize, ours: &[u8]) {
        let mut theirs = vec![0; MESSAGES[index]];
        if self.is_client {
            self.stream.write_all(ours).expect("it takes it");
            self.stream.read_exact(&mut theirs).expect("it answers");
        } else {
            self.stream.read_exact(&mut theirs).expect("it begins");
            self.stream.write_all(ours).expect("it takes it");
        }
    }

    /// Sends these bytes instead of a message.
    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("it takes it");
    }

    fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Starts a client, and is its server.
fn with_fake_server(tools: &Tools, line: &str) -> (Running, FakePeer) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let client = tools.start(&format!("{line} -p {port} 127.0.0.1"));
    let (stream, _) = listener.accept().expect("it connects");
    (client, FakePeer::over(stream, false))
}

/// Starts a server, and is its client.
fn with_fake_client(tools: &Tools, line: &str) -> (Running, FakePeer) {
    let (server, port) = tools.serve(line);
    (server, FakePeer::connect(port))
}

type ConnectFake = fn(&Tools, &str) -> (Running, FakePeer);

const BOTH: [ConnectFake; 2] = [with_fake_server, with_fake_client];
/// With the messages before which a peer can fail: a connection that sends nothing is no client.
const BOTH_FROM: [(ConnectFake, usize); 2] = [(with_fake_server, 0), (with_fake_client, 1)];

#[test]
fn every_tool_measures() {
    let tools = Tools::new();
    for tool in TOOLS {
        let (client, ours, theirs) = tools.pair(&format!("{tool} -n 50"));
        let rows = client.rows();
        assert_eq!(rows.len(), 1, "{client:?}");
        assert_eq!(rows[0][1], "50", "{client:?}");
        let results = ours["results"].as_array().expect("results");
        assert_eq!(results.len(), 1, "{ours}");
        assert_eq!(results[0]["n_iterations"], 50, "{ours}");
        assert!(theirs["test_info"].is_object(), "{theirs}");
    }
}

#[test]
fn all_sizes_are_in_the_report() {
    let tools = Tools::new();
    for tool in TOOLS.into_iter().filter(|tool| !tool.contains("atomic")) {
        let (client, ours, _) = tools.pair(&format!("{tool} -a -n 5"));
        let sizes: Vec<u64> = (1..=23).map(|power| 1 << power).collect();
        let printed: Vec<u64> = client.rows().iter().filter_map(|row| row[0].parse().ok()).collect();
        assert_eq!(printed, sizes, "{client:?}");
        let results = ours["results"].as_array().expect("results");
        let reported: Vec<_> = results.iter().filter_map(|row| row["MsgSize"].as_u64()).collect();
        assert_eq!(reported, sizes, "{tool}");
    }
}

#[test]
fn a_duration_is_kept() {
    let tools = Tools::new();
    let running: Vec<_> = TOOLS
        .into_iter()
        .map(|tool| {
            let (server, port) = tools.serve(&format!("{tool} -D 1"));
            let began = Instant::now();
            (server, tools.start(&format!("{tool} -D 1 -p {port} 127.0.0.1")), began)
        })
        .collect();
    for (server, client, began) in running {
        let (client, server) = (client.end(), server.end());
        assert_eq!(
            (client.status, server.status),
            (Some(0), Some(0)),
            "{client:?} {server:?}"
        );
        assert!(began.elapsed() >= Duration::from_secs(1), "{client:?}");
        let rows = client.rows();
        assert!(
            rows.len() == 1 && rows[0][1].parse::<u64>().is_ok_and(|count| count > 0),
            "{client:?}"
        );
    }
}

#[test]
fn latency_is_measured_in_every_way() {
    let tools = Tools::new();
    for line in [
        "ib_write_lat -c UC -n 50 -s 64",
        "ib_write_lat -n 50 -I 0 -s 100",
        "ib_send_lat -c UC -n 50",
        "ib_send_lat -c UD -n 50 -s 1024",
        "ib_send_lat -c UD -n 50 --use-srq",
        "ib_send_lat --use-srq -n 600 -r 16",
        "ib_send_lat -e -n 50",
        "ib_send_lat -c UD -e -n 50",
        "ib_read_lat -e -n 50 -s 5000",
        "ib_read_lat -o 1 -n 50 -m 1024",
        "ib_atomic_lat -A CMP_AND_SWAP -n 50",
        "ib_write_lat -n 20 --latency_gap=100",
        "ib_read_lat -n 20 --latency_gap=100",
        "ib_send_lat -n 50 -C",
    ] {
        let (client, ours, theirs) = tools.pair(line);
        assert_eq!(client.rows().len(), 1, "{client:?}");
        let row = &ours["results"][0];
        let figure = |name: &str| {
            row[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{line}: no {name} in {ours}"))
        };
        assert!(figure("t_min") > 0.0, "{line}: {ours}");
        for pair in ["t_min", "t_typical", "percentile_99", "percentile_99.9", "t_max"].windows(2) {
            assert!(figure(pair[0]) <= figure(pair[1]), "{line}: {pair:?}: {ours}");
        }
        assert!(theirs["results"].is_array(), "{line}: {theirs}");
    }
}

#[test]
fn datagrams_go_to_groups() {
    let tools = Tools::new();
    for tool in ["ib_send_bw", "ib_send_lat"] {
        // Each end has a group of its own, so that none receives what it sends.
        let line = |last| format!("{tool} -g -n 50 -s 64 -M 0:0:0:0:0:0:0:0:0:0:255:0xff:239:91:1:{last}");
        let (server, port) = tools.serve(&line(1));
        let client = tools.start(&format!("{} -p {port} 127.0.0.1", line(2))).end();
        for ended in [&client, &server.end()] {
            assert_eq!((ended.status, ended.complaints()), (Some(0), vec![]), "{ended:?}");
            assert!(ended.stdout.contains("Multicast Test"), "{ended:?}");
            let group = "MGID: 00:00:00:00:00:00:00:00:00:00:255:255:239:91:01:01";
            assert!(ended.stdout.contains(group), "{ended:?}");
        }
        assert_eq!(client.rows().len(), 1, "{client:?}");
    }
}

#[test]
fn every_sample_is_printed_sorted_or_as_it_came() {
    let tools = Tools::new();
    for (flag, sorted) in [("-H", true), ("-U", false)] {
        let (client, _, _) = tools.pair(&format!("ib_send_lat -n 40 {flag}"));
        let samples: Vec<f64> = client
            .stdout
            .lines()
            .skip_while(|line| !line.starts_with("#, "))
            .skip(1)
            .map_while(|line| line.split_once(", "))
            .map(|(_, value)| value.parse().expect("a number"))
            .collect();
        // The first round trip waits for the peer to start, and does not count.
        assert_eq!(samples.len(), 39, "{client:?}");
        assert!(!sorted || samples.is_sorted(), "{client:?}");
    }
}

#[test]
fn both_directions_are_reported_by_themselves_too() {
    let tools = Tools::new();
    let (client, report, _) = tools.pair("ib_write_bw -n 100 -s 4096 -b --report-both");
    let rows = client.rows();
    let rows: Vec<_> = rows.iter().filter(|row| row[0] == "4096").collect();
    assert_eq!(rows.len(), 3, "{client:?}");
    let average = |row: &[&str]| row[3].parse::<f64>().expect("a number");
    let (both, local, remote) = (average(rows[0]), average(rows[1]), average(rows[2]));
    // Two decimals each.
    assert!((both - local - remote).abs() < 0.02, "{client:?}");
    let row = &report["results"][0];
    for (name, printed) in [("Local", local), ("Remote", remote)] {
        let reported = row[name]["BW_average"].as_f64().expect("a number");
        assert!((reported - printed).abs() < 0.006, "{name}: {report}");
    }
}

#[test]
fn no_peak_leaves_the_peak_out() {
    let tools = Tools::new();
    for (line, wanted) in [("ib_read_bw -n 100", true), ("ib_read_bw -n 100 -N", false)] {
        let (client, report, _) = tools.pair(line);
        assert_eq!(client.rows()[0][2] != "0.00", wanted, "{client:?}");
        assert_eq!(report["results"][0].get("BW_peak").is_some(), wanted, "{report}");
    }
}

#[test]
fn the_processor_is_this_process() {
    let tools = Tools::new();
    for tool in ["ib_write_bw", "ib_read_lat", "ib_send_bw"] {
        let (client, report, _) = tools.pair(&format!("{tool} -D 1 -f 0 --cpu_util"));
        let reported = report["results"][0]["CPU_util"].as_f64().expect("a number");
        // It polls on one core; the device's thread may use another.
        assert!((1.0..=210.0).contains(&reported), "{report}");
        let printed: f64 = client.rows()[0].last().expect("a column").parse().expect("a number");
        assert!((printed - reported).abs() < 0.006, "{client:?} {report}");
    }
}

#[test]
fn cycles_are_times_by_another_unit() {
    let tools = Tools::new();
    let figure = |flag: &str| {
        let (client, report, _) = tools.pair(&format!("ib_write_lat -n 500 {flag}"));
        let unit = report["test_info"]["Unit"].as_str().expect("a unit").to_owned();
        // The least: the typical one of a busy machine may be fifty times longer in one run.
        let least: f64 = client.rows()[0][2].parse().expect("a number");
        (unit, least)
    };
    let (unit, cycles) = figure("-C");
    assert_eq!(unit, "cycles");
    let (unit, us) = figure("");
    assert_eq!(unit, "usec");
    // Two runs, on clocks of 0.5 to 10 GHz: a wrong unit would be off by a thousand.
    assert!(
        (50.0..100_000.0).contains(&(cycles / us)),
        "{cycles} cycles are {us} us"
    );
}

#[test]
fn an_endless_test_reports_until_it_is_stopped() {
    let tools = Tools::new();
    for (tool, of_client) in [("ib_write_bw", true), ("ib_send_bw", true), ("ib_read_bw", false)] {
        let line = format!("{tool} -D 1 --run_infinitely");
        let (server, port) = tools.serve(&line);
        let mut client = tools.start(&format!("{line} -p {port} 127.0.0.1"));
        client.read_until("#bytes");
        // Two lines, a second apart.
        let began = Instant::now();
        client.read_until("65536");
        client.read_until("65536");
        assert!(began.elapsed() >= Duration::from_millis(1500), "{tool}");
        let (stopped, left) = if of_client { (client, server) } else { (server, client) };
        stopped.signal(Signal::SIGINT);
        assert_eq!(stopped.end().status, Some(130), "{tool}");
        left.end().failed(1, &["127.0.0.1"]);
    }
}

#[test]
fn a_client_without_a_server_fails() {
    let tools = Tools::new();
    let port = free_port();
    tools
        .start(&format!("ib_write_bw -p {port} 127.0.0.1"))
        .end()
        .failed(1, &["127.0.0.1", &port.to_string()]);
    tools
        .start(&format!("ib_send_lat -p {port} unknown.invalid"))
        .end()
        .failed(1, &["unknown.invalid"]);
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let tools = Tools::new();
    let ended = tools.start("ib_read_bw -d mlx5_77").end();
    assert!(matches!(ended.status, Some(1 | 2)), "{ended:?}");
    ended.failed(ended.status.unwrap_or(0), &["mlx5_77"]);
}

#[test]
fn a_port_in_use_is_named() {
    let tools = Tools::new();
    let (server, port) = tools.serve("ib_write_lat");
    tools
        .start(&format!("ib_write_lat -p {port}"))
        .end()
        .failed(1, &[&port.to_string()]);
    drop(server);
}

#[test]
fn too_much_memory_is_refused() {
    let tools = Tools::new();
    // Two million megabytes at each end.
    let line = "ib_write_bw -s 2147483647 -q 1000";
    let (server, port) = tools.serve(line);
    let client = tools.start(&format!("{line} -p {port} 127.0.0.1"));
    // Either end may fail first; the other then loses its peer.
    let (client, server) = (client.end(), server.end());
    client.failed(1, &[]);
    server.failed(1, &[]);
    assert!(
        client.stderr.contains("memory") || server.stderr.contains("memory"),
        "{client:?} {server:?}"
    );
}

#[test]
fn another_version_is_refused() {
    let tools = Tools::new();
    for meet in BOTH {
        for version in ["4.50", "9.99", "zero"] {
            let (tool, mut fake) = meet(&tools, "ib_write_lat");
            let mut message = version.as_bytes().to_vec();
            message.resize(16, 0);
            if !fake.is_client {
                fake.stream.read_exact(&mut [0; 16]).expect("its version");
            }
            fake.send(&message);
            let ended = tool.end();
            ended.failed(1, &["version"]);
        }
    }
}

#[test]
fn garbage_is_no_peer() {
    let tools = Tools::new();
    let garbage: [&[u8]; 3] = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", &[0xff; 300], &[0; 300]];
    for meet in BOTH {
        for bytes in garbage {
            let (tool, mut fake) = meet(&tools, "ib_send_bw");
            fake.send(bytes);
            tool.end().failed(1, &["127.0.0.1"]);
        }
    }
}

#[test]
fn garbage_at_any_message_is_refused() {
    let tools = Tools::new();
    for meet in BOTH {
        for (index, len) in MESSAGES.into_iter().enumerate() {
            let (tool, mut fake) = meet(&tools, "ib_write_lat");
            fake.exchange(index);
            if !fake.is_client {
                fake.stream.read_exact(&mut vec![0; len]).expect("its message");
            }
            fake.send(&vec![b'z'; len]);
            tool.end().failed(1, &["127.0.0.1"]);
        }
    }
}

#[test]
fn a_peer_that_closes_at_any_message_is_lost() {
    let tools = Tools::new();
    for (meet, first) in BOTH_FROM {
        for count in first..=MESSAGES.len() {
            let (tool, mut fake) = meet(&tools, "ib_write_lat");
            fake.exchange(count);
            fake.close();
            tool.end().failed(1, &["127.0.0.1"]);
        }
    }
}

#[test]
fn a_peer_that_stops_sending_times_out() {
    let tools = Tools::new();
    let silent: Vec<_> = BOTH_FROM
        .into_iter()
        .flat_map(|(meet, first)| {
            let tools = &tools;
            (first..=MESSAGES.len()).map(move |count| {
                let (tool, mut fake) = meet(tools, "ib_write_lat");
                fake.exchange(count);
                (tool, fake)
            })
        })
        .collect();
    for (tool, _fake) in silent {
        tool.end().failed(1, &["127.0.0.1"]);
    }
}

#[test]
fn a_second_client_does_not_affect_the_first() {
    let tools = Tools::new();
    let (server, port) = tools.serve("ib_write_lat -n 50");
    let mut first = FakePeer::connect(port);
    first.exchange(1);
    // The server has its client: later ones are refused.
    let second = tools.start(&format!("ib_write_lat -n 50 -p {port} 127.0.0.1")).end();
    second.failed(1, &["127.0.0.1"]);
    for index in 1..5 {
        first.exchange_one(index, &FakePeer::message(index));
    }
    first.close();
    server.end().failed(1, &["127.0.0.1"]);
}

#[test]
fn ctrl_c_ends_either_end() {
    let tools = Tools::new();
    // A waiting server.
    let (server, _) = tools.serve("ib_read_bw");
    server.signal(Signal::SIGINT);
    assert_eq!(server.end().status, Some(130));
    for tool in TOOLS {
        for of_client in [true, false] {
            let (server, port) = tools.serve(&format!("{tool} -D 30 -f 0"));
            let mut client = tools.start(&format!("{tool} -D 30 -f 0 -p {port} 127.0.0.1"));
            client.read_until("#bytes");
            thread::sleep(Duration::from_millis(300));
            let (stopped, left) = if of_client { (client, server) } else { (server, client) };
            stopped.signal(Signal::SIGINT);
            let (stopped, left) = (stopped.end(), left.end());
            assert_eq!(stopped.status, Some(130), "{stopped:?}");
            left.failed(1, &["127.0.0.1"]);
            if of_client {
                // What was measured until then.
                assert_eq!(stopped.rows().len(), 1, "{stopped:?}");
            }
        }
    }
}

#[test]
fn a_killed_peer_is_lost() {
    let tools = Tools::new();
    for tool in TOOLS {
        for of_client in [true, false] {
            let (server, port) = tools.serve(&format!("{tool} -D 30"));
            let mut client = tools.start(&format!("{tool} -D 30 -p {port} 127.0.0.1"));
            client.read_until("#bytes");
            let (killed, left) = if of_client { (client, server) } else { (server, client) };
            killed.signal(Signal::SIGKILL);
            left.end().failed(1, &["127.0.0.1"]);
        }
    }
}

#[test]
fn a_report_file_that_cannot_be_created_is_refused_before_the_test() {
    let tools = Tools::new();
    let began = Instant::now();
    for host in ["", "127.0.0.1"] {
        let line = format!("ib_read_bw -D 30 --out_json_file=/nonexistent/x.json {host}");
        let ended = tools.start(&line).end();
        ended.failed(1, &["cannot write /nonexistent/x.json"]);
        assert_eq!(ended.stdout, "");
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn unknown_options_are_named() {
    let tools = Tools::new();
    for (line, says) in [
        ("ib_write_lat --no_such_option", "no_such_option"),
        ("ib_write_lat -Z", "Z"),
        ("ib_write_bw -n 2", "2"),
        ("ib_atomic_lat -a", "a"),
    ] {
        tools.start(line).end().failed(2, &[says]);
    }
}

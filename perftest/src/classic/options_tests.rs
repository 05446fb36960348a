//! Command lines and their settings: the defaults of each tool, and what is refused.

use std::time::Duration;

use super::flags::{FLAGS, Support};
use super::getopt::{self, GivenOption, ParsedArgs};
use super::options::{self, Request};
use super::settings::{Exchange, Settings, SingleMetric, TestLength, Transport};
use super::tool::{Kind, Tool, Verb};
use crate::cli::AtomicOperation;

fn interpret(line: &str) -> Result<Request, String> {
    let mut words = line.split_whitespace().map(str::to_owned);
    let tool = Tool::from_program_name(words.next().unwrap().as_ref()).unwrap();
    getopt::parse(tool, words)
        .and_then(|line| options::interpret(tool, line))
        .map_err(|e| {
            assert_eq!(e.status(), 2, "{line}");
            e.to_string()
        })
}

fn settings(line: &str) -> Settings {
    match interpret(line) {
        Ok(Request::Test(settings)) => *settings,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn defaults_are_the_c_tools() {
    for tool in Tool::ALL {
        let settings = settings(tool.name());
        let bw = tool.kind == Kind::Bw;
        let size = match tool.verb {
            Verb::Atomic => 8,
            _ if bw => 65_536,
            _ => 2,
        };
        assert_eq!(settings.sizes, [size], "{tool:?}");
        let count = if bw && tool.verb == Verb::Write { 5000 } else { 1000 };
        assert_eq!(settings.length, TestLength::Iterations(count), "{tool:?}");
        assert_eq!(settings.tx_depth, if bw { 128 } else { 1 }, "{tool:?}");
        assert_eq!(settings.rx_depth, 512, "{tool:?}");
        // Atomics are small, so they are moderated.
        let cq_mod = if bw && tool.verb == Verb::Atomic { 100 } else { 1 };
        assert_eq!(settings.cq_mod, cq_mod, "{tool:?}");
        assert_eq!(
            (settings.port, settings.timeout, settings.qps, settings.retry),
            (18_515, 14, 1, 7)
        );
        assert_eq!(
            (settings.hop_limit, settings.transport, settings.exchange),
            (64, Transport::Rc, Exchange::Tcp)
        );
        assert!(settings.is_server() && settings.receives() && !settings.is_timed());
        assert_eq!(settings.relaxed_ordering, bw || tool.verb != Verb::Write, "{tool:?}");
    }
}

/// What the C tools print in their header for these command lines: TX depth, RX depth, CQ
/// moderation.
#[test]
fn depths_follow_from_each_other_as_in_the_c_tools() {
    for (line, tx, rx, cq_mod) in [
        ("ib_write_bw -n 100 -t 200 -s 64", 100, 100, 100),
        ("ib_write_bw -n 200 -s 8192", 128, 200, 100),
        ("ib_write_bw -n 200 -s 8193", 128, 200, 1),
        ("ib_write_bw -n 200 -Q 10", 128, 200, 10),
        ("ib_write_bw -n 1000 -b -s 64 -Q 50 -t 20", 20, 512, 20),
        ("ib_write_bw -a -n 100", 100, 100, 100),
        ("ib_write_bw -D 2 -f 0", 128, 512, 1),
        ("ib_write_bw -n 64 -l 16 -s 64", 64, 64, 16),
        ("ib_read_bw -e", 128, 512, 100),
        ("ib_send_bw -n 500 -r 16 -t 64 -s 64", 64, 16, 64),
        ("ib_send_bw -n 500 --use-srq -q 4 -s 64", 128, 500, 100),
        ("ib_send_bw -n 5000 -c UD -s 64", 128, 5000, 100),
        ("ib_send_bw -n 2000 -c UD -s 64 -r 100", 128, 100, 100),
        ("ib_send_bw -D 1 -f 0 -s 64 -r 1000", 128, 1000, 100),
        ("ib_send_bw -n 600 -l 10 -c UD -s 64", 128, 600, 10),
        ("ib_send_bw -n 400 -l 200 -s 64", 200, 400, 200),
    ] {
        let settings = settings(line);
        assert_eq!(
            (settings.tx_depth, settings.rx_depth, settings.cq_mod),
            (tx, rx, cq_mod),
            "{line}"
        );
    }
}

#[test]
fn each_option_sets_its_field() {
    let s = settings(
        "ib_send_bw -d mlx5_0 -i 2 -p 7 -x 3 -s 4K -n 96 -b -q 4 -t 32 -r 64 -l 8 --recv_post_list 4 -Q 8 -I 60 -c UC -m 1024 -u 10 -S 3 -L 9 -N -F -w 2.5 -y 1 host",
    );
    assert_eq!(
        (
            s.device.as_deref(),
            s.device_port,
            s.port,
            s.gid_index,
            s.host.as_deref()
        ),
        (Some("mlx5_0"), 2, 7, Some(3), Some("host"))
    );
    assert_eq!(
        (s.sizes, s.length, s.bidirectional, s.qps),
        (vec![4096], TestLength::Iterations(96), true, 4)
    );
    assert_eq!(
        (s.tx_depth, s.rx_depth, s.post_list, s.recv_post_list, s.cq_mod),
        (32, 64, 8, 4, 8)
    );
    assert_eq!(
        (s.inline, s.transport, s.mtu, s.timeout, s.service_level, s.hop_limit),
        (Some(60), Transport::Uc, Some(1024), 10, 3, 9)
    );
    assert!(s.output.no_peak && s.no_frequency_warning);
    assert_eq!((s.least_bandwidth, s.least_rate), (Some(2.5), Some(1.0)));

    let s = settings(
        "ib_write_bw -D 9 -f 2 --cpu_util --report_gbits --ipv6 --tclass 96 --pkey_index 1 --retry_count 3 --wait_destroy 2 --perform_warm_up --mr_per_qp --use_hugepages --disable_pcie_relaxed --source_ip ::1",
    );
    let nine = TestLength::Duration {
        duration: Duration::from_secs(9),
        margin: Duration::from_secs(2),
    };
    assert_eq!(
        (s.length, s.exchange, s.traffic_class, s.pkey_index, s.retry),
        (nine, Exchange::Tcp, 96, 1, 3)
    );
    assert!(
        s.output.cpu && s.output.gbits && s.ipv6 && s.warm_up && s.region_per_qp && s.huge_pages && !s.relaxed_ordering
    );
    assert_eq!(
        (s.wait_destroy, s.source),
        (Duration::from_secs(2), Some("::1".parse().unwrap()))
    );

    let s = settings("ib_send_lat -U -C --latency_gap 5 -e -X 2 --out_json");
    assert!(s.output.histogram && s.output.unsorted && s.output.cycles && s.events);
    assert_eq!((s.gap, s.vector), (Some(Duration::from_micros(5)), 2));
    assert_eq!(s.output.json, Some("perftest_out.json".into()));

    let s = settings("ib_atomic_bw -A CMP_AND_SWAP -o 4 --output message_rate --out_json_file=x.json");
    assert_eq!(
        (s.atomic, s.outstanding, s.output.only),
        (AtomicOperation::CompareSwap, Some(4), Some(SingleMetric::MessageRate))
    );
    assert_eq!(s.output.json, Some("x.json".into()));

    let s = settings("ib_write_bw --run_infinitely --reversed h");
    assert!(s.forever && s.is_timed() && s.reversed && s.receives() && !s.is_server());
    assert_eq!(settings("ib_write_bw --force-link=Ethernet").infiniband, Some(false));
    assert!(settings("ib_write_bw -b --report-both").output.both);
    assert!(settings("ib_send_bw --use-srq").shared_receive);
}

#[test]
fn rates_have_units() {
    for (units, value, per_message) in [
        ("", 125e6, false),
        ("--rate_units g", 125e6, false),
        ("--rate_units M", 1_048_576.0, false),
        ("--rate_units p", 1.0, true),
    ] {
        let rate = settings(&format!("ib_write_bw --rate_limit 1 {units} --rate_limit_type SW"))
            .rate
            .unwrap();
        assert_eq!(
            (rate.value, rate.per_message, rate.burst),
            (value, per_message, 128),
            "{units}"
        );
    }
    assert_eq!(
        settings("ib_write_bw --rate_limit 1 --burst_size 4")
            .rate
            .unwrap()
            .burst,
        4
    );
}

#[test]
fn sizes_are_powers_of_two_with_all() {
    let sizes = settings("ib_read_lat -a").sizes;
    assert_eq!((sizes.len(), sizes[0], sizes[22]), (23, 2, 8 << 20));
}

#[test]
fn the_default_margin_is_a_quarter() {
    for (line, margin) in [("-D 3", 0), ("-D 5", 1), ("-D 20", 5), ("-D 20 -f 2", 2)] {
        let TestLength::Duration { margin: is, .. } = settings(&format!("ib_write_bw {line}")).length else {
            panic!("{line}")
        };
        assert_eq!(is, Duration::from_secs(margin), "{line}");
    }
}

#[test]
fn invalid_values_are_refused_with_advice() {
    for (line, says) in [
        ("ib_write_bw -n 4", "-n 4 (messages on each queue pair"),
        ("ib_write_bw -n 1k", "a whole number from 5 to 100000000"),
        ("ib_write_bw -s 0", "bytes from 1 to 2147483647"),
        ("ib_write_bw -s 2G", "bytes from 1"),
        ("ib_write_bw -s 64x", "-s 64x"),
        ("ib_write_bw -t 15001", "from 1 to 15000"),
        ("ib_write_bw -q 0", "from 1 to 16384"),
        ("ib_write_bw -l 0", "from 1 to"),
        ("ib_write_bw -l 7", "-l 7 does not divide -n 5000: make that 5005"),
        ("ib_send_bw --recv_post_list 7", "does not divide -n 1000"),
        ("ib_write_bw -l 16 -t 10 -n 160", "-l 16 is more than -t 10 holds"),
        (
            "ib_send_bw --recv_post_list 300 -r 100 -n 600",
            "more than -r 100 holds",
        ),
        ("ib_write_bw -l 16 -Q 3 -n 1600", "-Q 3 does not divide -l 16"),
        ("ib_write_bw -Q 1025", "from 1 to 1024"),
        ("ib_write_bw -I 913", "from 0 to 912"),
        ("ib_write_bw -c UD", "datagrams are for SENDs"),
        ("ib_read_bw -c UC", "neither READs nor atomics"),
        ("ib_atomic_lat -c UC", "neither READs nor atomics"),
        ("ib_write_bw -c DC", "one vendor's library"),
        ("ib_send_bw -c XRC", "-c XRC is not supported"),
        ("ib_write_bw -c rc", "RC, UC or UD"),
        ("ib_write_bw -m 1000", "256, 512, 1024, 2048 or 4096"),
        ("ib_write_bw -u 32", "from 0 to 31"),
        ("ib_write_bw -S 16", "from 0 to 15"),
        ("ib_write_bw -i 0", "from 1 to 255"),
        ("ib_write_bw -p 70000", "from 1 to 65535"),
        ("ib_write_bw -D 0", "-D 0"),
        ("ib_write_bw -D 4 -f 2", "leaves nothing of -D 4"),
        ("ib_write_bw -D 2 -a", "-a goes with -n"),
        ("ib_read_bw -D 2 -e", "-e goes with -n"),
        ("ib_read_lat -D 2 -H", "keeps none"),
        ("ib_write_bw --cpu_util", "goes with -D"),
        ("ib_write_bw --report-both", "goes with -b"),
        ("ib_write_bw --reversed -b", "sends both ways"),
        ("ib_write_bw --output=latency", "bandwidth or message_rate"),
        ("ib_write_lat --output=bandwidth", "give latency"),
        ("ib_write_lat --output=latency -H", "leave one out"),
        ("ib_write_bw -R -T 3", "default type of service"),
        ("ib_write_bw -R -z", "two ways to connect"),
        ("ib_send_bw -R -c UC", "no UC"),
        ("ib_send_bw -g -R", "does not go with -R"),
        ("ib_send_bw -g -b", "does not go with -b"),
        ("ib_send_bw -g -q 2", "one queue pair"),
        ("ib_send_lat -M 255:1:0:0:0:2:201:133:0:0:0:0:0:0:0:0", "goes with -g"),
        ("ib_send_lat -g -M 239.1.2.3", "sixteen bytes"),
        ("ib_read_bw -X 1", "-X goes with -e"),
        ("ib_write_bw --rate_limit -1", "at least 0"),
        ("ib_write_bw --rate_limit 0", "more than 0"),
        ("ib_write_bw --rate_limit 1 --rate_limit_type HW", "give SW"),
        ("ib_write_bw --rate_limit 1 --rate_units k", "M (MiB/s)"),
        ("ib_write_bw --burst_size 4", "goes with --rate_limit"),
        ("ib_atomic_bw --rate_limit 1", "does not go with atomics"),
        ("ib_send_bw -b --rate_limit 1", "nor with -b"),
        ("ib_send_bw --run_infinitely -b", "does not go with -b"),
        (
            "ib_write_bw --run_infinitely --rate_limit 1",
            "does not go with --rate_limit",
        ),
        ("ib_send_bw --use-srq -q 4 -r 3", "at least as many receives: -r 4"),
        ("ib_atomic_bw -A ADD", "FETCH_AND_ADD or CMP_AND_SWAP"),
        ("ib_write_bw -w nan", "a number of at least 0"),
        ("ib_write_bw --source_ip x", "an IP address"),
        ("ib_write_bw --force-link=x", "IB or Ethernet"),
        ("ib_write_bw a b", "'b' is one operand too many"),
    ] {
        let error = interpret(line).expect_err(line);
        assert!(error.contains(says) && !error.contains('\n'), "{line}: {error}");
    }
}

#[test]
fn help_and_version_win() {
    assert!(matches!(interpret("ib_write_bw -s 0 --help"), Ok(Request::Help)));
    assert!(matches!(interpret("ib_write_bw a b -V"), Ok(Request::Version)));
}

/// An option that is accepted but read nowhere would silently do nothing.
#[test]
fn every_supported_option_is_read() {
    for flag in FLAGS.iter().filter(|flag| !matches!(flag.support, Support::Refused(_))) {
        let tool = Tool::ALL.into_iter().find(|tool| flag.tools.has(*tool)).unwrap();
        let given = |value: &str| ParsedArgs {
            options: vec![GivenOption {
                flag,
                value: value.to_owned(),
            }],
            operands: Vec::new(),
        };
        // No option accepts this value. One without a value changes some setting, or is one of
        // those that need not.
        let outcome = options::interpret(tool, given("\u{1}"));
        let known = ["use_old_post_send", "help", "version", "CPU-freq", "com_rdma_cm"].contains(&flag.long);
        match (flag.value, outcome) {
            (Some(_), Ok(_)) => assert!(
                ["ib-dev", "out_json_file", "use_cuda_bus_id"].contains(&flag.long),
                "{}",
                flag.long
            ),
            (None, Ok(Request::Test(settings))) => {
                let Ok(Request::Test(default)) = options::interpret(tool, ParsedArgs::default()) else {
                    panic!("{tool:?}")
                };
                assert!(known || settings != default, "{} does nothing", flag.long);
            }
            (_, Err(_)) | (None, Ok(_)) => {}
        }
    }
}

//! The layout against the C tools': each expected text is theirs, from a run on the userspace
//! device, and the values are those in it.

use super::getopt;
use super::layout::{self, Address, Header, Latencies, RULE, Rates, Side};
use super::options::{self, Request};
use super::settings::{Exchange, Settings};
use super::tool::Tool;

fn settings(line: &str) -> Settings {
    let mut words = line.split_whitespace().map(str::to_owned);
    let tool = Tool::from_program_name(words.next().unwrap().as_ref()).unwrap();
    match options::interpret(tool, getopt::parse(tool, words).unwrap()).unwrap() {
        Request::Test(settings) => *settings,
        other => panic!("{line}: {other:?}"),
    }
}

fn soft() -> Header {
    Header {
        device: "soft0".into(),
        infiniband: false,
        mtu: 4096,
        gid_index: Some(0),
        inline_bytes: 0,
        outstanding: 128,
        relaxed_ordering: true,
        new_post: false,
    }
}

fn header(line: &str) -> String {
    layout::header(&settings(line), &soft())
}

fn with_exchange(line: &str, exchange: Exchange, type_of_service: Option<u8>) -> Settings {
    Settings {
        exchange,
        type_of_service,
        ..settings(line)
    }
}

/// The header of a client of `ib_write_bw`, with some lines replaced.
fn like_write_bw(changes: &[(&str, &str)]) -> String {
    let mut text = format!(
        "{RULE}\n                    RDMA_Write BW Test\n Dual-port       : OFF\t\tDevice         : soft0\n Number of qps   : 1\t\tTransport type : IB\n \
         Connection type : RC\t\tUsing SRQ      : OFF\n PCIe relax order: ON\n ibv_wr* API     : OFF\n TX depth        : 128\n CQ Moderation   : 1\n \
         Mtu             : 4096[B]\n Link type       : Ethernet\n GID index       : 0\n Max inline data : 0[B]\n rdma_cm QPs\t : OFF\n Data ex. method : Ethernet\n{RULE}"
    );
    for (from, to) in changes {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    text
}

#[test]
fn headers_of_clients() {
    assert_eq!(header("ib_write_bw h"), like_write_bw(&[]));
    assert_eq!(
        header("ib_send_bw h -b -l 16 -s 64 -n 96"),
        like_write_bw(&[
            ("RDMA_Write BW", "Send Bidirectional Post List BW"),
            ("128\n", "96\n Post List       : 16\n RX depth        : 96\n"),
            ("CQ Moderation   : 1", "CQ Moderation   : 16"),
        ])
    );
    assert_eq!(
        header("ib_send_bw h -l 16 -s 64 -n 1600 --recv_post_list 8"),
        like_write_bw(&[
            ("RDMA_Write BW", "Send Post List BW"),
            ("128\n", "128\n Post List       : 16\n Recv Post List  : 8\n"),
            ("CQ Moderation   : 1", "CQ Moderation   : 16"),
        ])
    );
    assert_eq!(
        header("ib_read_bw h -e"),
        like_write_bw(&[
            (
                "RDMA_Write BW Test\n",
                "RDMA_Read BW Test\n Test with events. Using soft0_comp0\n"
            ),
            ("CQ Moderation   : 1", "CQ Moderation   : 100"),
            ("Max inline data : 0[B]", "Outstand reads  : 128"),
        ])
    );
    assert_eq!(
        header("ib_send_lat h -g"),
        like_write_bw(&[
            (
                "RDMA_Write BW Test\n",
                "Send Latency Multicast Test\n MultiCast runs on UD!\n"
            ),
            ("type : RC", "type : UD"),
            ("128\n CQ Moderation   : 1\n", "1\n"),
        ])
    );
    assert_eq!(
        header("ib_atomic_lat h -A CMP_AND_SWAP"),
        like_write_bw(&[
            ("RDMA_Write BW", "Atomic CMP_AND_SWAP Latency"),
            ("128\n CQ Moderation   : 1\n", "1\n"),
            ("Max inline data : 0[B]", "Outstand reads  : 128"),
        ])
    );
    assert_eq!(
        layout::header(
            &with_exchange("ib_write_bw h -n 100 -q 2", Exchange::RdmaCm, Some(32)),
            &soft()
        ),
        like_write_bw(&[
            ("qps   : 1", "qps   : 2"),
            ("128\n", "100\n"),
            (
                "rdma_cm QPs\t : OFF\n Data ex. method : Ethernet",
                "rdma_cm QPs\t : ON\n Data ex. method : rdma_cm \tTOS    : 32"
            ),
        ])
    );
    assert_eq!(
        layout::header(&with_exchange("ib_write_bw h", Exchange::OverRdmaCm, None), &soft()),
        like_write_bw(&[("method : Ethernet", "method : rdma_cm")])
    );
}

#[test]
fn headers_of_servers() {
    assert_eq!(
        header("ib_write_bw"),
        like_write_bw(&[(" TX depth        : 128\n", "")])
    );
    assert_eq!(
        header("ib_send_bw --use-srq -q 2"),
        like_write_bw(&[
            ("RDMA_Write", "Send"),
            ("qps   : 1", "qps   : 2"),
            ("SRQ      : OFF", "SRQ      : ON"),
            ("TX depth        : 128", "RX depth        : 512"),
        ])
    );
    assert_eq!(
        header("ib_send_bw -c UD -n 5000 -s 64"),
        like_write_bw(&[
            ("RDMA_Write", "Send"),
            ("type : RC", "type : UD"),
            ("TX depth        : 128", "RX depth        : 5000"),
            ("CQ Moderation   : 1", "CQ Moderation   : 100"),
        ])
    );
    assert_eq!(header("ib_write_bw --reversed"), like_write_bw(&[]));
    assert_eq!(
        layout::waiting(),
        "\n************************************\n* Waiting for client to connect... *\n************************************"
    );
}

#[test]
fn addresses() {
    let mut address = Address {
        lid: 0,
        qpn: 0x8_927d,
        psn: 0x78_ca19,
        outstanding: 0x80,
        rkey: 0xd6ed,
        vaddr: 0x5558_fd5e_9c00,
        gid: None,
    };
    let line = |tool: &str, address: &Address| layout::address(&settings(tool), Side::Remote, address);
    assert_eq!(
        line("ib_write_bw", &address),
        " remote address: LID 0000 QPN 0x8927d PSN 0x78ca19 RKey 0x00d6ed VAddr 0x005558fd5e9c00"
    );
    assert_eq!(
        line(
            "ib_read_bw",
            &Address {
                outstanding: 4,
                ..address
            }
        ),
        " remote address: LID 0000 QPN 0x8927d PSN 0x78ca19 OUT 0x04 RKey 0x00d6ed VAddr 0x005558fd5e9c00"
    );
    assert_eq!(
        line("ib_send_bw", &address),
        " remote address: LID 0000 QPN 0x8927d PSN 0x78ca19"
    );
    assert_eq!(
        layout::address(
            &with_exchange("ib_write_bw", Exchange::RdmaCm, None),
            Side::Remote,
            &address
        ),
        " remote address: LID 0000 QPN 0x8927d PSN 0x78ca19"
    );
    address.lid = 0x11;
    address.gid = Some([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1]);
    assert_eq!(
        line("ib_atomic_bw", &address),
        " remote address: LID 0x11 QPN 0x8927d PSN 0x78ca19\n GID: 00:00:00:00:00:00:00:00:00:00:255:255:127:00:00:01"
    );
}

#[test]
fn lines_of_bandwidth() {
    let mib = f64::from(1 << 20);
    let check = |line: &str, expected: &str, row: Rates, cpu: f64| {
        assert_eq!(layout::rates(&settings(line).output, &row, cpu), expected, "{line}");
    };
    let row = |bytes, iterations, peak: Option<f64>, average: f64, rate: f64, unit: f64| Rates {
        bytes,
        iterations,
        peak_bytes_per_s: peak.map(|peak| peak * unit),
        average_bytes_per_s: average * unit,
        messages_per_s: rate * 1e6,
    };
    check(
        "ib_write_bw",
        " 65536      5000             14321.51            5064.60\t\t   0.081034",
        row(65_536, 5000, Some(14_321.51), 5064.60, 0.081_034, mib),
        0.0,
    );
    check(
        "ib_send_bw",
        " 65536      1000             0.00               549.13 \t\t   0.008786",
        row(65_536, 1000, None, 549.13, 0.008_786, mib),
        0.0,
    );
    check(
        "ib_write_bw --report_gbits",
        " 64         5000             1.22               0.92   \t\t   1.794755",
        row(64, 5000, Some(1.22), 0.92, 1.794_755, 1e9 / 8.0),
        0.0,
    );
    check(
        "ib_write_bw -D 2 --cpu_util",
        " 65536      99185            0.00               3099.44\t\t   0.049591\t    99.29",
        row(65_536, 99_185, None, 3099.44, 0.049_591, mib),
        99.29,
    );
    check(
        "ib_write_bw",
        " 8388608    100              3475.98            3475.98\t\t   0.000434",
        row(8_388_608, 100, Some(3475.98), 3475.98, 0.000_434, mib),
        0.0,
    );
    for (line, column_heads) in [
        (
            "ib_write_bw",
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]",
        ),
        (
            "ib_write_bw --report_gbits",
            " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]",
        ),
        (
            "ib_write_bw -D 2 --cpu_util",
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]    CPU_Util[%]",
        ),
    ] {
        assert_eq!(layout::column_heads(&settings(line)), column_heads);
    }
}

fn latencies(bytes: u64, iterations: u64, [min, max, p50, avg, stddev, p99, p999]: [f64; 7], unit: f64) -> Latencies {
    Latencies {
        bytes,
        iterations,
        min_ns: min * unit,
        max_ns: max * unit,
        p50_ns: p50 * unit,
        avg_ns: avg * unit,
        stddev_ns: stddev * unit,
        p99_ns: p99 * unit,
        p999_ns: p999 * unit,
        trips_per_s: 168_672.5,
    }
}

#[test]
fn lines_of_latency() {
    let line = |line: &str, row: &Latencies| layout::latencies(&settings(line), row, 2.5, 99.0);
    assert_eq!(
        line(
            "ib_write_lat",
            &latencies(2, 1000, [0.91, 6736.22, 1.27, 65.62, 563.21, 4159.71, 6736.22], 1e3)
        ),
        " 2       1000          0.91           6736.22      1.27     \t       65.62       \t563.21 \t\t4159.71 \t\t6736.22"
    );
    assert_eq!(
        line(
            "ib_write_lat",
            &latencies(4096, 20, [1.34, 34.47, 1.87, 3.47, 2.79, 34.47, 34.47], 1e3)
        ),
        " 4096    20          1.34           34.47        1.87     \t       3.47        \t2.79   \t\t34.47   \t\t34.47  "
    );
    // 2.5 cycles per nanosecond.
    assert_eq!(
        line(
            "ib_send_lat -C",
            &latencies(
                2,
                1000,
                [
                    2327.5,
                    16_860_072.0,
                    3846.5,
                    706_583.16,
                    12.0,
                    14_627_906.0,
                    16_860_072.0
                ],
                0.4
            )
        ),
        " 2       1000          2327.50        16860072.00      3846.50  \t       706583.16     \t12.00  \t\t14627906.00 \t\t16860072.00"
    );
    assert_eq!(
        line(
            "ib_read_lat -D 1",
            &latencies(2, 168_884, [1.0, 1.0, 1.0, 5.93, 1.0, 1.0, 1.0], 1e3)
        ),
        " 2             168884            5.93           168672.50"
    );
    assert_eq!(
        line(
            "ib_read_lat -D 1 --cpu_util",
            &Latencies {
                trips_per_s: 77_066.15,
                ..latencies(2, 77_071, [1.0, 1.0, 1.0, 12.98, 1.0, 1.0, 1.0], 1e3)
            }
        ),
        " 2             77071            12.98          77066.15\t    99.00"
    );
    for (line, column_heads) in [
        (
            "ib_read_lat",
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] ",
        ),
        (
            "ib_read_lat -D 1",
            " #bytes        #iterations       t_avg[usec]    tps average",
        ),
        (
            "ib_read_lat -D 1 --cpu_util",
            " #bytes        #iterations       t_avg[usec]    tps average    CPU_Util[%]",
        ),
    ] {
        assert_eq!(layout::column_heads(&settings(line)), column_heads);
    }
}

#[test]
fn samples_are_numbered_sorted_or_as_measured() {
    let samples = [1_945_820.0, 951.777, 1082.02, 1_000_000_000.0, 0.0, 0.012_345_678];
    assert_eq!(
        layout::samples(&settings("ib_send_lat -U").output, &samples, 1.0),
        "#, usec\n1, 1945.82\n2, 0.951777\n3, 1.08202\n4, 1e+06\n5, 0\n6, 1.23457e-05"
    );
    assert_eq!(
        layout::samples(&settings("ib_send_lat -H").output, &samples[..3], 1.0),
        "#, usec\n1, 0.951777\n2, 1.08202\n3, 1945.82"
    );
    assert_eq!(
        layout::samples(&settings("ib_send_lat -H -C").output, &samples[1..3], 2.0),
        "#, cycles\n1, 1904\n2, 2164"
    );
}

#[test]
fn a_single_value() {
    assert_eq!(layout::single_value(4_461.509_635), "4461.509635");
    assert_eq!(layout::single_value(0.042_398), "0.042398");
}

/// The C tool's output of a slowed run: below 0.1 Gb/s there are more decimals, in other columns.
#[test]
fn slow_gigabits_have_more_decimals() {
    let settings = settings("ib_write_bw --report_gbits -s 4096");
    let row = |average: f64| Rates {
        bytes: 4096,
        iterations: 300,
        peak_bytes_per_s: Some(3.780_155e9 / 8.0),
        average_bytes_per_s: average * 1e9 / 8.0,
        messages_per_s: 2830.0,
    };
    assert_eq!(
        layout::rates(&settings.output, &row(0.092_731), 0.0),
        " 4096       300           3.780155            0.092731            0.002830"
    );
    assert_eq!(
        layout::rates(&settings.output, &row(0.13), 0.0),
        " 4096       300              3.78               0.13   \t\t   0.002830"
    );
}

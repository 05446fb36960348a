//! What a client's own output verifies and measures. An output that shows less is an error.

use crate::pyverbs::{self, Suite};
use anyhow::{Context, Result, ensure};

/// What a run has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// The same in every run that passes.
    pub(crate) verified: String,
    /// The client's own measurement, or a dash.
    pub(crate) figure: String,
    /// Of rdma-core's tests, for the tables below the rows.
    pub(crate) suite: Option<Suite>,
}

pub(crate) fn report(verified: impl Into<String>, figure: impl Into<String>) -> Result<Report> {
    let (verified, figure) = (verified.into(), figure.into());
    let suite = None;
    Ok(Report {
        verified,
        figure,
        suite,
    })
}

pub(crate) const NO_FIGURE: &str = "–";

pub(crate) fn pyverbs(_: &str, output: &str) -> Result<Report> {
    let suite = Suite::read(output)?;
    Ok(Report {
        suite: Some(suite.clone()),
        ..report(pyverbs::judged(&suite)?, NO_FIGURE)?
    })
}

/// `fi_pingpong -c`: bytes, sent, acknowledged, total, time, MB/s, µs, rate of each size.
pub(crate) fn fabric(_: &str, client: &str) -> Result<Report> {
    let rows: Vec<Vec<&str>> = client
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.len() == 8 && fields[0].starts_with(|first: char| first.is_ascii_digit()))
        .collect();
    let last = rows.last().context("no line of results")?;
    for row in &rows {
        ensure!(
            row[2].strip_prefix('=') == Some(row[1]),
            "{} of {} acknowledged",
            row[2],
            row[1]
        );
    }
    let figure = format!("{} µs, {} GB/s", number(rows[0][6])?, rounded(number(last[5])? / 1e3));
    report(
        format!("{} sizes × {} round trips, every byte", rows.len(), last[1]),
        figure,
    )
}

/// `-V` checks the bytes, `-v` shows each message.
pub(crate) fn rping(_: &str, client: &str) -> Result<Report> {
    ensure!(!client.contains("data mismatch"), "wrong bytes");
    let messages = client.lines().filter(|line| line.contains("ping data: ")).count();
    ensure!(messages > 0, "no message");
    report(format!("{messages} messages of 4000 bytes, every byte"), NO_FIGURE)
}

pub(crate) fn ucmatose(server: &str, client: &str) -> Result<Report> {
    completed(server, client, "4 × 100 messages of 500 bytes each way")
}

pub(crate) fn udaddy(server: &str, client: &str) -> Result<Report> {
    completed(server, client, "3 × 100 datagrams of 500 bytes each way")
}

fn completed(server: &str, client: &str, verified: &str) -> Result<Report> {
    for output in [server, client] {
        ensure!(
            output.contains("return status 0") && output.contains("data transfers complete"),
            "no line of completion"
        );
    }
    report(verified, NO_FIGURE)
}

/// `qperf -vvs`: `name = value unit`; counts of messages at both ends.
pub(crate) fn qperf(_: &str, client: &str) -> Result<Report> {
    let value = |name: &str| {
        client.lines().find_map(|line| {
            let (found, value) = line.split_once('=')?;
            (found.trim() == name).then(|| value.trim().to_owned())
        })
    };
    let messages = [
        "recv_msgs",
        "loc_recv_msgs",
        "rem_recv_msgs",
        "send_msgs",
        "rem_send_msgs",
    ]
    .iter()
    .find_map(|name| value(name))
    .context("no count of messages")?;
    ensure!(messages != "0", "no message");
    let figure = value("bw")
        .or_else(|| value("latency"))
        .or_else(|| value("msg_rate"))
        .context("no figure")?;
    let figure = figure.replace(" us", " µs").replace("/sec", "/s");
    report("one second, messages counted", figure)
}

/// The server's `issued rwts: total=READS,…`, and its bandwidth with verification.
pub(crate) fn fio(server: &str, client: &str) -> Result<Report> {
    for output in [server, client] {
        ensure!(output.contains("err= 0:"), "no line `err= 0`");
    }
    let blocks = after(server, "issued rwts: total=").and_then(|rest| rest.split(',').next());
    let blocks: u64 = blocks.context("no line of requests")?.parse()?;
    ensure!(blocks > 0, "no block was received");
    let bandwidth = after(server, "READ: bw=").and_then(|rest| rest.split_once('(')?.1.split_once(')'));
    let (bandwidth, _) = bandwidth.context("no line of bandwidth")?;
    report(
        format!("{blocks} blocks of 64 KiB, crc32c"),
        bandwidth.replace("MB/s", " MB/s"),
    )
}

/// The text between two marks.
pub(crate) fn between<'a>(text: &'a str, first: &str, last: &str) -> Option<&'a str> {
    after(text, first)?.split_once(last).map(|(found, _)| found)
}

fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    text.split_once(mark).map(|(_, rest)| rest)
}

/// `ucx_perftest -f`: iterations, µs (median, average, overall), MiB/s and messages/s twice.
fn ucx(output: &str) -> Result<[f64; 8]> {
    let row = output
        .lines()
        .rev()
        .map(|line| line.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>());
    let row = row.flatten().find(|row| row.len() == 8).context("no line of results")?;
    let row = <[f64; 8]>::try_from(row).ok().context("no line of results")?;
    ensure!(
        row[0] > 0.0 && row[1..].iter().any(|&value| value > 0.0),
        "nothing was measured"
    );
    Ok(row)
}

pub(crate) fn ucx_latency(_: &str, client: &str) -> Result<Report> {
    let row = ucx(client)?;
    report(format!("{} iterations", row[0]), format!("{} µs", rounded(row[1])))
}

pub(crate) fn ucx_bandwidth(_: &str, client: &str) -> Result<Report> {
    let row = ucx(client)?;
    let gigabytes = row[5] * f64::from(1 << 20) / 1e9;
    report(format!("{} iterations", row[0]), format!("{} GB/s", rounded(gigabytes)))
}

/// `ucx_perftest`, and `RAIL BYTES` of what the packets of each rail hold: both ends' captures.
pub(crate) fn rails(server: &str, client: &str) -> Result<Report> {
    let Report { verified, figure, .. } = ucx_bandwidth(server, client)?;
    let captured = |rail: &str| {
        let bytes = client.lines().find_map(|line| line.strip_prefix(rail));
        number(bytes.with_context(|| format!("no capture of {rail}"))?.trim())
    };
    let rails = [captured("soft0 ")?, captured("soft1 ")?];
    let total: f64 = rails.iter().sum();
    for bytes in rails {
        ensure!(bytes >= 0.4 * total, "the rails have sent {rails:?} bytes");
    }
    report(format!("{verified}, each rail with 40 % of the bytes or more"), figure)
}

/// UCX's message of a request without answer, and `after SECONDS s` of the end that had it.
pub(crate) fn failed_rail(_: &str, output: &str) -> Result<Report> {
    ensure!(output.contains("transport retry counter exceeded"), "no failed request");
    let rail = after(output, "dgid=").and_then(|rest| rest.split_whitespace().next());
    ensure!(rail == Some("::ffff:127.0.0.2"), "failed to {rail:?}");
    let seconds = after(output, "ended with 134 after ").and_then(|rest| rest.split_whitespace().next());
    let seconds = number(seconds.context("no abort")?)?;
    report("aborts with the failed rail's GID", format!("after {seconds} s"))
}

/// Mooncake's message of IBV_EVENT_PORT_ERR, and that of `transfer.py` at its end.
pub(crate) fn survived_rail(_: &str, client: &str) -> Result<Report> {
    let event = "Context soft1 is now inactive due to fatal event: 10";
    let (before, after) = client.split_once(event).context("the rail has not failed")?;
    for part in [before, after] {
        ensure!(
            part.contains("exchanged"),
            "nothing was exchanged on one side of the failure"
        );
    }
    ensure!(after.contains("every exchange verified"), "the client has not ended");
    report("4 MiB each way before and after, every byte", NO_FIGURE)
}

/// `verified BYTES bytes, … us, … GB/s` of our own programs.
pub(crate) fn ring(_: &str, output: &str) -> Result<Report> {
    let line = output.lines().find_map(|line| line.strip_prefix("verified "));
    let (bytes, figure) = line
        .and_then(|line| line.split_once(" bytes, "))
        .context("no line of verified bytes")?;
    report(format!("{bytes} bytes, every byte"), figure.replace(" us", " µs"))
}

pub(crate) fn number(text: &str) -> Result<f64> {
    text.parse().with_context(|| format!("{text} is no number"))
}

pub(crate) fn rounded(value: f64) -> String {
    format!("{value:.2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(read: fn(&str, &str) -> Result<Report>, server: &str, client: &str) -> [String; 2] {
        let Report { verified, figure, .. } = read(server, client).unwrap();
        [verified, figure]
    }

    #[test]
    fn reports_are_read() {
        let lines = "bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec\n64 100 =100 12k 0.02s 0.5 9.50 0.0\n1m 100 =100 200m 1s 1970.00 5.00 0.0\n";
        assert_eq!(
            shown(fabric, "", lines),
            ["2 sizes × 100 round trips, every byte", "9.5 µs, 1.97 GB/s"]
        );
        let lines = "rc_bw:\n    bw          =     9.11 GB/sec\n    recv_msgs   =  139,050 \n";
        assert_eq!(shown(qperf, "", lines)[1], "9.11 GB/s");
        let server =
            "x: (groupid=0): err= 0: pid=1\n issued rwts: total=64,0,0,0 short\n  READ: bw=7984KiB/s (81.7MB/s), 7\n";
        assert_eq!(
            shown(fio, server, "err= 0:"),
            ["64 blocks of 64 KiB, crc32c", "81.7 MB/s"]
        );
        let line = "+---+\n 2000 0.256 18.087 18.087 0.42 1000.00 55288 55288\n";
        assert_eq!(shown(ucx_latency, "", line), ["2000 iterations", "0.26 µs"]);
        assert_eq!(shown(ucx_bandwidth, "", line)[1], "1.05 GB/s");
        let line = "verified 104873600 bytes, 32.946 us, 0.244 GB/s\n";
        assert_eq!(
            shown(ring, "", line),
            ["104873600 bytes, every byte", "32.946 µs, 0.244 GB/s"]
        );
    }

    /// A client that ends with 0 without having shown a figure does not pass.
    #[test]
    fn an_output_without_a_figure_is_an_error() {
        let all = [
            pyverbs,
            fabric,
            rping,
            ucmatose,
            udaddy,
            qperf,
            fio,
            ucx_latency,
            ucx_bandwidth,
            rails,
            failed_rail,
            survived_rail,
            ring,
        ];
        for read in all {
            assert!(read("", "").is_err());
        }
        let unacknowledged = "64 100 =99 12k 0.02s 0.5 9.50 0.0\n";
        assert!(fabric("", unacknowledged).is_err());
        assert!(rping("", "ping data: x\ndata mismatch!\n").is_err());
        assert!(fio("err= 0: issued rwts: total=0,0,0,0 READ: bw=1 (1MB/s)", "err= 0:").is_err());
        let row = "200 1.0 1.0 1.0 100.0 100.0 100 100\n";
        assert!(rails("", &format!("{row}soft0 600\nsoft1 400\n")).is_ok());
        assert!(rails("", &format!("{row}soft0 700\nsoft1 300\n")).is_err());
        assert!(ucx_latency("", "0 0.0 0.0 0.0 0.0 0.0 0 0\n").is_err());
    }
}

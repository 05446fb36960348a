//! Sixteen clients at once, twenty times: of the client's own servers, or of one that persists.

use super::{Case, QPERF, Ready, Run, pair};
use crate::read::{self, Report};
use anyhow::{Context, Result, ensure};

const CLIENTS: usize = 16;
const RUNS: usize = 20;

/// Messages of a client of rping.
const MESSAGES: usize = 20;

/// What rping's server shows when two of its threads have one id, as that of the latest request is in
/// a variable of all of them: each creates a queue pair on it, or the first has ended and destroyed
/// the id when the second allocates its protection domain.
const RACES: [&str; 2] = ["rdma_create_qp: Invalid argument", "Segmentation fault"];

/// What its shell shows in each run.
const ENDED: &str = "the server has ended";

pub(super) fn cases() -> Vec<Case> {
    let case = |client, package, what: &str, run: Run| {
        let mode = format!("{CLIENTS} at once × {RUNS}, {what}");
        Case::new(client, package, &mode, run.times(RUNS)).full()
    };
    let ucx = |tls, size| {
        let client = format!("ucx_perftest -p $port HOST -t tag_bw -s {size} -n 200 -w 10 -f");
        let clients = each("client", &client, "0");
        let servers = each("server", "ucx_perftest -p $port", "0");
        pair(&servers, Ready::Idle, &clients, measured).with(&[("UCX_TLS", tls)])
    };
    vec![
        case("ucx_perftest", "ucx-utils", "tag_bw, rc_verbs", ucx("rc_v,self", 65536)),
        // Over UD its own acknowledgements take turns with 32 polling processes.
        case("ucx_perftest", "ucx-utils", "tag_bw, ud_verbs", ucx("ud_v,self", 1024)),
        case("qperf", "qperf", QPERF[0], qperf(QPERF[0])),
        case("rping", "rdmacm-utils", "0.1 s apart", rping("0.1", pinged)),
        case("rping", "rdmacm-utils", "unstaggered", rping("0", pinged_or_lost)),
    ]
}

/// A line for each of the ports from `PORT`, `pause` seconds apart; the outputs in turn, each with
/// the exit status at its end. Not in one file at once: writes of buffered output end within lines.
fn each(end: &str, line: &str, pause: &str) -> String {
    format!(
        "processes=; for i in $(seq {CLIENTS}); do port=$((PORT + i - 1)); {line} >{end}$i.log 2>&1 & \
         processes=\"$processes $!\"; sleep {pause}; done; i=0; for process in $processes; do i=$((i + 1)); \
         wait $process; echo \"exit status: $?\" >>{end}$i.log; cat {end}$i.log; done"
    )
}

/// A server of qperf serves one client at a time, so each client has its own.
fn qperf(test: &str) -> Run {
    let clients = each(
        "client",
        &format!("qperf -lp $port -cm1 -t 1 -to 30 -vvs HOST {test}"),
        "0",
    );
    let quit = each("quit", "qperf -lp $port HOST quit", "0");
    let servers = each("server", "qperf -lp $port", "0");
    pair(
        &servers,
        Ready::Idle,
        &format!("{clients}; {{ {quit}; }} >quit.log"),
        counted,
    )
}

/// A client that the server lost would wait a minute for an answer.
fn rping(pause: &str, read: fn(&str, &str) -> Result<Report>) -> Run {
    let options = "-V -v -S 100 -a HOST -p PORT";
    let shown = format!("grep -a '{}' rping.log; echo {ENDED}", RACES[0]);
    let server = format!("rping -s -P {options} >rping.log 2>&1 & echo $! >rping.pid; wait $!; {shown}");
    let client = each("client", &format!("timeout 15 rping -c -C {MESSAGES} {options}"), pause);
    pair(
        &server,
        Ready::Idle,
        &format!("{client}; kill -9 $(cat rping.pid); true"),
        read,
    )
}

/// The output of each client of each run, and its exit status.
fn clients(output: &str) -> Result<Vec<(&str, &str)>> {
    let mut all = Vec::new();
    let mut rest = output;
    while let Some((client, after)) = rest.split_once("exit status: ") {
        let (status, after) = after.split_once('\n').unwrap_or((after, ""));
        all.push((client, status));
        rest = after;
    }
    ensure!(all.len() == CLIENTS * RUNS, "{} clients have ended", all.len());
    Ok(all)
}

/// What every client must show. rping exits with 0 after an error, too.
fn every(output: &str, verified: &str, read: fn(&str) -> Result<()>) -> Result<Report> {
    for (client, status) in clients(output)? {
        ensure!(status == "0", "a client exits with {status}: {client}");
        read(client).with_context(|| format!("of {client}"))?;
    }
    read::report(format!("{CLIENTS} × {RUNS} clients, {verified}"), read::NO_FIGURE)
}

fn measured(_: &str, clients: &str) -> Result<Report> {
    every(clients, "200 messages", |client| {
        read::ucx_bandwidth("", client).map(drop)
    })
}

fn counted(_: &str, clients: &str) -> Result<Report> {
    every(clients, "one second, messages counted", |client| {
        read::qperf("", client).map(drop)
    })
}

fn pinged(_: &str, clients: &str) -> Result<Report> {
    every(clients, "20 messages, every byte", complete)
}

fn complete(client: &str) -> Result<()> {
    let messages = client.matches("ping data: ").count();
    ensure!(
        messages == MESSAGES && !client.contains("mismatch"),
        "{messages} right messages"
    );
    Ok(())
}

/// A client that fails is one that the server lost by its race, in the same run.
fn pinged_or_lost(servers: &str, output: &str) -> Result<Report> {
    ensure!(!output.contains("mismatch"), "wrong bytes");
    let (mut lost, mut races) = (0, 0);
    for (run, server) in clients(output)?.chunks(CLIENTS).zip(servers.split(ENDED)) {
        let failed = run.iter().filter(|(client, _)| complete(client).is_err()).count();
        let shown: usize = RACES.iter().map(|race| server.matches(race).count()).sum();
        ensure!(
            failed == 0 || shown > 0,
            "{failed} clients failed, and the server shows no race"
        );
        (lost, races) = (lost + failed, races + shown);
    }
    let verified =
        format!("{CLIENTS} × {RUNS} clients, {MESSAGES} messages, every byte, unless rping's server lost them");
    read::report(verified, format!("{lost} lost by {races} races"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(client: &str, count: usize, status: u32) -> String {
        format!("{client}exit status: {status}\n").repeat(count)
    }

    #[test]
    fn each_client_of_each_run_counts() {
        let right = "ping data: x\n".repeat(MESSAGES);
        let all = CLIENTS * RUNS;
        assert!(pinged("", &outputs(&right, all, 0)).is_ok());
        assert!(pinged("", &outputs(&right, all - 1, 0)).is_err());
        assert!(pinged("", &(outputs(&right, all - 1, 0) + &outputs(&right, 1, 1))).is_err());
        let short = outputs(&right, all - 1, 0) + &outputs("ping data: x\n", 1, 0);
        assert!(pinged("", &short).is_err());
        let servers = |race: usize| -> String {
            let shown = |run| if run == race { RACES[run % 2] } else { "" };
            (1..=RUNS).map(|run| format!("{}\n{ENDED}\n", shown(run))).collect()
        };
        assert_eq!(
            pinged_or_lost(&servers(RUNS), &short).unwrap().figure,
            "1 lost by 1 races"
        );
        assert!(pinged_or_lost(&servers(1), &short).is_err(), "another run's");
    }
}

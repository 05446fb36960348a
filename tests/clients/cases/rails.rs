//! UCX on two devices: it splits each large message between them. What it does when one fails.

use super::{Case, Ready, Run, alone, pair, ucx_options};
use crate::read;

const SIZE: usize = 1_000_000;
const UCX: [(&str, &str); 3] = [
    ("UCX_TLS", "rc_v,self"),
    ("UCX_NET_DEVICES", "soft0:1,soft1:1"),
    ("UCX_MAX_RNDV_RAILS", "2"),
];

pub(super) fn all() -> Vec<Case> {
    let case = |mode, run: Run| Case::new("ucx_perftest", "ucx-utils", mode, run.with(&UCX)).full();
    vec![
        case("tag_bw, two rails", two()),
        case("tag_bw, two rails, one down for 0.5 s", outage()),
        case("tag_bw, two rails, one fails", failure()),
    ]
}

fn two() -> Run {
    let client = format!(
        "ucx_perftest -p PORT HOST {} && for rail in soft0 soft1; do echo $rail $(cat rail-$rail*.pcap | wc -c); done",
        ucx_options("tag_bw", SIZE, 200)
    );
    let run = pair("ucx_perftest -p PORT", Ready::Listening, &client, read::rails);
    run.on_rails(&["--rails", "2"]).with(&[("DOORBELL_PCAP", "rail.pcap")])
}

/// Both ends of one command: the port is down for both at once. `$server` is the server's process.
fn both(client: &str) -> String {
    format!(
        "timeout 45 ucx_perftest -p PORT > reader.log 2>&1 & server=$!; \
         until grep -q :$(printf %04X PORT) /proc/net/tcp*; do \
         kill -0 $server || {{ cat reader.log; exit 1; }}; sleep 0.1; done; {client}"
    )
}

/// Half of the bytes at 400 Mb/s are 2 s: they are under way during the outage.
fn outage() -> Run {
    let client = format!(
        "ucx_perftest -p PORT HOST {} && wait $server",
        ucx_options("tag_bw", SIZE, 200)
    );
    let faults = &["--rails", "2", "--slow", "soft1=400Mb", "--down", "soft1@1s+500ms"];
    alone(&both(&client), read::ucx_bandwidth).on_rails(faults)
}

/// The server reads what the client announces, so its requests run out of retries. The client has
/// none outstanding, and waits.
fn failure() -> Run {
    let client = format!(
        "ucx_perftest -p PORT HOST {} > sender.log 2>&1 & client=$!; \
         wait $server; echo ended with $? after $(($(date +%s) - started)) s; \
         kill -0 $client && kill $client && cat reader.log",
        ucx_options("tag_bw", SIZE, 1_000_000_000)
    );
    let line = format!("started=$(date +%s); {}", both(&client));
    alone(&line, read::failed_rail).on_rails(&["--rails", "2", "--down", "soft1@2s"])
}

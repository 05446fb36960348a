//! What processes do in an environment: the columns of the table.

use anyhow::{Context, Result, ensure};

use crate::rig::{Rig, Variables};

type Operation = (&'static str, fn(&mut Rig) -> Result<String>);

pub(crate) const ALL: [Operation; 5] = [
    ("join", join),
    ("same-host traffic", traffic),
    ("connection manager", manager),
    ("bootstrap", bootstrap),
    ("perftest", perftest),
];

/// The cells of what works without restriction.
pub(crate) const FULL: [&str; 3] = ["same address", "shared memory", "works"];

/// A process opens the default device, twice, while another has it open: that of `doorbell run`,
/// and the drop-in library's.
fn join(rig: &mut Rig) -> Result<String> {
    let server = rig.server("doorbell bw write --server --port PORT")?;
    let output = rig.client(&server, "doorbell run -- doorbell devices", &[])?;
    let mut devices = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let device = devices
        .find(|words| words.get(1) == Some(&"hardware"))
        .context("no device")?;
    ensure!(device.last() == Some(&"active"), "{output}");
    Ok(match device[device.len() - 2] {
        "127.0.0.1" => "same address".to_owned(),
        other => other.to_owned(),
    })
}

/// Every byte of every message is checked.
fn traffic(rig: &mut Rig) -> Result<String> {
    let mut server = rig.server("doorbell bw write --server --port PORT")?;
    let line = "doorbell bw write 127.0.0.1 --port PORT -n 20 --verify --json";
    let output = rig.client(&server, line, &[])?;
    rig.end(&mut server)?;
    link(&output)
}

/// A connection through the drop-in library, on which both ends check what they get.
fn manager(rig: &mut Rig) -> Result<String> {
    let mut server = rig.server("doorbell run -- cm serve 127.0.0.1:PORT")?;
    let output = rig.client(&server, "doorbell run -- cm connect 127.0.0.1:PORT", &[])?;
    rig.end(&mut server)?;
    ensure!(output.contains("data both ways"), "{output}");
    Ok("works".to_owned())
}

/// Two ranks, as torchrun starts them; each checks its result.
fn bootstrap(rig: &mut Rig) -> Result<String> {
    const LINE: &str = "doorbell coll allreduce -b 64K -e 64K -n 10 --check 10 --json";
    let port = rig.port.to_string();
    let group: Variables = &[
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
        ("DOORBELL_SECRET", "0123456789abcdef"),
        ("DOORBELL_CALIBRATE", "no"),
    ];
    let rank = |rank| [group, &[("RANK", rank), ("LOCAL_RANK", rank)]].concat();
    let mut first = rig.first_rank(LINE, &rank("0"))?;
    rig.client(&first, LINE, &rank("1"))?;
    let output = rig.end(&mut first)?;
    link(&output)
}

/// A classic tool, whose client polls for the last byte that the server writes.
fn perftest(rig: &mut Rig) -> Result<String> {
    let mut server = rig.server("ib_write_lat -F -n 20 -p PORT")?;
    rig.client(&server, "ib_write_lat -F -n 20 -p PORT 127.0.0.1", &[])?;
    rig.end(&mut server)?;
    Ok("works".to_owned())
}

/// The link of a result.
fn link(json: &str) -> Result<String> {
    let link = json
        .split_once(r#""link":""#)
        .and_then(|(_, rest)| rest.split_once('"'));
    Ok(match link.context("no link in the result")?.0 {
        "soft-local" => "shared memory",
        "soft-udp" => "UDP",
        other => other,
    }
    .to_owned())
}

//! Failures by a user: interrupts, a killed end, wrong calls.

use crate::{
    cases::{SINGLES, Single},
    rig::{Outcome, Rig},
    table::Line,
};
use anyhow::Result;
use doorbell_tests::{process::Process, retry::RetryBudget, scratch::indented};
use std::time::{Duration, Instant};

/// Time limit: an end that has lost its peer fails after its retries.
const LIMIT: Duration = Duration::from_secs(120);

/// An action on programs, and its required outcome.
struct Trouble {
    what: &'static str,
    about: &'static str,
    /// Performs it; returns how the outcome differs.
    perform: fn(&Rig) -> Result<Option<String>>,
}

const TROUBLES: &[Trouble] = &[
    Trouble {
        what: "`ibv_asyncwatch`, and Ctrl-C",
        about: "waits for events, and exits on Ctrl-C",
        perform: watch,
    },
    Trouble {
        what: "`ibv_rc_pingpong`: Ctrl-C for the server in the middle",
        about: "the client's retries run out: `transport retry counter exceeded`",
        perform: server_interrupted,
    },
    Trouble {
        what: "`ib_write_bw`: the client killed (SIGKILL) in the middle",
        about: "the server ends with an error",
        perform: client_killed,
    },
    Trouble {
        what: "`ib_read_bw`: the server killed (SIGKILL) in the middle",
        about: "the client ends with an error",
        perform: server_killed,
    },
    Trouble {
        what: "`ib_write_bw` with no server",
        about: "the client says that it cannot connect",
        perform: no_server,
    },
];

/// All rows that are not pairs of equal options.
pub(crate) fn all(rig: &Rig, retries: &mut RetryBudget) -> Result<(Vec<Line>, Vec<Line>)> {
    let mut singles = Vec::new();
    for single in SINGLES {
        let what = format!("`{}`", single.command);
        singles.push(Line::tried(what, single.about, retries, || run_single(rig, single))?);
    }
    let mut troubles = Vec::new();
    for trouble in TROUBLES {
        let line = Line::tried(trouble.what.to_owned(), trouble.about, retries, || {
            let wrong = (trouble.perform)(rig)?;
            Ok((wrong.map_or(Outcome::Runs, Outcome::Fails), String::new()))
        });
        troubles.push(line?);
    }
    Ok((singles, troubles))
}

/// Runs a program without a peer. Returns the outcome, and the output of a failure.
fn run_single(rig: &Rig, single: &Single) -> Result<(Outcome, String)> {
    let mut process = start(rig, single.command, "alone")?;
    let status = process.wait(Instant::now() + LIMIT)?;
    let output = process.output();
    let wrong = match status {
        None => Some("it does not end".to_owned()),
        Some(status) if status != single.status => Some(format!("it ends with {status}, not {}", single.status)),
        Some(_) => {
            let lacking = single.shows.iter().find(|&&shown| !output.contains(shown));
            lacking.map(|shown| format!("it does not show {shown:?}"))
        }
    };
    Ok(match wrong {
        None => (Outcome::Runs, String::new()),
        Some(wrong) => (Outcome::Fails(wrong), indented("", &output)),
    })
}

/// A program under `doorbell run`, in a folder of its own.
fn start(rig: &Rig, command: &str, name: &str) -> Result<Process> {
    let mut words = rig.under_doorbell(&[]);
    words.extend(command.split_whitespace().map(str::to_owned));
    Process::start(&words, &[], &rig.folder(&format!("trouble-{}", rig.port()?))?, name)
}

fn watch(rig: &Rig) -> Result<Option<String>> {
    // Its output is no terminal, so stdio would buffer it; stdbuf makes it line-buffered.
    let mut watching = start(rig, "stdbuf -oL ibv_asyncwatch", "watch")?;
    if !watching.wait_shown("async event FD", Instant::now() + LIMIT)? {
        return Ok(Some(format!("it shows {:?}", watching.output())));
    }
    watching.signal(libc::SIGINT);
    Ok(match watching.wait(Instant::now() + LIMIT)? {
        Some(status) if status == 128 + libc::SIGINT => None,
        other => Some(format!("it ends with {other:?}")),
    })
}

/// A running pair that does not end by itself.
fn running_pair(rig: &Rig, command: &str, connect: &str) -> Result<(Process, Process)> {
    let port = rig.port()?;
    let mut server = start(rig, &format!("{command} -p {port}"), "server")?;
    server.wait_listening(port, Instant::now() + LIMIT)?;
    let client = start(rig, &format!("{command} -p {port} {connect}"), "client")?;
    // The server stops listening once both are connected.
    let deadline = Instant::now() + LIMIT;
    while server.is_listening_on(port) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(500));
    Ok((server, client))
}

fn server_interrupted(rig: &Rig) -> Result<Option<String>> {
    let (mut server, mut client) = running_pair(rig, "ibv_rc_pingpong -g 0 -n 100000000", "127.0.0.1")?;
    server.signal(libc::SIGINT);
    let stopped = server.wait(Instant::now() + LIMIT)?;
    if stopped != Some(128 + libc::SIGINT) {
        return Ok(Some(format!("the server ends with {stopped:?}")));
    }
    ends_with_an_error(&mut client, "transport retry counter exceeded")
}

fn client_killed(rig: &Rig) -> Result<Option<String>> {
    let (mut server, client) = running_pair(rig, "ib_write_bw -F -n 100000000 -N", "127.0.0.1")?;
    client.signal(libc::SIGKILL);
    ends_with_an_error(&mut server, "")
}

fn server_killed(rig: &Rig) -> Result<Option<String>> {
    let (server, mut client) = running_pair(rig, "ib_read_bw -F -n 100000000 -N", "127.0.0.1")?;
    server.signal(libc::SIGKILL);
    ends_with_an_error(&mut client, "Completion with error")
}

fn no_server(rig: &Rig) -> Result<Option<String>> {
    let port = rig.port()?;
    let mut client = start(rig, &format!("ib_write_bw -F -p {port} 127.0.0.1"), "client")?;
    ends_with_an_error(&mut client, "Couldn't connect to 127.0.0.1")
}

/// It must exit with a status that is neither 0 nor a signal's, and have printed `message`.
fn ends_with_an_error(process: &mut Process, output: &str) -> Result<Option<String>> {
    Ok(match process.wait(Instant::now() + LIMIT)? {
        None => Some("it does not end".to_owned()),
        Some(0) => Some("it ends with 0".to_owned()),
        Some(status) if status >= 128 => Some(format!("it ends with {status}")),
        Some(_) if !process.output().contains(output) => Some(format!("it does not say {output:?}")),
        Some(_) => None,
    })
}

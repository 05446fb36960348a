//! The output of the classic tools compared with the C tools', to the column, on the userspace
//! device. Measured values, numbers and keys are masked, but not their widths.

#[path = "../../perftest/tests/common/ports.rs"]
mod ports;

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_tests::process::has_listener;

pub(crate) use self::ports::free_port;
use crate::{address, built, doorbell, missing, texts};

/// Short runs that differ in their output.
const MODES: [&str; 14] = [
    "ib_write_bw -n 100",
    "ib_write_bw -n 100 -b --report-both",
    "ib_write_bw -n 160 -l 16 --report_gbits",
    "ib_write_bw -n 5 -a",
    "ib_write_bw -n 100 -N",
    "ib_write_bw -n 100 --output=bandwidth",
    "ib_read_bw -n 100 -q 2 -o 4",
    "ib_send_bw -n 100 -c UD -s 512",
    "ib_send_bw -n 100 -q 2 --use-srq",
    "ib_atomic_bw -n 100",
    "ib_write_lat -n 100 -s 8",
    "ib_read_lat -n 20 -H",
    "ib_send_lat -n 100 -c UD",
    "ib_atomic_lat -n 100 -A CMP_AND_SWAP",
];
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program by this name, or the C tool of that name on the drop-in.
fn command(tool: &str, stock: Option<&str>, folder: &Path, here: &str) -> Command {
    let mut command = match stock {
        Some(path) => doorbell(&["run", "--", path]),
        None => {
            let plain = doorbell(&[]);
            let mut ours = Command::new(folder.join(tool));
            for (name, value) in plain.get_envs() {
                match value {
                    Some(value) => ours.env(name, value),
                    None => ours.env_remove(name),
                };
            }
            ours.stdin(std::process::Stdio::null())
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
            ours
        }
    };
    command.env("DOORBELL_SOFT_ADDR", here).current_dir(folder);
    command
}

/// Waits until a server listens or is gone; one that does neither is killed.
pub(crate) fn await_listener(server: &mut Child, port: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while !has_listener("/proc/net", port.parse().expect("a number")) {
        let gone = server.try_wait().expect("it can be waited for").is_some();
        if gone || Instant::now() > deadline {
            let _ = server.kill();
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a process whose output fits the pipes, and returns its output.
fn output_of(mut child: Child, line: &str) -> (String, String) {
    let deadline = Instant::now() + TIMEOUT;
    while child.try_wait().expect("it can be waited for").is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("{line} hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("it writes");
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success(), "{line}: {}\n{stdout}{stderr}", output.status);
    (stdout, stderr)
}

/// The output of the client and the server of one kind.
fn pair(line: &str, stock: Option<&str>, folder: &Path) -> [String; 2] {
    let (tool, options) = line.split_once(' ').expect("a name and options");
    let (here, port) = (address(), free_port().to_string());
    let start = |host: &[&str]| {
        let mut command = command(tool, stock, folder, &here);
        command
            .args(["-F", "-p", &port])
            .args(options.split_whitespace())
            .args(host);
        command.spawn().expect("it runs")
    };
    let mut server = start(&[]);
    await_listener(&mut server, &port);
    let client = output_of(start(&["127.0.0.1"]), line);
    [client, output_of(server, line)].map(|(stdout, stderr)| {
        // The C tool rules a line first, with this on stderr below it.
        let has_note = stderr.contains("Device not recognized");
        let rest = stdout
            .split_once('\n')
            .filter(|(first, _)| has_note && first.starts_with("----"));
        masked(rest.map_or(stdout.as_str(), |(_, rest)| rest), tool.ends_with("_lat"))
    })
}

fn masked(text: &str, is_lat: bool) -> String {
    let lines = text.lines().filter_map(|line| {
        let first = line.trim_start().chars().next();
        if line.contains(" address: ") {
            Some(mask_addresses(line))
        } else if line.starts_with(" GID: ") {
            Some(" GID: …".to_owned())
        } else if line.starts_with(" PCIe relax order") {
            // Ours prints what is done, the C tool what it requested.
            Some(" PCIe relax order: …".to_owned())
        } else if is_lat && line.starts_with(" Max inline data") {
            Some(" Max inline data : …".to_owned())
        } else if line.starts_with(|c: char| c.is_ascii_digit()) {
            // The C tool omits some samples; a single value stays.
            (!line.contains(", ")).then(|| "N".to_owned())
        } else if line.starts_with(' ') && first.is_some_and(|c| c.is_ascii_digit()) {
            Some(mask_values(line))
        } else {
            Some(line.to_owned())
        }
    });
    lines.map(|line| line + "\n").collect()
}

/// A line of addresses with run-dependent digits masked.
fn mask_addresses(line: &str) -> String {
    let mut masks = None;
    let words = line.split(' ').map(|word| {
        let text = match masks {
            // These have variable width.
            Some("QPN" | "PSN") => "#".to_owned(),
            // At least of this width: a key has as many digits as it needs.
            Some("RKey") => "#".repeat(word.len().min(8)),
            Some(_) => "#".repeat(word.len()),
            None => word.to_owned(),
        };
        masks = Some(word).filter(|word| ["QPN", "PSN", "RKey", "VAddr"].contains(word));
        text
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Masks values with decimals, and their padding to seven columns.
fn mask_values(line: &str) -> String {
    let mut masked = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let word = rest.find(|c: char| c.is_whitespace()).unwrap_or(rest.len());
        let (token, behind) = rest.split_at(word);
        let blanks = behind.len() - behind.trim_start_matches(' ').len();
        if token.contains('.') || token.contains("nan") || token.contains("inf") {
            masked.push('N');
            let padding = 7_usize.saturating_sub(token.len()).min(blanks);
            rest = &behind[padding..];
        } else {
            masked += token;
            rest = behind;
        }
        let blank = rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len());
        masked += &rest[..blank];
        rest = &rest[blank..];
    }
    masked
}

#[test]
fn the_classic_tools_print_the_layout_of_the_c_tools() {
    let tools = Path::new("/usr/bin");
    if !tools.join("ib_write_bw").is_file() {
        missing("ib_write_bw of the package perftest");
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    for mode in MODES {
        let name = mode.split(' ').next().expect("a name");
        let link = folder.path().join(name);
        if !link.exists() {
            symlink(built().join("doorbell"), link).expect("a link");
        }
    }
    for mode in MODES {
        let tool = tools.join(mode.split(' ').next().expect("a name"));
        let theirs = pair(mode, tool.to_str(), folder.path());
        let ours = pair(mode, None, folder.path());
        for (end, (ours, theirs)) in ["client", "server"].iter().zip(ours.iter().zip(&theirs)) {
            assert_eq!(ours, theirs, "{mode}: the {end}'s output");
        }
    }
}

#[test]
fn masks_leave_widths() {
    assert_eq!(
        mask_values(" 64         1600             171.76             70.28  \t\t   1.151401"),
        mask_values(" 64         1600             9.76               1171.28\t\t   0.000001")
    );
    assert_ne!(mask_values(" 64  1.00   "), mask_values(" 64   1.00   "));
    assert_eq!(
        mask_addresses(" local address: LID 0000 QPN 0x3d093a PSN 0x1 RKey 0x2"),
        " local address: LID 0000 QPN # PSN # RKey ###"
    );
}

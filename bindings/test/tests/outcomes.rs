//! What a test leaves behind when it passes and when it fails; sets of devices without the
//! attribute; and those of two processes.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use doorbell::prelude::*;
use doorbell_test::Devices;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Set in the child processes whose tests do something: `fails` is no failure of this program.
const INSIDE: &str = "DOORBELL_TEST_INSIDE";

fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

#[doorbell_test::test(drop = 0.25, seed = 7)]
fn fails(_: Context, _: Context) {
    assert!(!is_inside(), "as it is to");
}

#[doorbell_test::test]
fn returns_an_error(_: Context) -> Result<(), String> {
    if is_inside() {
        Err("as it is to".to_owned())
    } else {
        Ok(())
    }
}

#[doorbell_test::test(delay = "1ms")]
fn passes(_: Context, _: Context, _: Context) -> Result<(), String> {
    Ok(())
}

#[doorbell_test::test]
#[should_panic(expected = "as it is to")]
fn panics(_: Context) {
    panic!("as it is to");
}

#[doorbell_test::test(dorp = 0.5)]
#[should_panic(expected = "doorbell-test: no fault is called 'dorp': there are drop, ")]
fn misspelt(_: Context) {}

fn run_inside(test: &str) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
    command.stdout(Stdio::null()).output().unwrap()
}

#[test]
fn a_failed_test_prints_one_line_and_keeps_its_captures() {
    for (test, failure, devices) in [
        ("fails", Some("drop=0.25,seed=7"), 2),
        ("returns_an_error", Some("seed=0"), 1),
        ("passes", None, 0),
        ("panics", None, 0),
    ] {
        let Output { status, stderr, .. } = run_inside(test);
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.success(), failure.is_none(), "{stderr}");
        let mut lines = stderr.lines().filter(|line| line.starts_with("doorbell-test:"));
        let line = lines.next();
        let Some(faults) = failure else {
            assert_eq!(line, None);
            continue;
        };
        let line = line.unwrap();
        let start = format!("doorbell-test: outcomes::{test} failed with {faults}; devices soft-");
        assert!(line.starts_with(&start), "{line}");
        assert_eq!(line.matches(" at 127.").count(), devices, "{line}");
        let (_, pattern) = line.split_once("; captures ").unwrap();
        let stem = pattern.strip_suffix("-*.pcap").unwrap();
        for device in 0..devices {
            let file = format!("{stem}-{device}.pcap");
            assert!(fs::metadata(&file).unwrap().len() >= 24, "a header at least");
            fs::remove_file(file).unwrap();
        }
        assert!(!Path::new(&format!("{stem}-{devices}.pcap")).exists());
        assert_eq!(lines.next(), None);
    }
}

#[test]
fn captures_of_a_passed_test_go_unless_they_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let mut devices = Devices::new().pcap(folder.path().join("both.pcap")).build().unwrap();
        let _open = (devices.open().unwrap(), devices.open().unwrap());
    }
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["both-0.pcap", "both-1.pcap"]);

    let mut devices = Devices::new().name("unnamed::captures").build().unwrap();
    let _open = devices.open().unwrap();
    let kept = format!("{devices:?}");
    let (_, file) = kept.split_once("files: [\"").unwrap();
    let file = Path::new(file.split_once('"').unwrap().0);
    assert!(file.exists() && file.to_str().unwrap().contains("/doorbell-test/unnamed.captures-"));
    drop(devices);
    assert!(!file.exists());
}

/// Sends, or receives, one message of 64 packets.
fn end(device: &Context, exchange: Exchange, sends: bool) {
    let mut exchange = exchange;
    let pd = device.protection_domain().unwrap();
    let mut cq = device
        .completion_queue_on(&device.completion_channel().unwrap(), 256)
        .unwrap();
    let qp = pd.queue_pair(&cq).mtu(doorbell::Mtu::B256).signal_all().rc().unwrap();
    let (mut qp, _) = exchange.pair(qp, &[]).unwrap();
    let text = vec![7; 64 * 256];
    if sends {
        qp.send(pd.register(text, Local).unwrap()).unwrap();
        cq.wait(TIMEOUT).unwrap().next().unwrap().result().unwrap();
    } else {
        qp.receive(pd.register(vec![0; text.len()], Local).unwrap()).unwrap();
        let received: Buffer<Local> = cq.wait(TIMEOUT).unwrap().next().unwrap().take().unwrap();
        assert!(*received == text[..]);
    }
    exchange.finish().unwrap();
}

/// The child of the next test, which has its address in the variable.
#[test]
fn child() {
    let Ok(address) = env::var(INSIDE) else { return };
    let device = doorbell::open_from_env().unwrap();
    end(&device, Exchange::connect(address, TIMEOUT).unwrap(), false);
}

#[test]
fn two_processes() {
    let folder = tempfile::tempdir().unwrap();
    let options = Devices::new().drop(0.05).duplicate(0.05).seed(3);
    let mut devices = options.pcap(folder.path().join("both.pcap")).build().unwrap();
    let device = devices.open().unwrap();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .envs(devices.child().unwrap())
        .env(INSIDE, listener.local_addr().to_string())
        .spawn()
        .unwrap();
    end(&device, listener.accept(TIMEOUT).unwrap(), true);
    assert!(child.wait().unwrap().success());
    // Each process has captured what it sent and received.
    let sizes = [0, 1].map(|device| {
        fs::metadata(folder.path().join(format!("both-{device}.pcap")))
            .unwrap()
            .len()
    });
    assert!(sizes.iter().all(|&size| size > 60 * 256), "{sizes:?}");
}

#[test]
fn options_are_checked_before_any_device_is_open() {
    let error = |devices: Devices| devices.build().unwrap_err().to_string();
    assert_eq!(
        error(Devices::new().drop(1.5)),
        "drop=1.5: expected a fraction from 0 to 1"
    );
    assert_eq!(
        error(Devices::new().corrupt(0.1).corrupt(0.2)),
        "'corrupt' is given twice"
    );
    assert_eq!(
        error(Devices::new().rate("fast")),
        "rate=fast: expected a rate from 1Mb to 1000Gb, such as 500Mb or 2.5Gb"
    );
    let all = Devices::new()
        .drop(0.1)
        .duplicate(0.2)
        .reorder(0.3)
        .corrupt(0.4)
        .seed(9);
    let all = all.delay(Duration::from_micros(5)).rate("1Gb").down("3s+1s");
    assert!(all.build().is_ok());
}

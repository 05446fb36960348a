//! Wrong data is found and reported: both ends run in this process on two userspace devices with
//! payloads of different seeds.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::OnceLock;
use std::thread;

use clap::Parser;
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::Library;

use super::session::{measure, serve_size};
use super::test_end::Test;
use crate::cli::{Cli, Command};
use crate::device::{Device, Manager};
use crate::exchange::{Control, ExpectedTest, Listener, connect, introduce};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::plan::Plan;
use crate::report::LinkKind;
use crate::stats::{Clock, ClockChoice};

fn device(name: &str) -> Device {
    static CONFIGURED: OnceLock<()> = OnceLock::new();
    CONFIGURED.get_or_init(|| configure(vec![DeviceConfig::new("soft0"), DeviceConfig::new("soft1")]).unwrap());
    Device {
        context: Library::new(api()).open(name).unwrap(),
        link: LinkKind::SoftUdp,
        group: None,
        faults: None,
        manager: Manager::Own,
        gpu: None,
    }
}

fn plan(line: &str) -> Plan {
    match Cli::try_parse_from(format!("doorbell {line} --verify -n 50").split(' '))
        .unwrap()
        .command
    {
        Command::Bw(args) => Plan::bw(&args).unwrap(),
        Command::Lat(args) => Plan::lat(&args).unwrap(),
        other => panic!("{other:?} has no plan"),
    }
}

fn test<'a>(plan: &'a Plan, device: &'a Device, control: &'a Control, clock: &'a Clock, is_server: bool) -> Test<'a> {
    Test {
        plan,
        bytes: plan.sizes[0],
        device,
        gid_index: None,
        inline: plan.inline,
        control,
        clock,
        is_server,
    }
}

/// Runs a test whose two ends expect payloads of different seeds. Returns the failure of each side.
fn mismatched(line: &str) -> (Option<Failure>, Option<Failure>) {
    let mut listener = Listener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let port = listener.address().port();
    let ours = plan(line);
    let (kind, verb) = (ours.kind, ours.verb.name());
    let server = thread::spawn(move || {
        let device = device("soft1");
        let expected = ExpectedTest {
            kind,
            verb,
            gpu: false,
            token: None,
            limits: None,
        };
        let (control, plan) = listener.accept(None, &expected, &Interrupt::default()).unwrap();
        let peer = Plan { seed: 2, ..plan };
        let clock = Clock::new(ClockChoice::System).unwrap();
        let failure = serve_size(&test(&peer, &device, &control, &clock, true)).err();
        if let Some(failure) = &failure {
            control.send_failure(failure);
        }
        failure
    });
    let device = device("soft0");
    let control = connect("127.0.0.1", port, &Interrupt::default()).unwrap();
    introduce(&control, &ours, None).unwrap();
    let clock = Clock::new(ClockChoice::System).unwrap();
    let (row, failure) = measure(&test(&ours, &device, &control, &clock, false), &mut |_| {});
    assert!(row.is_none() || failure.is_some(), "{line}: {row:?}");
    if let Some(failure) = &failure {
        control.send_failure(failure);
    }
    drop(control);
    (failure, server.join().unwrap())
}

#[test]
fn the_checking_end_names_size_iteration_offset_and_bytes() {
    for line in [
        "bw write -s 100",
        "bw send -s 100",
        "bw read -s 100",
        "bw write -s 100 --bidirectional",
        "bw write -s 100 --transport uc",
        "bw send -s 100 --transport ud",
        "lat send -s 100 --transport ud",
        "lat write -s 100",
        "lat send -s 500",
        "lat read -s 100",
    ] {
        let (client, server) = mismatched(line);
        let said = format!("{} / {}", client.expect(line), server.expect(line));
        for word in [
            "wrong data: size",
            "iteration 0",
            "offset 0",
            "expected 0x",
            "found 0x",
            "queue pair",
        ] {
            assert!(said.contains(word), "{line}: {said}");
        }
    }
}

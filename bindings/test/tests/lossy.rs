//! 200 tests that run in parallel, each on two devices of its own with faults of its own: what is
//! lost is a function of the seed, and a reliable connection delivers all the same.

use std::env;
use std::process::{Command, Stdio};
use std::time::Duration;

use doorbell::Mtu;
use doorbell::prelude::*;
use doorbell_roce_proto::Instant;
use doorbell_softroce::links::udp::fault::{Delivery, FaultModel};

const DATAGRAMS: u32 = 64;

/// BTH, DETH, payload and ICRC of a datagram.
const DATAGRAM: usize = 12 + 8 + 4 + 4;

/// The byte of a packet that its ICRC does not cover: FECN and BECN (IBTA vol 1, 7.8.1).
const UNCOVERED: usize = 4;

/// 64 packets of the smallest MTU.
const MESSAGE: usize = 64 * 256;

/// Longer than anything here takes, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The fraction of packets with a fault, of four kinds.
fn fraction(test: u64, kind: u64) -> f64 {
    ((test + kind) % 5) as f64 * 0.01
}

/// Runs the test of a number on its devices.
fn run(test: u64, a: &Context, b: &Context) {
    let expected = expected(test);
    let arrived = datagrams(a, b, expected.iter().sum(), || message(a, b, test as u8));
    assert_eq!(arrived, expected, "a function of the seed");
}

/// How often each datagram arrives by the model, of the packets of a device that sends no others.
fn expected(test: u64) -> Vec<usize> {
    let [drop, duplicate, reorder, corrupt] = [0, 1, 2, 3].map(|kind| fraction(test, kind));
    let faults = format!("drop={drop},duplicate={duplicate},reorder={reorder},corrupt={corrupt},seed={test}");
    let mut model = FaultModel::new(faults.parse().unwrap());
    let arrives = |delivery: &Delivery| {
        let corruption = delivery.corruption;
        corruption.is_none_or(|corruption| corruption.offset == UNCOVERED)
    };
    let mut arrivals = |_| model.decide(Instant::ZERO, DATAGRAM).filter(arrives).count();
    (0..DATAGRAMS).map(&mut arrivals).collect()
}

/// How often each of the datagrams from `a` arrives at `b`, `total` in all. Later ones would arrive
/// before what is sent `afterwards`.
fn datagrams(a: &Context, b: &Context, total: usize, afterwards: impl FnOnce()) -> Vec<usize> {
    let (from, to) = (a.protection_domain().unwrap(), b.protection_domain().unwrap());
    let sent = a.completion_queue(256).unwrap();
    let mut received = b.completion_queue_on(&b.completion_channel().unwrap(), 256).unwrap();
    let sender = from.queue_pair(&sent).max_send_wr(DATAGRAMS).max_inline_data(4);
    let mut sender = sender.ud().unwrap();
    let receiver = to.queue_pair(&received).max_recv_wr(2 * DATAGRAMS);
    let mut receiver = receiver.ud().unwrap();
    let chunk = GRH_BYTES + 4;
    for buffer in to.register_chunks(vec![0; 128 * chunk], chunk, Local).unwrap() {
        receiver.receive(buffer).unwrap();
    }
    let (address, endpoint) = (
        from.address_handle().to(&receiver.endpoint()).unwrap(),
        receiver.endpoint(),
    );
    for number in 0..DATAGRAMS {
        let bytes = number.to_be_bytes();
        sender
            .send_to_inline(&bytes, &address, endpoint.qpn, endpoint.qkey)
            .unwrap();
    }
    let mut counts = vec![0; DATAGRAMS as usize];
    let mut count = |received: &Buffer<Local>| {
        let number: [u8; 4] = received[GRH_BYTES..][..4].try_into().unwrap();
        counts[u32::from_be_bytes(number) as usize] += 1;
    };
    let mut arrived = 0;
    while arrived < total {
        let before = arrived;
        for mut done in received.wait(TIMEOUT).unwrap() {
            done.result().unwrap();
            count(&done.take().unwrap());
            arrived += 1;
        }
        assert!(arrived > before, "{arrived} of {total} datagrams arrived");
    }
    afterwards();
    for mut done in received.poll().unwrap() {
        count(&done.take().unwrap());
    }
    counts
}

/// Sends a message from `a` to `b`, reliably.
fn message(a: &Context, b: &Context, first: u8) {
    let (from, to) = (a.protection_domain().unwrap(), b.protection_domain().unwrap());
    let mut sent = a.completion_queue_on(&a.completion_channel().unwrap(), 256).unwrap();
    let mut received = b.completion_queue_on(&b.completion_channel().unwrap(), 256).unwrap();
    let sender = from
        .queue_pair(&sent)
        .mtu(Mtu::B256)
        .timeout(14)
        .signal_all()
        .rc()
        .unwrap();
    let receiver = to.queue_pair(&received).mtu(Mtu::B256).timeout(14).rc().unwrap();
    let (one, other) = (sender.endpoint(), receiver.endpoint());
    let (mut sender, mut receiver) = (sender.connect(&other).unwrap(), receiver.connect(&one).unwrap());
    let text: Vec<u8> = (0..MESSAGE).map(|at| (at / 256) as u8 ^ first).collect();
    receiver.receive(to.register(vec![0; MESSAGE], Local).unwrap()).unwrap();
    sender.send(from.register(text.clone(), Local).unwrap()).unwrap();
    let arrived = |cq: &mut CompletionQueue| -> Buffer<Local> {
        let mut done = cq.wait(TIMEOUT).unwrap().next().expect("within the timeout");
        done.result().unwrap();
        done.take().unwrap()
    };
    assert!(*arrived(&mut received) == text[..], "every byte");
    arrived(&mut sent);
}

macro_rules! tests {
    ($($name:ident $number:expr;)*) => {$(
        #[doorbell_test::test(
            drop = fraction($number, 0),
            duplicate = fraction($number, 1),
            reorder = fraction($number, 2),
            corrupt = fraction($number, 3),
            seed = $number,
        )]
        fn $name(a: Context, b: Context) {
            run($number, &a, &b);
        }
    )*};
}

macro_rules! tens {
    ($($ten:ident $number:expr;)*) => {$(
        mod $ten {
            use super::*;

            tests! {
                zero 10 * $number;
                one 10 * $number + 1;
                two 10 * $number + 2;
                three 10 * $number + 3;
                four 10 * $number + 4;
                five 10 * $number + 5;
                six 10 * $number + 6;
                seven 10 * $number + 7;
                eight 10 * $number + 8;
                nine 10 * $number + 9;
            }
        }
    )*};
}

tens! {
    t00 0; t01 1; t02 2; t03 3; t04 4; t05 5; t06 6; t07 7; t08 8; t09 9;
    t10 10; t11 11; t12 12; t13 13; t14 14; t15 15; t16 16; t17 17; t18 18; t19 19;
}

/// As cargo-nextest runs them, ten at a time.
#[test]
fn some_each_in_a_process() {
    let names = [
        "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    ];
    for ten in ["t03", "t08", "t14"] {
        let children = names.map(|name| {
            let mut command = Command::new(env::current_exe().unwrap());
            command
                .args(["--exact", &format!("{ten}::{name}")])
                .stdout(Stdio::piped());
            command.spawn().unwrap()
        });
        for child in children {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains("1 passed; 0 failed"), "{text}");
        }
    }
}

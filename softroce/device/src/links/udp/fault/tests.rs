use super::*;
use crate::links::udp::Envelope;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn config(text: &str) -> FaultConfig {
    text.parse().unwrap()
}

type Wire = Arc<Mutex<Vec<Vec<u8>>>>;

struct Recorder {
    wire: Wire,
    max_runs: usize,
}

impl Transmit for Recorder {
    fn transmit(&mut self, batch: &mut TxBatch, _now: Instant) -> io::Result<()> {
        let mut wire = self.wire.lock().unwrap();
        let packets: usize = batch.runs().take(self.max_runs).map(|run| run.packets).sum();
        wire.extend(batch.packets().take(packets).map(|(_, packet)| packet.to_vec()));
        batch.consume(self.max_runs);
        Ok(())
    }
}

fn seal(packet: &mut [u8], envelope: &Envelope) {
    let (body, check) = packet.split_last_chunk_mut::<4>().unwrap();
    let sum = body.iter().fold(0, |sum, byte| sum ^ byte);
    *check = [sum, envelope.ident as u8, sum ^ envelope.ident as u8, 0];
}

fn is_intact(packet: &[u8]) -> bool {
    let mut sealed = packet.to_vec();
    let ident = packet[packet.len() - 3];
    let envelope = Envelope {
        src: SocketAddr::from(([127, 0, 0, 1], 1)),
        dst: SocketAddr::from(([127, 0, 0, 1], 2)).into(),
        ident: ident.into(),
    };
    seal(&mut sealed, &envelope);
    sealed == packet
}

fn link(faults: &str, max_runs: usize) -> (FaultTx, Wire, TxBatch) {
    let wire = Wire::default();
    let recorder = Recorder {
        wire: Arc::clone(&wire),
        max_runs,
    };
    let batch = TxBatch::new(SocketAddr::from(([127, 0, 0, 1], 1)), seal);
    let tx = FaultTx::new(Box::new(recorder), config(faults), OutageClock::default());
    (tx, wire, batch)
}

fn push(batch: &mut TxBatch, number: u32) {
    let mut slot = batch.slot().unwrap();
    slot[..4].copy_from_slice(&number.to_be_bytes());
    slot[4..60].fill(0x5a);
    slot.send(64, SocketAddr::from(([127, 0, 0, 1], 2)));
}

fn number(packet: &[u8]) -> u32 {
    u32::from_be_bytes(packet[..4].try_into().unwrap())
}

/// Sends `packets` packets, 16 at a time and 1 µs apart, then waits until none is delayed.
fn send(faults: &str, packets: u32, max_runs: usize) -> Vec<Vec<u8>> {
    let (mut tx, wire, mut batch) = link(faults, max_runs);
    let mut now = Instant(1);
    for first in (0..packets).step_by(16) {
        (first..packets.min(first + 16)).for_each(|number| push(&mut batch, number));
        tx.transmit(&mut batch, now).unwrap();
        assert!(batch.is_empty());
        now = now + Duration::from_micros(1);
    }
    while let Some(due) = tx.due() {
        now = now.max(due);
        tx.transmit(&mut batch, now).unwrap();
    }
    drop(tx);
    Arc::into_inner(wire).unwrap().into_inner().unwrap()
}

#[test]
fn a_config_reads_what_it_writes() {
    let text = "drop=0.05,duplicate=0.01,reorder=0.02,corrupt=0.01,delay=100us,rate=1500Mb,down=3s+500ms,seed=7";
    let parsed = config(text);
    assert_eq!(parsed.delay, Duration::from_micros(100));
    assert_eq!((parsed.drop, parsed.corrupt, parsed.seed), (0.05, 0.01, 7));
    assert_eq!(parsed.to_string(), text);
    assert!(parsed.is_active());
    assert_eq!(parsed.rate, 1_500_000_000);
    assert_eq!(config("rate=1.5Gb/s,down=0").to_string(), "rate=1500Mb,down=0s,seed=0");
    assert_eq!(config(" drop = 0.5 , delay=1500ns ,"), config("delay=1500 ns,drop=0.5"));
    assert_eq!(config("delay=2s,drop=0").to_string(), "delay=2s,seed=0");
    assert_eq!(config(""), FaultConfig::default());
    assert!(!config("seed=3,delay=0").is_active());
}

#[test]
fn a_bad_config_is_explained() {
    let error = |text: &str| text.parse::<FaultConfig>().unwrap_err().to_string();
    assert_eq!(error("drop"), "'drop' is not NAME=VALUE, such as drop=0.05");
    assert_eq!(
        error("dorp=0.1"),
        "no fault is called 'dorp': there are drop, duplicate, reorder, corrupt, mark, delay, rate, down and seed"
    );
    assert_eq!(error("drop=0.1,drop=0.2"), "'drop' is given twice");
    for value in ["1.5", "-0.1", "NaN", "5%", ""] {
        assert_eq!(
            error(&format!("drop={value}")),
            format!("drop={value}: expected a fraction from 0 to 1")
        );
    }
    for value in [
        "100",
        "-1us",
        "11s",
        "99999999999999999999s",
        "18446744073709551615s",
        "1h",
        "us",
    ] {
        let expected = "expected a time of at most 10 s with its unit, such as 100us, 5ms or 1s";
        assert_eq!(error(&format!("delay={value}")), format!("delay={value}: {expected}"));
    }
    for value in ["1", "Gb", "0.9Mb", "2000Gb", "1GB", "-1Gb"] {
        let expected = "expected a rate from 1Mb to 1000Gb, such as 500Mb or 2.5Gb";
        assert_eq!(error(&format!("rate={value}")), format!("rate={value}: {expected}"));
    }
    for value in ["soon", "3", "3s+", "3s+0", "+1s"] {
        let expected = "expected when it begins and, after a +, how long it lasts, such as 3s or 3s+500ms";
        assert_eq!(error(&format!("down={value}")), format!("down={value}: {expected}"));
    }
    assert_eq!(error("seed=-1"), "seed=-1: expected a whole number");
}

#[test]
fn without_faults_packets_pass_as_they_are() {
    let sent = send("", 100, usize::MAX);
    assert!(sent.iter().map(|packet| number(packet)).eq(0..100));
    assert!(sent.iter().all(|packet| is_intact(packet)));
}

#[test]
fn equal_seeds_give_equal_faults_and_others_do_not() {
    let faults = "drop=0.1,duplicate=0.1,reorder=0.1,corrupt=0.1,delay=3us";
    let run = |seed: u32| send(&format!("{faults},seed={seed}"), 500, usize::MAX);
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn a_fault_that_is_added_leaves_the_others_where_they_were() {
    let mut alone = FaultModel::new(config("drop=0.2,seed=1"));
    let mut joined = FaultModel::new(config("drop=0.2,duplicate=0.5,reorder=0.5,corrupt=0.5,seed=1"));
    for _ in 0..1000 {
        let lost = alone.decide(Instant::ZERO, 64).next().is_none();
        assert_eq!(joined.decide(Instant::ZERO, 64).next().is_none(), lost);
    }
}

#[test]
fn fractions_match_the_configuration() {
    const PACKETS: u32 = 20_000;
    // Six standard deviations of the binomial: a failing seed is a bug, not bad luck.
    let near = |count: usize, fraction: f64| {
        let n = f64::from(PACKETS);
        let off = (count as f64 - n * fraction).abs();
        assert!(
            off <= 6.0 * (n * fraction * (1.0 - fraction)).sqrt(),
            "{count} of {PACKETS} for {fraction}"
        );
    };
    for seed in 0..3 {
        let count = |fault: &str| send(&format!("{fault},seed={seed}"), PACKETS, usize::MAX);
        near(PACKETS as usize - count("drop=0.05").len(), 0.05);
        near(count("duplicate=0.2").len() - PACKETS as usize, 0.2);
        near(
            count("corrupt=0.01").iter().filter(|packet| !is_intact(packet)).count(),
            0.01,
        );
        let reordered = count("reorder=0.02");
        assert_eq!(reordered.len(), PACKETS as usize);
        let mut furthest = 0;
        let overtaken = reordered.iter().filter(|packet| {
            furthest = furthest.max(number(packet));
            number(packet) < furthest
        });
        near(overtaken.count(), 0.02);
    }
}

#[test]
fn a_delayed_packet_goes_when_it_is_due() {
    let (mut tx, wire, mut batch) = link("delay=100us", usize::MAX);
    push(&mut batch, 0);
    tx.transmit(&mut batch, Instant(1_000)).unwrap();
    assert_eq!(tx.due(), Some(Instant(101_000)));
    tx.transmit(&mut batch, Instant(100_999)).unwrap();
    assert!(wire.lock().unwrap().is_empty());
    tx.transmit(&mut batch, Instant(101_000)).unwrap();
    assert_eq!(wire.lock().unwrap().len(), 1);
    assert_eq!(tx.due(), None);
}

/// The rest stays in the batch: the engine's timers start when a packet leaves it.
#[test]
fn a_rate_spaces_packets_and_holds_the_rest_back() {
    // 64 bytes at 1 Mb/s take 512 µs: the third packet begins after more than a millisecond.
    let (mut tx, wire, mut batch) = link("rate=1Mb", usize::MAX);
    batch.separate();
    (0..6).for_each(|number| push(&mut batch, number));
    let mut now = Instant(1_000);
    tx.transmit(&mut batch, now).unwrap();
    assert_eq!((batch.len(), wire.lock().unwrap().len()), (4, 0));
    let mut sent = Vec::new();
    while let Some(due) = tx.due() {
        now = due;
        tx.transmit(&mut batch, now).unwrap();
        let packets = wire.lock().unwrap().len();
        sent.extend((sent.len()..packets).map(|_| now.0));
    }
    assert!(batch.is_empty());
    assert_eq!(sent, [1, 2, 3, 4, 5, 6].map(|number| 1_000 + number * 512_000));
}

#[test]
fn nothing_is_sent_while_the_port_is_down() {
    let (mut tx, wire, mut batch) = link("delay=1us", usize::MAX);
    push(&mut batch, 0);
    tx.transmit(&mut batch, Instant(1_000)).unwrap();
    tx.outage = OutageClock::new(config("down=0").down, 0);
    push(&mut batch, 1);
    tx.transmit(&mut batch, Instant(9_000)).unwrap();
    assert!(batch.is_empty() && tx.due().is_none());
    assert!(wire.lock().unwrap().is_empty());
}

#[test]
fn a_full_socket_holds_packets_and_loses_none() {
    let sent = send("delay=1ms", 10_000, 1);
    assert!(sent.iter().map(|packet| number(packet)).eq(0..10_000));
}

#[test]
fn the_model_damages_copies_for_the_simulator() {
    let mut model = FaultModel::new(config("duplicate=1,corrupt=1,delay=1us"));
    let mut arrived = Vec::new();
    model.apply(Instant(5), vec![0u8; 64], |at, packet| arrived.push((at, packet)));
    let changed = |packet: &[u8]| packet.iter().filter(|&&byte| byte != 0).count();
    assert_eq!(arrived.len(), 2);
    assert!(arrived.iter().all(|&(at, _)| at == Instant(1_005)));
    assert_eq!((changed(&arrived[0].1), changed(&arrived[1].1)), (1, 0));
    model.apply(Instant(5), Vec::new(), |_, packet: Vec<u8>| assert!(packet.is_empty()));
}

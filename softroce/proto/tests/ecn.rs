//! Congestion control: CNPs on the wire, at most one in an interval, and what a queue pair does
//! with them and with the controller's rate and window.

mod util;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use doorbell_roce_proto::congestion::{Algorithm, CongestionConfig, Controller, ecn};
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{Modify, State};
use doorbell_roce_proto::wire::{Bth, Cnp, Transport};
use doorbell_roce_proto::{Datagram, Ident, Instant, Mtu, Qpn};

use util::{Fate, Pair, SEND_CQ, Sent, Setup, pattern, read_from, success, write_to};

const LINE_RATE: u64 = 1_000_000_000;
const PERIOD: Duration = Duration::from_micros(100);

/// Halves its rate at a CNP, and has the line rate again ten periods later.
#[derive(Debug)]
struct Halving {
    rate: u64,
    recovers: Option<Instant>,
}

impl Controller for Halving {
    fn on_cnp(&mut self, now: Instant) {
        self.rate /= 2;
        self.recovers = Some(now + PERIOD * 10);
    }

    fn on_ack(&mut self, _now: Instant, _rtt: Option<Duration>, _bytes: u64) {}

    fn on_loss(&mut self, _now: Instant) {}

    fn on_sent(&mut self, _now: Instant, _bytes: u64) {}

    fn rate(&self) -> Option<u64> {
        self.recovers.map(|_| self.rate)
    }

    fn next_timer(&self) -> Option<Instant> {
        self.recovers
    }

    fn on_timer(&mut self, _now: Instant) {
        self.rate = LINE_RATE;
        self.recovers = None;
    }
}

fn config() -> CongestionConfig {
    CongestionConfig {
        algorithm: Algorithm::Custom(|config| {
            Box::new(Halving {
                rate: config.line_rate,
                recovers: None,
            })
        }),
        line_rate: LINE_RATE,
        min_rate: LINE_RATE / 1000,
        burst: 0,
        ..CongestionConfig::default()
    }
}

fn setup() -> Setup {
    Setup {
        mtu: Mtu::Mtu1024,
        congestion: config(),
        ..Setup::default()
    }
}

/// More than the window of the queue pair.
const LEN: usize = 400 << 10;

fn part(sge: Sge, len: u32) -> Sge {
    Sge { len, ..sge }
}

/// Two regions of `LEN` bytes, the second one at the other node.
fn regions(pair: &mut Pair) -> [Sge; 2] {
    [0, 1].map(|at| pair.region(at, pattern(LEN, at as u64)))
}

/// The time that a WRITE of `LEN` bytes takes, of which `fate` decides.
fn write_time(pair: &mut Pair, [local, remote]: [Sge; 2], fate: impl FnMut(usize, &Sent) -> Fate) -> Duration {
    let start = pair.now;
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(fate);
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    pair.nodes[0].completions.clear();
    assert_eq!(pair.bytes(1, remote), pair.bytes(0, local));
    pair.now - start
}

fn rate(pair: &Pair, at: usize) -> Option<u64> {
    pair.nodes[at].endpoint.rate(pair.nodes[at].qpn)
}

fn cnps(pair: &Pair) -> Vec<&Sent> {
    pair.log.iter().filter(|sent| sent.is_cnp()).collect()
}

/// A CNP to a node, sealed as its peer would.
fn cnp(pair: &Pair, to: usize, dest_qp: Qpn) -> Sent {
    let mut bytes = vec![0; Cnp::LEN];
    assert_eq!(Cnp { dest_qp }.write(&mut bytes), Some(Cnp::LEN));
    let (src, dst) = (pair.nodes[1 - to].address, pair.nodes[to].address);
    Flow::new(src, dst, 4791, 4791).seal(0, &mut bytes);
    Sent {
        from: 1 - to,
        traffic_class: 0,
        bytes,
    }
}

#[test]
fn a_marked_packet_is_answered_by_a_cnp_and_the_sender_slows_down() {
    for v6 in [false, true] {
        let mut pair = Pair::connected(Setup { v6, ..setup() });
        let sges = regions(&mut pair);
        let mut first = true;
        let time = write_time(&mut pair, sges, |_, _| {
            if std::mem::take(&mut first) {
                Fate::Mark
            } else {
                Fate::Deliver
            }
        });
        let [notification] = cnps(&pair)[..] else {
            panic!("one mark, one CNP")
        };
        let mut expected = [0; 28];
        expected[..4].copy_from_slice(&[0x81, 0x40, 0xff, 0xff]);
        expected[4..8].copy_from_slice(&pair.nodes[0].qpn.get().to_be_bytes());
        expected[4] = 0x40;
        assert_eq!(notification.bytes[..28], expected);
        assert_eq!((notification.from, notification.traffic_class), (1, 0));
        // The window was sent before the mark; the rest is sent at half of the rate.
        let at_half = Duration::from_secs(1) * (LEN as u32) / (LINE_RATE as u32 / 2);
        assert!(time > at_half / 2 && time < at_half * 2, "{time:?}");
        let (sender, receiver) = (pair.counters(0), pair.counters(1));
        assert_eq!((receiver.marked_packets, receiver.cnps_sent), (1, 1));
        assert_eq!((sender.cnps_handled, sender.cnps_ignored), (1, 0));
        assert_eq!(sender.retransmits + sender.timeouts, 0);
        pair.now = pair.now + PERIOD * 10;
        assert_eq!(write_time(&mut pair, sges, |_, _| Fate::Deliver), Duration::ZERO);
        assert_eq!(rate(&pair, 0), None);
    }
}

/// ECT(0) of what it sends, with the DSCP of the path; nothing of it without an algorithm.
#[test]
fn packets_are_ecn_capable_where_the_queue_pair_reacts() {
    for (algorithm, class) in [(config().algorithm, 0b10), (Algorithm::None, 0)] {
        let mut pair = Pair::connected(Setup {
            congestion: CongestionConfig { algorithm, ..config() },
            ..setup()
        });
        let sges = regions(&mut pair);
        let time = write_time(&mut pair, sges, |_, _| Fate::Mark);
        assert_eq!(time > Duration::ZERO, class != 0);
        let data = pair.log.iter().filter(|sent| !sent.is_cnp());
        assert!(data.into_iter().all(|sent| sent.traffic_class == class));
        let marked = pair.counters(1).marked_packets;
        assert_eq!(marked > 0, class != 0);
    }
}

/// A receiver that does not react itself notifies all the same: its peer has requested that by ECT.
#[test]
fn notification_does_not_depend_on_an_algorithm() {
    let mut pair = Pair::connected(Setup {
        congestion: CongestionConfig {
            algorithm: Algorithm::None,
            ..config()
        },
        ..setup()
    });
    let [local, remote] = regions(&mut pair);
    pair.post(0, &write_to(1, &[part(local, 8)], part(remote, 8)));
    let mut sent = pair.transmit_one(0).unwrap();
    sent.traffic_class = 0b11;
    pair.deliver(&sent);
    pair.run();
    assert_eq!(cnps(&pair).len(), 1);
    let sender = pair.counters(0);
    assert_eq!((sender.cnps_handled, sender.cnps_ignored), (0, 1));
}

#[test]
fn one_cnp_in_an_interval() {
    let mut pair = Pair::connected(setup());
    let [local, remote] = regions(&mut pair);
    let interval = config().cnp_interval;
    let mut count = |step: Duration| {
        let (before, start) = (pair.counters(1), pair.now);
        for wr_id in 0..20 {
            pair.now = pair.now + step;
            pair.post(0, &write_to(wr_id, &[part(local, 8)], part(remote, 8)));
            pair.run_with(|_, sent| if sent.from == 0 { Fate::Mark } else { Fate::Deliver });
        }
        let after = pair.counters(1);
        assert_eq!(
            after.marked_packets - before.marked_packets,
            20,
            "acknowledgements are not marked"
        );
        (after.cnps_sent - before.cnps_sent, pair.now - start)
    };
    let (all, _) = count(interval);
    assert_eq!(all, 20);
    let (some, time) = count(interval / 10);
    let most = time.as_nanos() / interval.as_nanos() + 1;
    assert!((1..=most).contains(&u128::from(some)), "{some} CNPs in {time:?}");
}

/// Its data is the responses: the responder is paced, by marks that the requester receives.
#[test]
fn read_responses_are_paced_too() {
    let mut pair = Pair::connected(setup());
    let [local, remote] = regions(&mut pair);
    let mut marks = 1;
    pair.post(0, &read_from(1, &[local], remote));
    pair.run_with(|_, sent| {
        let marked = sent.from == 1 && !sent.is_cnp() && std::mem::take(&mut marks) > 0;
        if marked { Fate::Mark } else { Fate::Deliver }
    });
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!((pair.counters(0).cnps_sent, pair.counters(1).cnps_handled), (1, 1));
    assert!(rate(&pair, 1).is_some(), "the controller has a limit still");
    assert!(pair.now > Instant::ZERO);
}

/// However many CNPs come: the queue pair lives, at the minimum rate or more.
#[test]
fn a_storm_of_cnps_slows_down_to_the_minimum_rate() {
    let mut pair = Pair::connected(setup());
    let sges = regions(&mut pair);
    let storm = cnp(&pair, 0, pair.nodes[0].qpn);
    for step in 0..10_000_u64 {
        pair.now = pair.now + Duration::from_nanos(100 + step % 7);
        pair.deliver(&storm);
    }
    let counters = pair.counters(0);
    assert_eq!(counters.cnps_handled + counters.cnps_ignored, 10_000);
    let most = pair.now.0 / config().cnp_spacing.as_nanos() as u64 + 1;
    assert!(counters.cnps_handled <= most, "{}", counters.cnps_handled);
    assert_eq!(rate(&pair, 0), Some(config().min_rate));
    let time = write_time(&mut pair, sges, |_, _| Fate::Deliver);
    let slowest = Duration::from_secs(1) * (2 * LEN as u32) / (config().min_rate as u32);
    assert!(time < slowest, "{time:?}");
}

#[test]
fn a_cnp_must_be_whole_and_from_the_peer() {
    let mut pair = Pair::connected(setup());
    let genuine = cnp(&pair, 0, pair.nodes[0].qpn);
    let refused = |pair: &Pair| {
        let counters = pair.counters(0);
        assert_eq!((counters.cnps_handled, rate(pair, 0)), (0, None));
        [
            counters.malformed,
            counters.no_qp,
            counters.wrong_peer,
            counters.icrc_errors,
        ]
    };
    // Its length, BECN, partition and transport version.
    let mut short = genuine.clone();
    short.bytes.truncate(Cnp::LEN - 4);
    pair.deliver_sealed(&mut short);
    for (at, change) in [(4, 0x40), (2, 0x10), (1, 0x01), (1, 0x10)] {
        let mut changed = genuine.clone();
        changed.bytes[at] ^= change;
        pair.deliver_sealed(&mut changed);
    }
    assert_eq!(refused(&pair), [5, 0, 0, 0]);
    let mut other = genuine.clone();
    other.bytes[7] ^= 0x55;
    pair.deliver_sealed(&mut other);
    assert_eq!(refused(&pair), [5, 1, 0, 0]);
    let mut corrupt = genuine.clone();
    corrupt.bytes[9] ^= 1;
    pair.deliver(&corrupt);
    assert_eq!(refused(&pair), [5, 1, 0, 1]);
    let node = &mut pair.nodes[0];
    let datagram = Datagram {
        src: "10.9.0.66".parse().unwrap(),
        dst: node.address,
        src_port: 4791,
        dst_port: 4791,
        ident: Ident::Known(0),
        traffic_class: 0,
        payload: &genuine.bytes,
    };
    node.endpoint.handle_datagram(pair.now, &datagram, &mut node.memory);
    assert_eq!(refused(&pair), [5, 1, 1, 1]);
    pair.deliver(&genuine);
    assert_eq!(pair.counters(0).cnps_handled, 1);
}

/// A UD queue pair has no peer to slow down, and none that could slow it down.
#[test]
fn datagrams_are_counted_and_not_answered() {
    let mut pair = Pair::connected(Setup {
        transport: Transport::Ud,
        ..setup()
    });
    let [local, remote] = regions(&mut pair);
    pair.receive(1, 1, &[remote]);
    let to = pair.destination(0);
    pair.post_datagram(0, &util::send(1, &[part(local, 8)]), &to);
    let mut sent = pair.transmit_one(0).unwrap();
    assert_eq!(sent.traffic_class, to.path.traffic_class);
    sent.traffic_class = 0b11;
    pair.deliver(&sent);
    pair.run();
    assert_eq!((pair.counters(1).marked_packets, pair.counters(1).cnps_sent), (1, 0));
    let forged = cnp(&pair, 0, pair.nodes[0].qpn);
    pair.deliver(&forged);
    assert_eq!(pair.counters(0).wrong_peer, 1);
}

/// What was reported to the controller.
static ACKED: AtomicU64 = AtomicU64::new(0);
static RTTS: AtomicU64 = AtomicU64::new(0);
static LOSSES: AtomicU64 = AtomicU64::new(0);

const WINDOW: u64 = 3 * 1024;

/// A window of three packets; it notes what is reported.
#[derive(Debug)]
struct Windowed;

impl Controller for Windowed {
    fn on_cnp(&mut self, _now: Instant) {}

    fn on_ack(&mut self, _now: Instant, rtt: Option<Duration>, bytes: u64) {
        ACKED.fetch_add(bytes, Ordering::Relaxed);
        if let Some(rtt) = rtt {
            assert_eq!(rtt, RTT);
            RTTS.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn on_loss(&mut self, _now: Instant) {
        LOSSES.fetch_add(1, Ordering::Relaxed);
    }

    fn on_sent(&mut self, _now: Instant, _bytes: u64) {}

    fn rate(&self) -> Option<u64> {
        None
    }

    fn window(&self) -> Option<u64> {
        Some(WINDOW)
    }

    fn next_timer(&self) -> Option<Instant> {
        None
    }

    fn on_timer(&mut self, _now: Instant) {
        unreachable!("it has no timer")
    }
}

const RTT: Duration = Duration::from_micros(7);

#[test]
fn the_window_is_kept_and_acknowledgements_and_losses_are_reported() {
    let mut pair = Pair::connected(Setup {
        congestion: CongestionConfig {
            algorithm: Algorithm::Custom(|_| Box::new(Windowed)),
            ..CongestionConfig::default()
        },
        ..setup()
    });
    let sges = regions(&mut pair);
    pair.post(0, &write_to(1, &[sges[0]], sges[1]));
    let mut lost = 1;
    while pair.nodes[0].completions.is_empty() {
        let flight: Vec<_> = std::iter::from_fn(|| pair.transmit_one(0)).collect();
        assert!((1..=3).contains(&flight.len()), "{} packets", flight.len());
        pair.now = pair.now + RTT;
        // The second of the first flight is lost: a NAK reports it.
        let arriving = flight.iter().enumerate();
        for (at, sent) in arriving {
            if at != 1 || std::mem::take(&mut lost) == 0 {
                pair.deliver(sent);
            }
        }
        while let Some(sent) = pair.transmit_one(1) {
            pair.deliver(&sent);
        }
    }
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.bytes(1, sges[1]), pair.bytes(0, sges[0]));
    assert_eq!(ACKED.load(Ordering::Relaxed), LEN as u64);
    assert_eq!(LOSSES.load(Ordering::Relaxed), 1);
    // One of each flight but the first and the retransmitted ones.
    let rtts = RTTS.load(Ordering::Relaxed);
    assert!(
        (LEN as u64 / WINDOW - 3..=LEN as u64 / WINDOW + 1).contains(&rtts),
        "{rtts}"
    );
}

/// A new connection begins at the line rate.
#[test]
fn reset_forgets_congestion() {
    let mut pair = Pair::connected(setup());
    let genuine = cnp(&pair, 0, pair.nodes[0].qpn);
    pair.deliver(&genuine);
    assert_eq!(rate(&pair, 0), Some(LINE_RATE / 2));
    pair.modify(
        0,
        &Modify {
            state: Some(State::Reset),
            ..Modify::default()
        },
    );
    assert_eq!(rate(&pair, 0), None);
    pair.deliver(&genuine);
    assert_eq!(pair.counters(0).no_qp, 1, "RESET receives nothing");
}

#[test]
fn marking_keeps_the_dscp() {
    for class in 0..=255 {
        let marked = ecn::mark(class);
        assert_eq!(marked >> 2, class >> 2);
        assert_eq!(ecn::is_marked(marked), class & 3 != 0);
    }
    assert_eq!(Bth::LEN + 16 + 4, Cnp::LEN);
}

//! The rate controllers as functions of time and events: their bounds under any events, recovery,
//! and fair shares of a marked bottleneck.

#[path = "congestion/bottleneck.rs"]
mod bottleneck;

use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::congestion::{CongestionConfig, Controller, Dcqcn, DcqcnConfig, Delay, DelayConfig};
use proptest::prelude::*;

use bottleneck::{Bottleneck, jain};

/// Bytes/s of 40 Gb/s.
const LINE: u64 = 5_000_000_000;

#[derive(Clone, Copy, Debug)]
enum Event {
    Cnp,
    Sent(u64),
    Ack(Option<Duration>, u64),
    Loss,
    Timer,
}

fn event() -> impl Strategy<Value = Event> {
    let bytes = prop_oneof![0..10_000_u64, Just(u64::MAX), any::<u64>()];
    let rtt = prop_oneof![
        Just(None),
        Just(Some(Duration::ZERO)),
        Just(Some(Duration::MAX)),
        (1..10_000_u64).prop_map(|micros| Some(Duration::from_micros(micros))),
    ];
    prop_oneof![
        Just(Event::Cnp),
        bytes.clone().prop_map(Event::Sent),
        (rtt, bytes).prop_map(|(rtt, bytes)| Event::Ack(rtt, bytes)),
        Just(Event::Loss),
        Just(Event::Timer),
    ]
}

/// From no time to centuries.
fn elapsed() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => Just(0_u64),
        5 => 0..200_000_u64,
        1 => 0..u64::MAX / 8,
    ]
}

fn apply(controller: &mut dyn Controller, now: Instant, event: Event) {
    if controller.next_timer().is_some_and(|at| at <= now) {
        controller.on_timer(now);
    }
    match event {
        Event::Cnp => controller.on_cnp(now),
        Event::Sent(bytes) => controller.on_sent(now, bytes),
        Event::Ack(rtt, bytes) => controller.on_ack(now, rtt, bytes),
        Event::Loss => controller.on_loss(now),
        Event::Timer => controller.on_timer(now),
    }
}

fn dcqcn() -> impl Strategy<Value = DcqcnConfig> {
    let time = prop_oneof![
        Just(Duration::from_micros(55)),
        Just(Duration::ZERO),
        Just(Duration::MAX)
    ];
    let bytes = prop_oneof![Just(10_000_000_u64), Just(0), Just(u64::MAX)];
    (any::<u32>(), time.clone(), time, bytes, any::<u32>(), any::<u64>()).prop_map(
        |(gain_shift, alpha_timer, rate_timer, byte_counter, fast_recovery, increase)| DcqcnConfig {
            gain_shift,
            alpha_timer,
            rate_timer,
            byte_counter,
            fast_recovery,
            additive_increase: increase,
            hyper_increase: increase,
        },
    )
}

fn delay() -> impl Strategy<Value = DelayConfig> {
    let target = prop_oneof![
        Just(Duration::from_micros(100)),
        Just(Duration::ZERO),
        Just(Duration::MAX)
    ];
    let bytes = any::<[u64; 2]>();
    (target, bytes, any::<u32>(), any::<u32>(), any::<u32>()).prop_map(
        |(target, [initial_window, increase], patience, gain, max_decrease)| DelayConfig {
            target,
            initial_window,
            increase,
            patience,
            gain,
            max_decrease,
        },
    )
}

fn limits() -> impl Strategy<Value = CongestionConfig> {
    let rate = prop_oneof![Just(LINE), Just(0), Just(u64::MAX), any::<u64>()];
    (rate.clone(), rate).prop_map(|(line_rate, min_rate)| CongestionConfig {
        line_rate,
        min_rate,
        ..CongestionConfig::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Debug builds check arithmetic: an overflow fails the test.
    #[test]
    fn dcqcn_is_between_the_minimum_and_the_line_rate_after_any_events(
        limits in limits(),
        config in dcqcn(),
        events in proptest::collection::vec((elapsed(), event()), 0..200),
    ) {
        let mut dcqcn = Dcqcn::new(&limits, config);
        let line = limits.line_rate.max(1);
        let mut now = Instant::ZERO;
        for (elapsed, event) in events {
            now = Instant(now.0.saturating_add(elapsed));
            let before = dcqcn.rate();
            apply(&mut dcqcn, now, event);
            if let Some(rate) = dcqcn.rate() {
                prop_assert!(rate <= line && rate >= limits.min_rate.clamp(1, line), "{rate}");
                let lower = before.is_none_or(|before| rate < before);
                prop_assert!(!lower || matches!(event, Event::Cnp), "{event:?} lowered the rate");
            }
            prop_assert!(dcqcn.alpha() <= 1 << 32);
        }
    }

    #[test]
    fn a_window_is_between_the_minimum_and_the_line_rate_after_any_events(
        limits in limits(),
        config in delay(),
        events in proptest::collection::vec((elapsed(), event()), 0..200),
    ) {
        let mut delay = Delay::new(&limits, config);
        let line = limits.line_rate.max(1);
        let mut now = Instant::ZERO;
        for (elapsed, event) in events {
            now = Instant(now.0.saturating_add(elapsed));
            let before = delay.window().unwrap_or(0);
            apply(&mut delay, now, event);
            let window = delay.window().unwrap_or(0);
            prop_assert!(window >= 1);
            if let Some(rate) = delay.rate() {
                prop_assert!(rate <= line && rate >= limits.min_rate.clamp(1, line), "{rate}");
            }
            let may_change = !matches!(event, Event::Sent(_) | Event::Timer);
            prop_assert!(may_change || window == before);
        }
    }

    /// What it would be had each timer been served when it was due.
    #[test]
    fn a_late_timer_is_as_good_as_many(
        cnps in proptest::collection::vec(0..500_000_u64, 1..20),
        idle in 0..20_000_000_u64,
    ) {
        let limits = limits_of(LINE);
        let (mut late, mut punctual) = [(); 2].map(|()| Dcqcn::new(&limits, DcqcnConfig::default())).into();
        let mut now = Instant::ZERO;
        for elapsed in cnps.into_iter().map(Some).chain([None]) {
            let until = now + Duration::from_nanos(elapsed.unwrap_or(idle));
            while let Some(at) = punctual.next_timer().filter(|at| *at <= until) {
                punctual.on_timer(at);
            }
            now = until;
            late.on_timer(now);
            if elapsed.is_some() {
                late.on_cnp(now);
                punctual.on_cnp(now);
            }
        }
        let rates = [&late, &punctual].map(|dcqcn| dcqcn.rate().unwrap_or(LINE));
        // The steps beyond MAX_STEPS are taken at once, and rounded once.
        prop_assert!(rates[0].abs_diff(rates[1]) <= LINE >> 9, "{rates:?}");
    }
}

fn limits_of(line_rate: u64) -> CongestionConfig {
    CongestionConfig {
        line_rate,
        min_rate: LINE / 400,
        ..CongestionConfig::default()
    }
}

#[test]
fn the_first_cnp_halves_the_rate_and_the_timer_restores_it() {
    let mut dcqcn = Dcqcn::new(&limits_of(LINE), DcqcnConfig::default());
    assert_eq!((dcqcn.rate(), dcqcn.next_timer()), (None, None));
    dcqcn.on_cnp(Instant::ZERO);
    let mut rates = vec![dcqcn.rate()];
    for period in 1..=7 {
        dcqcn.on_timer(Instant::ZERO + period * Duration::from_micros(55));
        rates.push(dcqcn.rate());
    }
    // Fast recovery: half of the distance to the rate before the CNP, 4 times; then the target
    // rate would rise, but is the line rate.
    let expected = [2, 4, 8, 16, 32, 64, 128, 256].map(|parts| Some(LINE - LINE / parts));
    assert_eq!(rates[..5], expected[..5]);
    assert!(rates[5] < rates[6] && rates[6] < rates[7]);
}

/// A CNP at the minimum, and none after: additive increases take it to the line rate.
#[test]
fn the_rate_recovers_within_the_periods_of_the_increases() {
    let config = DcqcnConfig::default();
    let limits = limits_of(LINE);
    let mut dcqcn = Dcqcn::new(&limits, config);
    for cnp in 0..1000_u64 {
        dcqcn.on_cnp(Instant(cnp * 50_000));
    }
    assert_eq!(dcqcn.rate(), Some(limits.min_rate));
    let periods = u64::from(config.fast_recovery) + (LINE - limits.min_rate) / config.additive_increase + 11;
    let mut taken = 0;
    while let Some(at) = dcqcn.next_timer() {
        dcqcn.on_timer(at);
        taken += 1;
        assert!(taken <= periods, "{:?}", dcqcn.rate());
    }
    assert_eq!(dcqcn.rate(), None);
}

/// Both counters past fast recovery.
#[test]
fn bytes_and_time_together_increase_it_faster() {
    let rate_after = |bytes: u64| {
        let mut dcqcn = Dcqcn::new(&limits_of(LINE), DcqcnConfig::default());
        for cnp in 0..20_u64 {
            dcqcn.on_cnp(Instant(cnp * 50_000));
        }
        for _ in 0..20 {
            let at = dcqcn.next_timer().expect("it is limited");
            dcqcn.on_timer(at);
            dcqcn.on_sent(at, bytes);
        }
        dcqcn.rate().expect("it is limited")
    };
    let (timer, both) = (rate_after(0), rate_after(DcqcnConfig::default().byte_counter));
    // 13 of 20 rounds are of hyper increase: each adds 2 * 50 MB/s, instead of 5.
    assert!(both > timer + 1_000_000_000, "{timer} {both}");
}

#[test]
fn flows_through_a_marked_bottleneck_get_fair_shares() {
    for flows in [2, 4, 8, 16] {
        for seed in 0..3 {
            let limits = CongestionConfig {
                min_rate: LINE / 4000,
                ..limits_of(LINE)
            };
            let controllers = (0..flows).map(|_| Box::new(Dcqcn::new(&limits, DcqcnConfig::default())) as _);
            let mut link = Bottleneck::new(LINE, seed, controllers.collect());
            // One flow has the link to itself at first.
            link.run(Duration::from_millis(5), 1);
            link.run(Duration::from_millis(60), flows);
            let shares = link.run(Duration::from_millis(60), flows);
            assert!(jain(&shares) >= 0.95, "{flows} flows, seed {seed}: {shares:?}");
            let used: f64 = shares.iter().sum::<f64>() / LINE as f64;
            assert!(used > 0.9, "{flows} flows, seed {seed}: {used} of the link");
        }
    }
}

#[test]
fn windows_get_fair_shares_of_a_bottleneck_without_marks() {
    for flows in [2, 4, 8, 16] {
        for seed in 0..3 {
            let limits = limits_of(LINE);
            let controllers = (0..flows).map(|_| Box::new(Delay::new(&limits, DelayConfig::default())) as _);
            let mut link = Bottleneck::new(LINE, seed, controllers.collect());
            link.run(Duration::from_millis(5), 1);
            link.run(Duration::from_millis(60), flows);
            let shares = link.run(Duration::from_millis(60), flows);
            assert!(jain(&shares) >= 0.95, "{flows} flows, seed {seed}: {shares:?}");
            let used: f64 = shares.iter().sum::<f64>() / LINE as f64;
            assert!(used > 0.9, "{flows} flows, seed {seed}: {used} of the link");
        }
    }
}

/// Its maximum, which it reaches in a few rounds.
fn full_window(delay: &mut Delay) -> Option<u64> {
    for _ in 0..5 {
        delay.on_ack(Instant::ZERO, Some(Duration::from_micros(20)), LINE);
    }
    let full = delay.window();
    assert_eq!(full, Some(LINE / 10_000));
    full
}

/// As of a device of which no thread runs when a packet arrives: most round trips are long.
#[test]
fn a_window_ignores_round_trips_that_a_sleeping_peer_lengthened() {
    let mut delay = Delay::new(&limits_of(LINE), DelayConfig::default());
    let full = full_window(&mut delay);
    for sample in 0..10_000_u32 {
        let rtt = if sample % 8 == 0 { 40 } else { 3000 };
        delay.on_ack(Instant::ZERO, Some(Duration::from_micros(rtt)), 65_536);
    }
    assert_eq!(delay.window(), full);
    // All of them long: a queue, until the window is a rate below one packet per round trip.
    for _ in 0..10_000 {
        delay.on_ack(Instant::ZERO, Some(Duration::from_micros(3000)), 65_536);
    }
    assert_eq!(delay.rate(), Some(limits_of(LINE).min_rate));
}

#[test]
fn a_loss_without_delay_is_not_congestion() {
    let mut delay = Delay::new(&limits_of(LINE), DelayConfig::default());
    let full = full_window(&mut delay);
    delay.on_loss(Instant::ZERO);
    assert_eq!(delay.window(), full);
    delay.on_ack(Instant::ZERO, Some(Duration::from_micros(500)), u64::MAX);
    delay.on_ack(Instant::ZERO, Some(Duration::from_micros(500)), 1);
    delay.on_loss(Instant::ZERO);
    assert_eq!(delay.window(), full.map(|full| full / 2));
}

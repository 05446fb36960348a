//! The charts of the book's page on congestion control: the committed files are the simulator's
//! output; after a change, DOORBELL_WRITE_CHARTS=1 writes them anew.

use std::path::Path;

use doorbell_collectives::simulate::{Axis, Line, Panel, figure};
use doorbell_fabric::scenario::{Control, Interval, completion, convergence};

/// Of the flows of `convergence`.
const FLOWS: usize = 4;
/// Senders of an incast, as powers of two.
const SENDERS: [u32; 5] = [1, 2, 3, 4, 5];

fn compare(name: &str, svg: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs/book/src")
        .join(name);
    if std::env::var_os("DOORBELL_WRITE_CHARTS").is_some() {
        std::fs::write(&file, svg).expect("the book's folder is writable");
    }
    assert!(
        std::fs::read_to_string(&file).is_ok_and(|committed| committed == svg),
        "docs/book/src/{name} is another: DOORBELL_WRITE_CHARTS=1 writes it"
    );
}

fn milliseconds() -> Axis {
    Axis::new((0.0, 80.0), 20, |at| format!("{at} ms"))
}

/// A line over the intervals, each at its middle.
fn over_time(style: usize, intervals: &[Interval], value: impl Fn(&Interval) -> Option<f64>) -> Line {
    let points = intervals
        .iter()
        .filter_map(|interval| Some((interval.end as f64 - 2.5, value(interval)?)));
    Line {
        style,
        points: points.collect(),
    }
}

#[test]
fn the_chart_of_joining_flows_matches_the_simulator() {
    let panels = [Control::Dcqcn, Control::Delay].map(|control| {
        let intervals = convergence(control, 1);
        Panel {
            title: format!("{control}: payload of each flow, Gb/s"),
            x: milliseconds(),
            y: Axis::new((0.0, 40.0), 10, |rate| rate.to_string()),
            lines: (0..FLOWS)
                .map(|flow| over_time(flow, &intervals, |interval| interval.rates.get(flow).copied()))
                .collect(),
        }
    });
    let legend: Vec<(usize, String)> = (0..FLOWS).map(|flow| (flow, format!("flow {}", flow + 1))).collect();
    compare("congestion-rates.svg", &figure(&panels, &legend));
}

#[test]
fn the_chart_of_queue_fairness_and_completion_matches_the_simulator() {
    let controls = [Control::Dcqcn, Control::Delay];
    let runs = controls.map(|control| convergence(control, 1));
    let lines = |value: fn(&Interval) -> f64| -> Vec<Line> {
        let styled = (1..).zip(&runs);
        styled
            .map(|(style, run)| over_time(style, run, |interval| Some(value(interval))))
            .collect()
    };
    // As powers of ten of a microsecond.
    let completions = |control| {
        SENDERS.map(|power| {
            let times = completion(1 << power, control, true, 1).expect("PFC loses nothing");
            (f64::from(power), times.map(|time| (time.as_secs_f64() * 1e6).log10()))
        })
    };
    let all = Control::ALL.map(completions);
    let completion_panel = |index: usize, name: &str| Panel {
        title: format!("incast with PFC, 1 MiB each: completion time, {name}"),
        x: Axis::new((1.0, 5.0), 1, |power| format!("{} senders", 1 << power)),
        y: Axis::new((2.0, 4.0), 1, |power| format!("{} ms", 10_f64.powi(power - 3))),
        lines: all
            .iter()
            .enumerate()
            .map(|(style, points)| Line {
                style,
                points: points.iter().map(|(x, times)| (*x, times[index])).collect(),
            })
            .collect(),
    };
    let panels = [
        Panel {
            title: "one more flow every 20 ms: queue, KB".into(),
            x: milliseconds(),
            y: Axis::new((0.0, 200.0), 50, |queue| queue.to_string()),
            lines: lines(|interval| interval.queue / 1000.0),
        },
        Panel {
            title: "one more flow every 20 ms: Jain's index, %".into(),
            x: milliseconds(),
            y: Axis::new((40.0, 100.0), 20, |percent| percent.to_string()),
            lines: lines(|interval| 100.0 * interval.jain),
        },
        completion_panel(0, "median"),
        completion_panel(1, "99th percentile"),
    ];
    let legend: Vec<(usize, String)> = (0..).zip(Control::ALL.map(|control| control.to_string())).collect();
    compare("congestion.svg", &figure(&panels, &legend));
}

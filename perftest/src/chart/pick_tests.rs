//! Made-up results, and their charts.

use super::*;
use crate::document::tests::document;

fn row(bytes: u64, qps: u64, depth: u64, inline: u64) -> String {
    format!(
        r#"{{"bytes":{bytes},"qps":{qps},"tx_depth":{depth},"inline_bytes":{inline},"bw_avg_bytes_per_s":{},"msg_rate_per_s":3.5}}"#,
        bytes * qps * depth
    )
}

#[test]
fn rows_that_differ_in_size_alone_are_one_series() {
    let rows = [
        row(64, 1, 16, 0),
        row(4096, 1, 16, 0),
        row(64, 8, 16, 0),
        row(4096, 8, 16, 0),
    ]
    .join(",");
    let made = charts(&[document("a.json", "hardware", &rows)]);
    assert_eq!(
        made.iter().map(|chart| chart.id.as_str()).collect::<Vec<_>>(),
        ["bandwidth", "rate"]
    );
    let names: Vec<_> = made[0].series.iter().map(|series| series.name.as_str()).collect();
    assert_eq!(names, ["1 QP", "8 QPs"]);
    assert_eq!(
        made[0].series[1].points[0].written,
        ("64".to_owned(), "8192".to_owned())
    );
    assert_eq!(
        (&made[0].banner, made[0].x.label.as_str()),
        (&None, "message size (bytes)")
    );
}

#[test]
fn depths_that_follow_from_the_size_split_no_series() {
    let rows = [row(64, 1, 128, 0), row(4096, 1, 64, 0), row(65536, 1, 32, 0)].join(",");
    let made = charts(&[document("a.json", "hardware", &rows)]);
    assert_eq!((made[0].series.len(), made[0].series[0].points.len()), (1, 3));
}

#[test]
fn what_was_swept_at_one_size_is_the_x_axis() {
    let rows = [
        row(64, 1, 1, 0),
        row(64, 1, 16, 0),
        row(64, 2, 1, 0),
        row(64, 2, 16, 0),
        row(64, 2, 64, 0),
    ]
    .join(",");
    let made = charts(&[document("a.json", "soft-udp", &rows)]);
    assert_eq!(
        (made[0].x.label.as_str(), made[0].series.len()),
        ("requests in flight per queue pair", 2)
    );
    assert!(made[0].banner.as_ref().unwrap().contains("not an RDMA adapter"));
}

#[test]
fn many_series_are_spread_over_charts_and_none_is_lost() {
    let mut rows = Vec::new();
    for qps in [1, 2, 8] {
        for depth in [1, 16, 128] {
            for inline in [0, 64] {
                rows.extend([64, 4096].map(|bytes| row(bytes, qps, depth, inline)));
            }
        }
    }
    let made = charts(&[document("a.json", "hardware", &rows.join(","))]);
    let bandwidth: Vec<_> = made.iter().filter(|chart| chart.kind == "bandwidth").collect();
    assert!(bandwidth.len() > 1 && bandwidth.iter().all(|chart| chart.series.len() <= MAX_SERIES));
    let points: BTreeSet<_> = bandwidth
        .iter()
        .flat_map(|chart| {
            chart
                .series
                .iter()
                .flat_map(|series| series.points.iter().map(|point| point.row))
        })
        .collect();
    assert_eq!(points.len(), rows.len());
    assert_eq!(bandwidth[0].id, "bandwidth-1");
    assert!(
        bandwidth.iter().all(|chart| chart.y == bandwidth[0].y),
        "charts shown together have one scale"
    );
}

#[test]
fn latencies_have_percentiles_and_a_distribution() {
    let rows = r#"{"bytes":2,"lat_min_ns":1,"lat_p50_ns":2,"lat_p99_ns":4,"lat_max_ns":9,"lat_cdf":[[0.0,1],[0.5,2],[1.0,9]]},
        {"bytes":4,"lat_min_ns":1,"lat_p50_ns":3,"lat_p99_ns":5,"lat_max_ns":8}"#;
    let made = charts(&[document("a.json", "soft-local", rows)]);
    let ids: Vec<_> = made.iter().map(|chart| chart.id.as_str()).collect();
    assert_eq!(ids, ["latency", "percentiles", "cdf"]);
    assert_eq!(
        made[2].series[0]
            .points
            .iter()
            .map(|p| p.metric)
            .collect::<BTreeSet<_>>()
            .len(),
        1
    );
    assert_eq!(made[2].series[1].points.len(), 4);
}

#[test]
fn lines_that_bound_the_link_are_in_and_others_are_not() {
    let mut result = document("a.json", "soft-udp", &row(64, 1, 1, 0));
    let limit = |name: &str, is_time| crate::document::Limit {
        name: name.into(),
        metric: Metric {
            value: 5e9,
            text: "5e9".into(),
        },
        is_time,
    };
    result.limits = vec![limit("memcpy", false), limit("udp_gso", false), limit("udp_gso", true)];
    let made = charts(&[result.clone()]);
    assert_eq!(
        made[0].marks.iter().map(|mark| mark.name.as_str()).collect::<Vec<_>>(),
        ["limit udp_gso"]
    );
    result.link = "hardware".into();
    result.line_rate = Some(Metric {
        value: 12.5e9,
        text: "12500000000.0".into(),
    });
    let made = charts(&[result]);
    assert_eq!(made[0].marks.len(), 1);
    assert!(made[0].marks[0].is_line_rate && made[0].y.scale.place(12.5e9) <= 1.0);
}

#[test]
fn every_chart_has_a_name_for_the_command_line() {
    for kind in CHART_KINDS {
        assert!(ids().contains(&kind.id));
    }
}

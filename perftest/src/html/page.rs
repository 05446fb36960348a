//! The HTML page.

use super::caveats;
use crate::chart::{Chart, Layout, STYLES, Unit, draw, escape};
use crate::document::{Document, Kind, PARAMETERS, Row};

/// Nothing is loaded and nothing runs, whatever gets into the page.
const POLICY: &str = include_str!("policy.txt");
/// The icon, which browsers would otherwise request from the server.
const ICON: &str = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M8 1a5 5 0 0 0-5 5v4l-2 3h14l-2-3V6a5 5 0 0 0-5-5z' fill='%230b63ce'/%3E%3C/svg%3E";

const STYLE: &str = include_str!("page.css");

macro_rules! columns {
    ($($key:literal $head:literal $unit:ident $what:literal;)*) => {
        &[$(($key, $head, Unit::$unit, $what)),*]
    };
}

/// Columns of the tables, parameters first: the field, the column's head, its unit and its
/// description.
const COLUMNS: &[(&str, &str, Unit, &str)] = columns! {
    "qps" "QPs" Count "queue pairs";
    "tx_depth" "Depth" Count "requests in flight per queue pair";
    "post_list" "Post list" Count "requests per doorbell";
    "inline_bytes" "Inline" Count "messages up to so many bytes are copied into the request";
    "ranks" "Ranks" Count "processes";
    "paced_rate_per_s" "Paced" PerS "messages were meant to start at this rate";
    "bw_avg_bytes_per_s" "BW average" BytesPerS "bytes of all messages by the time of the whole measurement";
    "bw_ci95_bytes_per_s" "± 95 %" BytesPerS "half the 95 % confidence interval of the mean over the repeats";
    "bw_peak_bytes_per_s" "BW peak" BytesPerS "the best stretch of the measurement";
    "msg_rate_per_s" "Messages" PerS "messages by the time of the whole measurement";
    "lat_min_ns" "min" Ns "the shortest";
    "lat_p50_ns" "p50" Ns "half of the messages took at most so long";
    "lat_ci95_ns" "± 95 %" Ns "half the 95 % confidence interval of the mean of the medians of the repeats";
    "lat_p90_ns" "p90" Ns "90 % of the messages took at most so long";
    "lat_p99_ns" "p99" Ns "99 % of the messages took at most so long";
    "lat_p999_ns" "p99.9" Ns "99.9 % of the messages took at most so long";
    "lat_p9999_ns" "p99.99" Ns "99.99 % of the messages took at most so long";
    "lat_max_ns" "max" Ns "the longest";
    "lat_avg_ns" "mean" Ns "the mean";
    "lat_stddev_ns" "stddev" Ns "the standard deviation";
    "time_us" "Time" Us "mean time of a call over all ranks";
    "algbw_bytes_per_s" "Alg. BW" BytesPerS "bytes by time";
    "busbw_bytes_per_s" "Bus BW" BytesPerS "the same, scaled to what each link carries, as nccl-tests does";
    "raw_copy_bytes_per_s" "Raw copy" BytesPerS "bandwidth of the GPUs' own copies of this size";
    "cpu_user_cores" "CPU user" Count "processors busy in the program";
    "cpu_system_cores" "CPU system" Count "processors busy in the kernel";
    "iterations" "Messages sent" Count "messages measured";
    "repeats" "Repeats" Count "measurements of this row";
};

const SETTINGS: [(&str, &str); 11] = [
    ("bytes", "Sizes (bytes)"),
    ("qps", "Queue pairs"),
    ("tx_depth", "Depth"),
    ("post_list", "Post list"),
    ("cq_mod", "Completion every"),
    ("inline_bytes", "Inline up to (bytes)"),
    ("iterations", "Messages each"),
    ("duration_s", "Seconds each"),
    ("repeat", "Repeats"),
    ("rate_per_s", "Paced (per second)"),
    ("mtu", "MTU (bytes)"),
];

pub(super) fn page(documents: &[Document], charts: &[Chart]) -> String {
    let mut out = String::new();
    let (light, dark, rules) = STYLES();
    let title = title(documents);
    let policy = POLICY.trim_end();
    out += &format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
             <link rel=\"icon\" href=\"{ICON}\">\n<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{rules}\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
    );
    out += &format!("<header>\n<p class=\"tool\">doorbell report</p>\n<h1>{title}</h1>\n</header>\n");
    banner(&mut out, documents);
    out.push_str("<section class=\"sources\" aria-label=\"What was measured\">\n");
    for document in documents {
        source(&mut out, document, documents.len() > 1);
    }
    out.push_str("</section>\n");
    for chart in charts {
        metric(&mut out, chart);
    }
    caveats::section(&mut out, documents);
    out.push_str("<section aria-label=\"All figures\">\n<h2>All figures</h2>\n");
    for (number, document) in documents.iter().enumerate() {
        table(&mut out, number, document);
    }
    out.push_str("</section>\n");
    out += &format!(
        "<footer>Made by doorbell {}. This page loads nothing and runs nothing.</footer>\n</main>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
    out
}

/// The tests and devices, in few words.
fn title(documents: &[Document]) -> String {
    let mut names: Vec<_> = documents
        .iter()
        .map(|document| format!("{} on {}", document.title(), document.device))
        .collect();
    names.dedup();
    if names.len() > 3 {
        names.truncate(3);
        names.push("and more".into());
    }
    escape(&names.join(", "))
}

/// The banner of software devices: for each link kind, the results measured on it.
fn banner(out: &mut String, documents: &[Document]) {
    let mut links: Vec<(&Document, Vec<&str>)> = Vec::new();
    for document in documents.iter().filter(|document| document.is_software()) {
        match links.iter_mut().find(|(first, _)| first.link == document.link) {
            Some((_, files)) => files.push(&document.file),
            None => links.push((document, vec![&document.file])),
        }
    }
    for (document, files) in links {
        let which = match documents.len() {
            1 => String::new(),
            _ => format!("{}: ", files.join(", ")),
        };
        *out += &format!(
            "<p class=\"banner\" role=\"note\"><strong>{}Software device ({}).</strong> These figures are of {}, not of an RDMA adapter.</p>\n",
            escape(&which),
            escape(&document.link),
            document.link_description()
        );
    }
}

fn source(out: &mut String, document: &Document, named: bool) {
    let class = if document.is_software() { "soft" } else { "hard" };
    *out += &format!("<article class=\"source {class}\">\n");
    if named {
        *out += &format!("<h2>{}</h2>\n", escape(&document.file));
    }
    out.push_str("<div class=\"best\">\n");
    for (name, value, at) in best(document) {
        *out += &format!(
            "<div><p>{name}</p><p class=\"value\">{}</p><p>{}</p></div>\n",
            escape(&value),
            escape(&at)
        );
    }
    out.push_str("</div>\n");
    let mut facts = vec![
        ("Test".to_owned(), document.test.clone()),
        ("Device".to_owned(), document.device.clone()),
        ("Link".to_owned(), document.link.clone()),
        ("Memory".to_owned(), document.memory.clone()),
        ("Version".to_owned(), format!("doorbell {}", document.version)),
    ];
    let mode = Some(&document.mode).filter(|mode| !mode.is_empty());
    facts.extend(mode.map(|mode| ("Mode".to_owned(), mode.clone())));
    facts.extend(document.peer.clone().map(|peer| ("Peer".to_owned(), peer)));
    facts.extend(document.line_rate.as_ref().map(|rate| {
        let words = format!(
            "{} ({:.0} Gb/s)",
            Unit::BytesPerS.show(rate.value),
            rate.value * 8.0 / 1e9
        );
        ("Line rate".to_owned(), words)
    }));
    list(out, &facts);
    let mut more: Vec<_> = document
        .settings
        .iter()
        .map(|(name, value)| setting(name, value))
        .collect();
    more.extend(document.limits.iter().map(|limit| {
        let unit = if limit.is_time { Unit::Ns } else { Unit::BytesPerS };
        (format!("Limit {}", limit.name), unit.show(limit.metric.value))
    }));
    if !more.is_empty() {
        out.push_str("<details><summary>Settings and limits</summary>\n");
        list(out, &more);
        out.push_str("</details>\n");
    }
    out.push_str("</article>\n");
}

fn list(out: &mut String, facts: &[(String, String)]) {
    out.push_str("<dl>\n");
    for (name, value) in facts {
        *out += &format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value));
    }
    out.push_str("</dl>\n");
}

/// Of a long list, such as the sizes of a sweep, the first, the last and the number.
fn setting(name: &str, value: &str) -> (String, String) {
    let name = SETTINGS
        .iter()
        .find_map(|(key, words)| (*key == name).then_some(*words))
        .unwrap_or(name);
    let values: Vec<_> = value.split(", ").collect();
    let value = match values.as_slice() {
        [first, .., last] if values.len() > 8 => format!("{first} to {last} ({} values)", values.len()),
        _ => value.to_owned(),
    };
    (name.to_owned(), value)
}

/// The headline results: name, value, and where they were measured.
fn best(document: &Document) -> Vec<(&'static str, String, String)> {
    let extreme = |key: &str, greatest: bool| {
        let figures = document.rows.iter().filter_map(|row| Some((row.metric(key)?, row)));
        let by =
            |a: &(crate::document::Metric, &Row), b: &(crate::document::Metric, &Row)| a.0.value.total_cmp(&b.0.value);
        if greatest {
            figures.max_by(by)
        } else {
            figures.min_by(by)
        }
    };
    let wanted: &[(&str, &str, Unit, bool)] = match document.kind {
        Kind::Bandwidth => &[
            ("Best bandwidth", "bw_avg_bytes_per_s", Unit::BytesPerS, true),
            ("Best message rate", "msg_rate_per_s", Unit::PerS, true),
        ],
        Kind::Latency => &[
            ("Lowest median", "lat_p50_ns", Unit::Ns, false),
            ("Lowest p99", "lat_p99_ns", Unit::Ns, false),
            ("Lowest p99.9", "lat_p999_ns", Unit::Ns, false),
        ],
        Kind::Collective => &[
            ("Best bus bandwidth", "busbw_bytes_per_s", Unit::BytesPerS, true),
            ("Shortest call", "time_us", Unit::Us, false),
        ],
    };
    wanted
        .iter()
        .filter_map(|(name, key, unit, greatest)| {
            let (metric, row) = extreme(key, *greatest)?;
            let mut at = format!("at {}", Unit::Bytes.show(row.bytes as f64));
            for (key, before, after) in [("qps", "", " QPs"), ("tx_depth", "depth ", ""), ("ranks", "", " ranks")] {
                // 1 is the minimum of each parameter.
                if let Some(value) = row.parameter(key).filter(|value| value != "1") {
                    at += &format!(", {before}{value}{after}");
                }
            }
            Some((*name, unit.show(metric.value), at))
        })
        .collect()
}

fn metric(out: &mut String, chart: &Chart) {
    *out += &format!(
        "<figure class=\"chart\" id=\"{0}\">\n<h2>{1}</h2>\n<p class=\"about\">{2}</p>\n{3}{4}",
        escape(&chart.id),
        escape(&chart.title),
        escape(&chart.about),
        draw(chart, &Layout::WIDE),
        draw(chart, &Layout::NARROW)
    );
    *out += &format!(
        "<details><summary>These figures as a table</summary>\n<div class=\"scroll\" tabindex=\"0\"><table>\n<thead><tr><th scope=\"col\">series</th><th scope=\"col\">{}</th>\
             <th scope=\"col\">{}</th></tr></thead>\n<tbody>\n",
        escape(&chart.x.label),
        escape(&chart.y.label)
    );
    for series in &chart.series {
        for point in &series.points {
            let half = point
                .half_width
                .map_or_else(String::new, |half| format!(" ± {}", chart.y.unit.show(half)));
            *out += &format!(
                "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}{}</td></tr>\n",
                escape(&series.name),
                escape(&chart.x.unit.show(point.x)),
                escape(&chart.y.unit.show(point.y)),
                escape(&half)
            );
        }
    }
    for mark in &chart.marks {
        *out += &format!(
            "<tr><th scope=\"row\">{}</th><td></td><td>{}</td></tr>\n",
            escape(&mark.name),
            escape(&chart.y.unit.show(mark.value))
        );
    }
    out.push_str("</tbody></table></div>\n</details>\n</figure>\n");
}

fn table(out: &mut String, number: usize, document: &Document) {
    let columns: Vec<_> = COLUMNS
        .iter()
        .filter(|(key, ..)| document.rows.iter().any(|row| row.parameter(key).is_some()))
        .collect();
    let words: Vec<_> = PARAMETERS
        .iter()
        .filter(|key| !COLUMNS.iter().any(|(column, ..)| column == *key))
        .filter(|key| document.rows.iter().any(|row| row.parameter(key).is_some()))
        .collect();
    *out += &format!(
        "<details{}><summary>{} ({} rows)</summary>\n<div class=\"scroll\" tabindex=\"0\"><table data-file=\"{number}\">\n<thead><tr><th scope=\"col\" title=\"message size\">Size</th>",
        if document.rows.len() <= 30 { " open" } else { "" },
        escape(&document.file),
        document.rows.len()
    );
    for (_, name, _, what) in &columns {
        *out += &format!("<th scope=\"col\" title=\"{}\">{}</th>", escape(what), escape(name));
    }
    for name in &words {
        *out += &format!("<th scope=\"col\">{}</th>", escape(name));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in &document.rows {
        *out += &format!(
            "<tr data-row=\"{}\"><th scope=\"row\">{}</th>",
            row.index,
            escape(&Unit::Bytes.show(row.bytes as f64))
        );
        for (key, _, unit, _) in &columns {
            match row.metric(key) {
                None => out.push_str("<td></td>"),
                Some(metric) => {
                    let shown = match unit {
                        Unit::Count if metric.value.fract() == 0.0 => format!("{:.0}", metric.value),
                        unit => unit.show(metric.value),
                    };
                    *out += &format!(
                        "<td data-metric=\"{key}\" data-value=\"{}\">{}</td>",
                        escape(&metric.text),
                        escape(&shown)
                    );
                }
            }
        }
        for name in &words {
            *out += &format!("<td>{}</td>", escape(&row.parameter(name).unwrap_or_default()));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n</details>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::charts;
    use crate::document::tests::document;
    use crate::report::ReportedWarning;

    #[test]
    fn a_page_says_what_it_is_of_and_loads_nothing() {
        let soft = document(
            "soft.json",
            "soft-udp",
            r#"{"bytes":64,"bw_avg_bytes_per_s":1.25,"msg_rate_per_s":2}"#,
        );
        let hard = Document {
            device: "mlx5_0".into(),
            ..document(
                "hard.json",
                "hardware",
                r#"{"bytes":64,"bw_avg_bytes_per_s":9.5,"msg_rate_per_s":2}"#,
            )
        };
        let made = page(&[soft.clone(), hard.clone()], &charts(&[soft, hard.clone()]));
        for wanted in [
            "Software device (soft-udp)",
            "mlx5_0",
            "soft.json",
            "host",
            "width=device-width",
            "data-value=\"9.5\"",
        ] {
            assert!(made.contains(wanted), "{wanted}");
        }
        for loads in ["<script", "src=", "url(", "@import", "href=\"http", "<iframe"] {
            assert!(!made.contains(loads), "{loads}");
        }
        let hard_alone = page(std::slice::from_ref(&hard), &charts(std::slice::from_ref(&hard)));
        assert!(!hard_alone.contains("class=\"banner\""));
    }

    #[test]
    fn caveats_follow_the_charts_once_for_each_kind() {
        let row = r#"{"bytes":64,"bw_avg_bytes_per_s":1.25,"msg_rate_per_s":2}"#;
        let load = |load: &str| ReportedWarning {
            code: "load".into(),
            message: format!("the load is {load}"),
        };
        let with = |file: &str, warning| Document {
            warnings: vec![warning],
            ..document(file, "soft-udp", row)
        };
        let all = [with("a.json", load("3")), with("b.json", load("5"))];
        let made = page(&all, &charts(&all));
        assert_eq!(
            made.matches("<code>load</code> (2 of 2 results): the load is 3")
                .count(),
            1
        );
        assert!(made.contains("b.json: the load is 5"));
        let at = |text: &str| made.find(text).expect(text);
        assert!(at("class=\"best\"") < at("<svg") && at("<svg") < at("Before you believe"));
    }

    #[test]
    fn hostile_text_stays_text() {
        let mut evil = document(
            "a<b>.json",
            "soft-local",
            r#"{"bytes":2,"lat_p50_ns":5,"algorithm":"<script>alert(1)</script>"}"#,
        );
        evil.device = "\"><script>alert(1)</script>".into();
        evil.warnings = vec![ReportedWarning {
            code: "<img>".into(),
            message: "<img src=x onerror=alert(1)>".into(),
        }];
        evil.settings = vec![("<b>".into(), "</style>".into())];
        evil.skipped = vec!["<iframe>".into()];
        let made = page(std::slice::from_ref(&evil), &charts(std::slice::from_ref(&evil)));
        for tag in ["<script", "<img", "<iframe", "<b>"] {
            assert!(!made.contains(tag), "{tag}");
        }
        assert_eq!(made.matches("</style>").count(), 1);
        assert!(made.contains("Before you believe a figure") && made.contains("1 points could not be measured"));
    }
}

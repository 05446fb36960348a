//! Reads back the results of `--json` and `doorbell sweep`.
//!
//! A file may come from anywhere: anything but a result is refused with the reason, text is
//! shortened to one line, and a number keeps the digits it was written with.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::failure::{Failure, one_line};
use crate::plan::Mode;
use crate::report::ReportedWarning;

const MAX_FILE_BYTES: u64 = 64 << 20;
const MAX_ROWS: usize = 200_000;
const MAX_TEXT: usize = 300;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// `doorbell bw`.
    Bandwidth,
    /// `doorbell lat`.
    Latency,
    /// `doorbell coll`.
    Collective,
}

impl Kind {
    /// The metric that every row of this kind has.
    pub(crate) fn main_metric(self) -> &'static str {
        match self {
            Kind::Bandwidth => "bw_avg_bytes_per_s",
            Kind::Latency => "lat_p50_ns",
            Kind::Collective => "busbw_bytes_per_s",
        }
    }
}

/// The parameters of a row, besides the size.
pub(crate) const PARAMETERS: [&str; 13] = [
    "qps",
    "tx_depth",
    "post_list",
    "inline_bytes",
    "paced_rate_per_s",
    "op",
    "dtype",
    "root",
    "algorithm",
    "protocol",
    "channels",
    "ranks",
    "coordinated_omission",
];

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Metric {
    pub(crate) value: f64,
    pub(crate) text: String,
}

/// A limit of the machine.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Limit {
    pub(crate) name: String,
    pub(crate) metric: Metric,
    /// Whether it is a time in ns; else a rate in bytes per second.
    pub(crate) is_time: bool,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Row {
    /// Its index in the file.
    pub(crate) index: usize,
    pub(crate) bytes: u64,
    fields: Map<String, Value>,
}

// fields: the fields of the published result schema.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Document {
    /// The file's name, without its folder.
    pub(crate) file: String,
    pub(crate) kind: Kind,
    pub(crate) version: String,
    pub(crate) test: String,
    pub(crate) device: String,
    pub(crate) link: String,
    pub(crate) memory: String,
    /// What differs from a one-way test over RC; empty where nothing does.
    pub(crate) mode: String,
    pub(crate) peer: Option<String>,
    pub(crate) line_rate: Option<Metric>,
    pub(crate) limits: Vec<Limit>,
    pub(crate) warnings: Vec<ReportedWarning>,
    pub(crate) settings: Vec<(String, String)>,
    /// The points that could not be measured, with the reason, as text.
    pub(crate) skipped: Vec<String>,
    pub(crate) rows: Vec<Row>,
}

impl Document {
    /// # Errors
    /// [`Failure::Test`] when it cannot be read, [`Failure::Usage`] when it is no result.
    pub(crate) fn read(path: &Path) -> Result<Document, Failure> {
        let name = one_line(&path.display().to_string());
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|e| Failure::test(format!("cannot read {name}: {e}")))?;
        let file = path
            .file_name()
            .map_or_else(|| name.clone(), |last| text_of(&last.to_string_lossy()));
        Document::parse(file, &bytes)
            .map_err(|reason| Failure::usage(one_line(&format!("{name} is no result of doorbell: {reason}"))))
    }

    pub(crate) fn parse(file: String, bytes: &[u8]) -> Result<Document, String> {
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(format!("it is longer than {} MiB", MAX_FILE_BYTES >> 20));
        }
        let value: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let Value::Object(top) = value else {
            return Err("it is not one JSON object".into());
        };
        if top.get("tool").and_then(Value::as_str) != Some("doorbell") {
            return Err("\"tool\" is not \"doorbell\"".into());
        }
        let test = text(&top, "test")?;
        let link = match (text(&top, "link"), test.as_str()) {
            (Err(_), "limits") => return Err("it is of doorbell limits, which has no charts".into()),
            (link, _) => link?,
        };
        if !["hardware", "kernel-soft", "soft-udp", "soft-local"].contains(&link.as_str()) {
            return Err(format!("there is no link \"{link}\""));
        }
        let rows = top
            .get("results")
            .and_then(Value::as_array)
            .ok_or("\"results\" is not an array")?;
        if rows.len() > MAX_ROWS {
            return Err(format!("it has more than {MAX_ROWS} rows"));
        }
        let first = rows.first().ok_or("it has no rows")?;
        let kind = [Kind::Bandwidth, Kind::Latency, Kind::Collective]
            .into_iter()
            .find(|kind| first.get(kind.main_metric()).is_some())
            .ok_or("its first row has no figures of bw, lat or coll")?;
        let rows = rows
            .iter()
            .enumerate()
            .map(|(index, row)| Row::read(index, row, kind).map_err(|reason| format!("row {}: {reason}", index + 1)))
            .collect::<Result<_, _>>()?;
        Ok(Document {
            kind,
            version: text(&top, "version")?,
            device: text(&top, "device")?,
            memory: text(&top, "memory")?,
            mode: mode(&top)?,
            peer: top.contains_key("peer").then(|| text(&top, "peer")).transpose()?,
            line_rate: top.get("line_rate_bytes_per_s").map(metric).transpose()?,
            limits: list(&top, "limits", limit)?.into_iter().flatten().collect(),
            warnings: list(&top, "warnings", warning)?,
            settings: match top.get("settings").or(top.get("sweep")) {
                None => Vec::new(),
                Some(settings) => object(settings)?
                    .iter()
                    .map(|(k, v)| (text_of(k), to_text(v)))
                    .collect(),
            },
            skipped: list(&top, "skipped", |point| {
                Ok(to_text(&Value::Object(object(point)?.clone())))
            })?,
            rows,
            file,
            test,
            link,
        })
    }

    /// The test, with what differs from a one-way test over RC.
    pub(crate) fn title(&self) -> String {
        match self.mode.as_str() {
            "" => self.test.clone(),
            mode => format!("{}, {mode}", self.test),
        }
    }

    pub(crate) fn is_software(&self) -> bool {
        self.link != "hardware"
    }

    pub(crate) fn link_description(&self) -> &'static str {
        match self.link.as_str() {
            "hardware" => "an RDMA adapter",
            "kernel-soft" => "a software device of the kernel",
            "soft-local" => "the userspace device, between processes of one host",
            _ => "the userspace device, over UDP",
        }
    }
}

impl Row {
    fn read(index: usize, row: &Value, kind: Kind) -> Result<Row, String> {
        let fields = object(row)?;
        let bytes = fields
            .get("bytes")
            .and_then(Value::as_u64)
            .ok_or("\"bytes\" is not a whole number")?;
        let row = Row {
            index,
            bytes,
            fields: fields.clone(),
        };
        row.number(kind.main_metric())?
            .ok_or_else(|| format!("\"{}\" is missing", kind.main_metric()))?;
        // Validates every metric now, so that later accesses cannot fail.
        for key in row.fields.keys() {
            if key == "lat_cdf" {
                row.read_cdf()?;
            } else if key.contains("_samples_") {
                row.read_samples(key)?;
            } else if is_metric(key) {
                row.number(key)?;
            }
        }
        Ok(row)
    }

    fn number(&self, key: &str) -> Result<Option<Metric>, String> {
        self.fields
            .get(key)
            .filter(|value| !value.is_null())
            .map(|value| metric(value).map_err(|reason| format!("\"{key}\" {reason}")))
            .transpose()
    }

    pub(crate) fn metric(&self, key: &str) -> Option<Metric> {
        self.number(key).ok().flatten()
    }

    pub(crate) fn parameter(&self, key: &str) -> Option<String> {
        self.fields.get(key).map(to_text)
    }

    pub(crate) fn parameter_number(&self, key: &str) -> Option<f64> {
        self.fields.get(key).and_then(Value::as_f64)
    }

    /// A metric's value in each repeat.
    pub(crate) fn samples(&self, key: &str) -> Vec<f64> {
        self.read_samples(key).unwrap_or_default()
    }

    fn read_samples(&self, key: &str) -> Result<Vec<f64>, String> {
        let Some(value) = self.fields.get(key) else {
            return Ok(Vec::new());
        };
        let samples = value.as_array().ok_or_else(|| format!("\"{key}\" is not an array"))?;
        let each = samples.iter().map(|sample| metric(sample).map(|metric| metric.value));
        each.collect::<Result<_, _>>()
            .map_err(|reason| format!("\"{key}\" {reason}"))
    }

    /// The distribution of latencies: fractions, and the ns that they did not exceed.
    pub(crate) fn cdf(&self) -> Vec<(Metric, Metric)> {
        self.read_cdf().unwrap_or_default()
    }

    fn read_cdf(&self) -> Result<Vec<(Metric, Metric)>, String> {
        let wrong = || "\"lat_cdf\" is not pairs of a fraction and a time, both rising".to_owned();
        let Some(value) = self.fields.get("lat_cdf") else {
            return Ok(Vec::new());
        };
        let pairs = value.as_array().ok_or_else(wrong)?;
        let points = pairs
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([fraction, ns]) => Ok((metric(fraction)?, metric(ns)?)),
                _ => Err(wrong()),
            })
            .collect::<Result<Vec<_>, String>>()
            .map_err(|_| wrong())?;
        let rises = points
            .is_sorted_by(|(fraction, ns), (next, next_ns)| fraction.value <= next.value && ns.value <= next_ns.value);
        if !rises || points.iter().any(|(fraction, _)| fraction.value > 1.0) {
            return Err(wrong());
        }
        Ok(points)
    }
}

fn is_metric(key: &str) -> bool {
    [
        "bw_", "msg_rate", "lat_", "busbw_", "algbw_", "time_us", "cpu_", "raw_copy",
    ]
    .iter()
    .any(|prefix| key.starts_with(prefix))
}

fn object(value: &Value) -> Result<&Map<String, Value>, String> {
    value.as_object().ok_or_else(|| "something is not an object".to_owned())
}

fn text(from: &Map<String, Value>, key: &str) -> Result<String, String> {
    from.get(key)
        .and_then(Value::as_str)
        .map(text_of)
        .ok_or_else(|| format!("\"{key}\" is not text"))
}

fn list<T>(from: &Map<String, Value>, key: &str, read: impl Fn(&Value) -> Result<T, String>) -> Result<Vec<T>, String> {
    match from.get(key) {
        None => Ok(Vec::new()),
        Some(value) => value
            .as_array()
            .ok_or_else(|| format!("\"{key}\" is not an array"))?
            .iter()
            .map(read)
            .collect::<Result<_, _>>()
            .map_err(|reason| format!("\"{key}\": {reason}")),
    }
}

fn warning(value: &Value) -> Result<ReportedWarning, String> {
    let fields = object(value)?;
    Ok(ReportedWarning {
        code: text(fields, "code")?,
        message: text(fields, "message")?,
    })
}

/// Results of older versions are of RC, one way.
fn mode(top: &Map<String, Value>) -> Result<String, String> {
    let Some(settings) = top.get("settings").or(top.get("sweep")) else {
        return Ok(String::new());
    };
    let mode = Mode::deserialize(settings).map_err(|e| format!("\"settings\": {e}"))?;
    Ok(mode.name())
}

/// JSON has no NaN, and the parser refuses numbers that do not fit in a double.
fn metric(value: &Value) -> Result<Metric, String> {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(value) if value.is_finite() && value >= 0.0 => Ok(Metric {
                value,
                text: number.to_string(),
            }),
            _ => Err(format!("is {number}, which is no figure")),
        },
        _ => Err("is not a number".into()),
    }
}

/// A rate in bytes per second or a time; other limits cannot be drawn.
fn limit(value: &Value) -> Result<Option<Limit>, String> {
    let fields = object(value)?;
    let name = text(fields, "name")?;
    let known = [("bytes_per_s", false), ("ns", true)];
    known
        .iter()
        .find_map(|(key, is_time)| Some((fields.get(*key)?, *is_time)))
        .map(|(value, is_time)| {
            Ok(Limit {
                name,
                metric: metric(value)?,
                is_time,
            })
        })
        .transpose()
}

fn text_of(text: &str) -> String {
    let keeps_direction =
        |c: &char| !matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut short: String = one_line(text).chars().filter(keeps_direction).take(MAX_TEXT).collect();
    if text.chars().count() > MAX_TEXT {
        short.push('…');
    }
    short
}

/// A value as text: strings without quotes, an object as `name value, …`.
fn to_text(value: &Value) -> String {
    match value {
        Value::String(text) => text_of(text),
        Value::Object(fields) => {
            let to_text: Vec<_> = fields
                .iter()
                .map(|(key, value)| format!("{} {}", text_of(key), to_text(value)))
                .collect();
            text_of(&to_text.join(", "))
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().take(100).map(to_text).collect();
            text_of(&items.join(", "))
        }
        other => text_of(&other.to_string()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn document(file: &str, link: &str, rows: &str) -> Document {
        let text = format!(
            r#"{{"tool":"doorbell","version":"0.1.0","test":"write_bw","device":"soft0","link":"{link}","memory":"host","results":[{rows}]}}"#
        );
        Document::parse(file.into(), text.as_bytes()).expect("a result")
    }

    #[test]
    fn values_are_read_back_to_the_digit() {
        let document = document(
            "x.json",
            "soft-udp",
            r#"{"bytes":64,"bw_avg_bytes_per_s":128.25,"msg_rate_per_s":1e22,"qps":8,"bw_samples_bytes_per_s":[1.0,2]}"#,
        );
        let row = &document.rows[0];
        assert_eq!(
            (document.kind, document.is_software(), row.bytes),
            (Kind::Bandwidth, true, 64)
        );
        assert_eq!(row.metric("bw_avg_bytes_per_s").unwrap().text, "128.25");
        assert_eq!(row.metric("msg_rate_per_s").unwrap().value, 1e22);
        assert_eq!(row.parameter("qps").as_deref(), Some("8"));
        assert_eq!(row.samples("bw_samples_bytes_per_s"), [1.0, 2.0]);
        assert_eq!(row.metric("bw_peak_bytes_per_s"), None);
    }

    #[test]
    fn invalid_results_are_refused_with_the_reason() {
        let good = r#"{"tool":"doorbell","version":"1","test":"write_lat","device":"d","link":"hardware","memory":"host","results":[{"bytes":2,"lat_p50_ns":5,"lat_cdf":[[0.5,4],[1.0,5]]}]}"#;
        assert!(Document::parse("f".into(), good.as_bytes()).is_ok());
        for (from, to, says) in [
            ("{\"tool\"", "[\"tool\"", "expected"),
            ("\"doorbell\"", "\"other\"", "tool"),
            ("\"doorbell\"", "7", "tool"),
            ("\"hardware\"", "\"hardware \\u0000x\"", "no link"),
            ("\"hardware\"", "null", "\"link\" is not text"),
            ("\"d\"", "{}", "device"),
            ("\"results\":[", "\"results\":7,\"x\":[", "results"),
            ("{\"bytes\":2", "{\"bytes\":-2", "row 1: \"bytes\""),
            ("\"lat_p50_ns\":5", "\"lat_p50_ns\":\"5\"", "not a number"),
            ("\"lat_p50_ns\":5", "\"lat_p50_ns\":-5", "no figure"),
            ("\"lat_p50_ns\":5", "\"lat_p50_ns\":1e999", "out of range"),
            ("\"lat_p50_ns\":5", "\"lat_p50_ns\":NaN", "expected"),
            ("\"lat_p50_ns\":5", "\"lat_p50_ns\":5,\"lat_max_ns\":[]", "lat_max_ns"),
            ("[0.5,4]", "[0.5,6]", "lat_cdf"),
            ("[0.5,4]", "[0.5]", "lat_cdf"),
            ("[1.0,5]", "[1.5,5]", "lat_cdf"),
        ] {
            assert!(good.contains(from), "{from}");
            let said = Document::parse("f".into(), good.replacen(from, to, 1).as_bytes()).expect_err(to);
            assert!(said.contains(says), "{to}: {said}");
        }
        for (text, says) in [("", "EOF"), ("{}", "tool"), ("[]", "object")] {
            assert!(Document::parse("f".into(), text.as_bytes()).unwrap_err().contains(says));
        }
        assert_eq!(Document::read(Path::new("/nowhere.json")).unwrap_err().status(), 1);
    }

    #[test]
    fn text_is_one_line_and_short() {
        assert_eq!(text_of("a\nb\u{202e}c"), "a bc");
        assert_eq!(text_of(&"x".repeat(1000)).chars().count(), MAX_TEXT + 1);
    }
}

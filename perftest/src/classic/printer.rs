//! Prints a run as it goes: the C tools' layout on stdout, and at the end a JSON report and whether
//! limits were met.
//!
//! The order of calls: [`Printer::waiting`] while a server waits, [`Printer::header`] when the ends
//! have agreed on the parameters, [`Printer::addresses`] when they are connected,
//! [`Printer::column_heads`] before the first row, [`Printer::rates`] or [`Printer::latencies`] for
//! each size, and [`Printer::finish`], also after Ctrl-C.

use super::json;
use super::layout::{self, Address, Header, Latencies, Rates, Side};
use super::settings::{Settings, SingleMetric};
use crate::failure::Failure;
use crate::output::Output;
use crate::report::print_line;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Directions {
    /// What this end sent.
    pub(crate) local: Rates,
    /// What the peer sent.
    pub(crate) remote: Rates,
}

/// A row of results, with this end's CPU use.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum ResultRow {
    Rates {
        /// Both directions together.
        total: Rates,
        /// Each direction, in a bidirectional test.
        directions: Option<Directions>,
        /// CPU use of this end in percent of one core.
        cpu_percent: f64,
    },
    Latencies {
        figures: Latencies,
        cpu_percent: f64,
    },
}

#[derive(Debug)]
pub(crate) struct Printer<'a> {
    settings: &'a Settings,
    report: Option<Output>,
    header: Option<Header>,
    lines: Vec<ResultRow>,
    cycles_per_ns: f64,
    headed: bool,
}

impl<'a> Printer<'a> {
    /// # Errors
    /// [`Failure::Test`] where the report file cannot be created.
    pub(crate) fn new(settings: &'a Settings) -> Result<Printer<'a>, Failure> {
        let report = settings.output.json.as_deref().map(Output::begin).transpose()?;
        Ok(Printer {
            settings,
            report,
            header: None,
            lines: Vec::new(),
            cycles_per_ns: 1.0,
            headed: false,
        })
    }

    pub(crate) fn set_cycles_per_ns(&mut self, cycles_per_ns: f64) {
        self.cycles_per_ns = cycles_per_ns;
    }

    /// Before the header, before this end accepts: the notice of `-l`, and that it waits.
    pub(crate) fn waiting(&self) -> Result<(), Failure> {
        if self.settings.list_moderates {
            self.print(&layout::post_list_notice())?;
        }
        // With --reversed the C tools' client prints it.
        if self.settings.receives() {
            self.print(&layout::waiting())
        } else {
            Ok(())
        }
    }

    pub(crate) fn waiting_for_queue_pairs(&self) -> Result<(), Failure> {
        self.print(&layout::waiting_for_queue_pairs())
    }

    pub(crate) fn header(&mut self, header: &Header) -> Result<(), Failure> {
        self.print(&layout::header(self.settings, header))?;
        self.header = Some(header.clone());
        Ok(())
    }

    pub(crate) fn addresses(&self, local: &[Address], remote: &[Address]) -> Result<(), Failure> {
        for (side, addresses) in [(Side::Local, local), (Side::Remote, remote)] {
            for address in addresses {
                self.print(&layout::address(self.settings, side, address))?;
            }
        }
        self.print(layout::RULE)
    }

    /// Prints the column heads. The passive end of READs and atomics prints none for latency.
    pub(crate) fn column_heads(&mut self) -> Result<(), Failure> {
        self.headed = true;
        self.print(&layout::column_heads(self.settings))
    }

    pub(crate) fn rates(
        &mut self,
        total: Rates,
        directions: Option<Directions>,
        cpu_percent: f64,
    ) -> Result<(), Failure> {
        let output = &self.settings.output;
        self.lines.push(ResultRow::Rates {
            total,
            directions,
            cpu_percent,
        });
        match output.only {
            Some(SingleMetric::Bandwidth) => print_line(&layout::single_value(layout::bandwidth(
                output,
                total.average_bytes_per_s,
            ))),
            Some(SingleMetric::MessageRate) => print_line(&layout::single_value(total.messages_per_s / 1e6)),
            Some(SingleMetric::Latency) => Ok(()),
            None => self.print(&layout::rates(output, &total, cpu_percent)),
        }
    }

    /// Prints a row of latency, and with `-H` or `-U` every sample before it.
    pub(crate) fn latencies(
        &mut self,
        figures: Latencies,
        samples_ns: Option<&[f64]>,
        cpu_percent: f64,
    ) -> Result<(), Failure> {
        let output = &self.settings.output;
        self.lines.push(ResultRow::Latencies { figures, cpu_percent });
        if output.only.is_some() {
            return print_line(&layout::single_value(layout::time(
                output,
                figures.avg_ns,
                self.cycles_per_ns,
            )));
        }
        if let Some(samples) = samples_ns {
            self.print(&layout::samples(output, samples, self.cycles_per_ns))?;
            // The column heads are repeated, because thousands of lines may lie between.
            self.print(&format!("{}\n{}", layout::RULE, layout::column_heads(self.settings)))?;
        }
        self.print(&layout::latencies(
            self.settings,
            &figures,
            self.cycles_per_ns,
            cpu_percent,
        ))
    }

    /// Ends the run: the last rule, both directions, the JSON report, the limits of `-w` and `-y`.
    ///
    /// # Errors
    /// [`Failure::Test`] where a limit was missed or the report cannot be written; as
    /// [`print_line`].
    pub(crate) fn finish(self) -> Result<(), Failure> {
        let settings = self.settings;
        if self.headed {
            self.print(layout::RULE)?;
        }
        if settings.output.both
            && !settings.all
            && let Some(ResultRow::Rates {
                directions: Some(directions),
                cpu_percent,
                ..
            }) = self.lines.last()
        {
            for (name, rates) in [("Local", &directions.local), ("Remote", &directions.remote)] {
                self.print(&format!("\n {name} results: \n{}", layout::RULE))?;
                self.print(&layout::column_heads(settings))?;
                self.print(&layout::rates(&settings.output, rates, *cpu_percent))?;
                self.print(layout::RULE)?;
            }
        }
        let limits = if settings.is_server() {
            Ok(())
        } else {
            self.check_limits()
        };
        if let (Some(output), Some(header)) = (self.report, &self.header) {
            json::write(output, &json::report(settings, header, &self.lines, self.cycles_per_ns))?;
        }
        limits
    }

    fn check_limits(&self) -> Result<(), Failure> {
        let (settings, output) = (self.settings, &self.settings.output);
        for line in &self.lines {
            let ResultRow::Rates { total, .. } = line else { continue };
            let (average, rate) = (
                layout::bandwidth(output, total.average_bytes_per_s),
                total.messages_per_s / 1e6,
            );
            let below = |name: &str, limit: Option<f64>, value: f64, unit: &str| match limit {
                // Not `value < limit`: NaN is a miss.
                Some(limit) if value < limit || value.is_nan() => Err(Failure::test(format!(
                    "{name} of {} B messages is {value:.6} {unit}, below the limit of {limit} {unit}",
                    total.bytes
                ))),
                _ => Ok(()),
            };
            let unit = if output.gbits { "Gb/s" } else { "MiB/s" };
            below("average bandwidth", settings.least_bandwidth, average, unit)?;
            below("message rate", settings.least_rate, rate, "Mpps")?;
        }
        Ok(())
    }

    /// Prints lines, unless `--output` restricts the output to one value.
    fn print(&self, text: &str) -> Result<(), Failure> {
        match self.settings.output.only {
            Some(_) => Ok(()),
            None => print_line(text),
        }
    }
}

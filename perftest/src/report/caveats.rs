//! What to know about the figures of a run: one line that names all, or each with its advice.

use super::{ReportedWarning, Warning};

/// The warnings of a run. With `verbose` each is printed when it is found; without it one line
/// names them all when the run ends.
#[derive(Debug)]
pub(crate) struct Caveats {
    verbose: bool,
    found: Vec<Warning>,
}

impl Caveats {
    pub(crate) fn new(verbose: bool) -> Caveats {
        Caveats {
            verbose,
            found: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, warnings: impl IntoIterator<Item = Warning>) {
        for warning in warnings {
            if self.verbose {
                eprintln!("doorbell: warning: {warning}");
            }
            self.found.push(warning);
        }
    }

    /// Ends the run: prints the line, and returns what a report has of them.
    pub(crate) fn finish(self) -> Vec<ReportedWarning> {
        if let Some(line) = self.line() {
            eprintln!("{line}");
        }
        self.found.iter().map(ReportedWarning::from).collect()
    }

    fn line(&self) -> Option<String> {
        let codes = distinct(self.found.iter().map(|warning| warning.code.name()));
        let plural = match codes.len() {
            0 => return None,
            1 => "",
            _ => "s",
        };
        (!self.verbose).then(|| {
            format!(
                "doorbell: warning: {} caveat{plural}: {} (-v explains)",
                codes.len(),
                codes.join(", ")
            )
        })
    }
}

/// Each code once, in the order of its first.
pub(crate) fn distinct<'a>(codes: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut each = Vec::new();
    for code in codes {
        if !each.contains(&code) {
            each.push(code);
        }
    }
    each
}

#[cfg(test)]
mod tests {
    use super::super::{Code, LinkKind};
    use super::*;

    #[test]
    fn one_line_names_each_once() {
        let mut caveats = Caveats::new(false);
        assert_eq!(caveats.line(), None);
        caveats.add([Warning::not_hardware(LinkKind::SoftUdp)]);
        assert_eq!(
            caveats.line().as_deref(),
            Some("doorbell: warning: 1 caveat: not-hardware (-v explains)")
        );
        caveats.add([Warning::verifying(), Code::Verifying.warning("again")]);
        assert_eq!(
            caveats.line().as_deref(),
            Some("doorbell: warning: 2 caveats: not-hardware, verifying (-v explains)")
        );
        assert_eq!(caveats.finish().len(), 3);
    }
}

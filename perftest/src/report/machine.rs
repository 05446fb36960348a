//! Where and when a result was measured.

use std::fs;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::failure::one_line;

/// The machine of this end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) host: String,
    /// Its model, as `/proc/cpuinfo` has it; the architecture where that has none.
    pub(crate) processor: String,
    /// The cores that this process may use.
    pub(crate) cores: usize,
    /// The release of the kernel.
    pub(crate) kernel: String,
}

impl Machine {
    pub(crate) fn this() -> Machine {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let host = nix::unistd::gethostname().unwrap_or_default();
        Machine {
            host: one_line(&host.to_string_lossy()),
            processor: model(&read("/proc/cpuinfo")).unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: one_line(read("/proc/sys/kernel/osrelease").trim()),
        }
    }
}

fn model(cpuinfo: &str) -> Option<String> {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let (_, model) = fields.find(|(key, _)| key.trim() == "model name")?;
    Some(one_line(model.trim()))
}

/// The time now, in UTC, as RFC 3339 writes it.
pub(crate) fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_that_of_the_first_processor() {
        let two =
            "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t: a\n\nprocessor\t: 1\nmodel name\t: Other\n";
        assert_eq!(model(two).as_deref(), Some("Some CPU @ 2.0GHz"));
        assert_eq!(model("processor\t: 0\nBogoMIPS\t: 50.00\n"), None);
    }
}

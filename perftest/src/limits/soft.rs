//! The performance of the userspace device: each value from a test of this command, with both ends
//! as separate processes.

use std::process::{Command, Stdio};
use std::time::Duration;

use doorbell_softroce::{DeviceConfig, limits};
use serde_json::Value;

use super::Figure;
use super::goal::Goal;
use super::machine::reason;
use crate::report::LinkKind;

/// The name of the CPU use of an idle device.
pub(super) const IDLE: &str = "idle_cpu";
pub(super) const IDLE_WHAT: &str = "processor time of a process whose device nobody uses";
/// A thousandth of a CPU: the resolution of the clock plus one poll of the port.
pub(super) const IDLE_GOAL: Goal = Goal::RatioAtMost(0.001);

/// A measurement of the device.
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) bytes: u64,
    /// The name of the limit that it is compared with.
    pub(super) against: &'static str,
    pub(super) goal: Goal,
    test: Test,
    path: Path,
}

/// The test that measures it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Test {
    Bandwidth,
    /// Message rate with a post list of 32.
    Rate,
    Latency,
}

/// The path of the messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// UDP over loopback.
    Udp,
    /// Between processes of this host, in shared memory.
    Shared,
    /// Between processes of this host, in private memory.
    Foreign,
}

impl Path {
    const fn link(self) -> (LinkKind, &'static str) {
        match self {
            Path::Udp => (LinkKind::SoftUdp, "udp"),
            Path::Shared | Path::Foreign => (LinkKind::SoftLocal, "local"),
        }
    }
}

const fn write_bw(path: Path, bytes: u64, against: &'static str) -> Subject {
    let (name, what, goal) = match path {
        Path::Udp => ("soft_udp_write_bw", "WRITE over UDP", Goal::RatioAtLeast(0.8)),
        Path::Shared => (
            "soft_local_write_bw",
            "WRITE between processes, shared memory",
            Goal::RatioAtLeast(0.9),
        ),
        Path::Foreign => (
            "soft_local_write_bw_foreign",
            "WRITE between processes, memory of their own",
            Goal::RatioAtLeast(0.9),
        ),
    };
    Subject {
        name,
        what,
        bytes,
        against,
        goal,
        test: Test::Bandwidth,
        path,
    }
}

/// All of them.
pub(super) const SUBJECTS: [Subject; 10] = [
    write_bw(Path::Shared, 64 << 10, "memcpy"),
    write_bw(Path::Shared, 256 << 10, "memcpy"),
    write_bw(Path::Shared, 1 << 20, "memcpy"),
    write_bw(Path::Foreign, 64 << 10, "process_vm_writev_64k"),
    write_bw(Path::Foreign, 256 << 10, "process_vm_writev_256k"),
    write_bw(Path::Foreign, 1 << 20, "process_vm_writev"),
    write_bw(Path::Udp, 1 << 20, "udp_gso"),
    Subject {
        name: "soft_local_write_lat",
        what: "half a round trip of WRITEs between processes, shared memory",
        bytes: 2,
        against: "shm_pingpong",
        goal: Goal::AtMost(500.0),
        test: Test::Latency,
        path: Path::Shared,
    },
    Subject {
        name: "soft_local_write_lat_foreign",
        what: "half a round trip of WRITEs between processes, memory of their own",
        bytes: 2,
        against: "shm_pingpong",
        goal: Goal::AtMost(2500.0),
        test: Test::Latency,
        path: Path::Foreign,
    },
    Subject {
        name: "soft_local_msg_rate",
        what: "WRITEs between processes, posted 32 at a time; the ratio is of one message per ping-pong",
        bytes: 64,
        against: "shm_pingpong",
        goal: Goal::AtLeast(2e6),
        test: Test::Rate,
        path: Path::Shared,
    },
];

impl Subject {
    /// The ratio of a value to that of its limit.
    pub(super) fn ratio(&self, figure: f64, limit: f64) -> f64 {
        match self.test {
            Test::Bandwidth | Test::Latency => figure / limit,
            Test::Rate => figure * limit / 1e9,
        }
    }

    /// Runs the test for about `duration`.
    pub(super) fn measure(&self, duration: Duration) -> Result<Figure, String> {
        let (kind, key) = match self.test {
            Test::Bandwidth => ("bw", "bw_avg_bytes_per_s"),
            Test::Rate => ("bw", "msg_rate_per_s"),
            Test::Latency => ("lat", "lat_p50_ns"),
        };
        let program = std::env::current_exe().map_err(|e| format!("cannot start this program again: {e}"))?;
        let mut command = Command::new(program);
        command
            .args([
                kind,
                "write",
                "--json",
                "--no-progress",
                "--size",
                &self.bytes.to_string(),
            ])
            .args(["--duration", &duration.as_secs_f64().to_string()])
            // Faults and captures of the environment would distort the measurement.
            .env_remove("DOORBELL_FAULTS")
            .env_remove("DOORBELL_PCAP")
            .env_remove("DOORBELL_COPY")
            .env("DOORBELL_LINK", self.path.link().1)
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        if self.test == Test::Rate {
            command.args(["--post-list", "32"]);
        }
        if self.path == Path::Foreign {
            command.arg("--private-memory");
        }
        let output = command
            .output()
            .map_err(|e| format!("cannot start this program again: {e}"))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text
                .lines()
                .rfind(|line| !line.contains("warning:"))
                .unwrap_or("no reason");
            return Err(format!("the test failed: {last}"));
        }
        self.figure(&output.stdout, key)
    }

    fn figure(&self, json: &[u8], key: &str) -> Result<Figure, String> {
        let report: Value = serde_json::from_slice(json).map_err(|e| format!("the test's result: {e}"))?;
        let (link, wanted) = (report["link"].as_str(), self.path.link().0.name());
        if link != Some(wanted) {
            return Err(format!(
                "the test went over {}, not {wanted}",
                link.unwrap_or("nothing")
            ));
        }
        let value = report["results"][0][key].as_f64();
        let value = value.ok_or_else(|| format!("the test's result has no {key}"))?;
        Ok(match self.test {
            Test::Bandwidth => Figure::BytesPerS(value),
            Test::Rate => Figure::PerS(value),
            Test::Latency => Figure::Ns(value),
        })
    }
}

/// The CPU use of an idle device over `period`.
pub(super) fn idle(period: Duration) -> Result<Figure, String> {
    let devices = DeviceConfig::from_env().map_err(|e| e.to_string())?;
    let config = devices.first().ok_or("the environment asks for no device")?;
    match limits::idle(config, period) {
        Ok(idle) => Ok(Figure::Ns(idle.used.as_nanos() as f64)),
        Err(error) => Err(reason(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_took_another_way_gives_no_figure() {
        let udp = SUBJECTS.iter().find(|subject| subject.path == Path::Udp).unwrap();
        let json = |link: &str| format!(r#"{{"link":"{link}","results":[{{"bw_avg_bytes_per_s":5.0}}]}}"#);
        let figure = |link: &str| udp.figure(json(link).as_bytes(), "bw_avg_bytes_per_s");
        assert_eq!(figure("soft-udp"), Ok(Figure::BytesPerS(5.0)));
        assert!(figure("soft-local").is_err_and(|reason| reason.contains("soft-udp")));
        assert!(udp.figure(b"{}", "bw_avg_bytes_per_s").is_err());
    }
}

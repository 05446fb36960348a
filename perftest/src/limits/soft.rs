//! The performance of the userspace device: each value from a test of this command, with both ends
//! as separate processes.

use std::process::{Command, Stdio};
use std::time::Duration;

use doorbell_perftest_sys::limits;
use doorbell_softroce::DeviceConfig;
use serde_json::Value;

use super::Measurement;
use crate::report::LinkKind;

pub(super) const IDLE: &str = "idle_cpu";
pub(super) const IDLE_WHAT: &str = "CPU time of a process with an idle device";

pub(super) struct DeviceTest {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) bytes: u64,
    pub(super) against: &'static str,
    operation: &'static str,
    test: Test,
    path: MessagePath,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Test {
    Bandwidth,
    /// Message rate with a post list of 32.
    Rate,
    Latency,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MessagePath {
    /// UDP over loopback.
    Udp,
    /// Between processes of this host, in shared memory.
    Shared,
    /// Between processes of this host, in private memory.
    Private,
}

impl MessagePath {
    const fn link(self) -> (LinkKind, &'static str) {
        match self {
            MessagePath::Udp => (LinkKind::SoftUdp, "udp"),
            MessagePath::Shared | MessagePath::Private => (LinkKind::SoftLocal, "local"),
        }
    }
}

const fn write_bw(path: MessagePath, bytes: u64, against: &'static str) -> DeviceTest {
    let (name, what) = match path {
        MessagePath::Udp => ("soft_udp_write_bw", "WRITE over UDP"),
        MessagePath::Shared => ("soft_local_write_bw", "WRITE between processes, shared memory"),
        MessagePath::Private => ("soft_local_write_bw_foreign", "WRITE between processes, private memory"),
    };
    DeviceTest {
        name,
        what,
        bytes,
        against,
        operation: "write",
        test: Test::Bandwidth,
        path,
    }
}

const fn latency(name: &'static str, operation: &'static str, what: &'static str, path: MessagePath) -> DeviceTest {
    DeviceTest {
        name,
        what,
        bytes: 2,
        against: "shm_pingpong",
        operation,
        test: Test::Latency,
        path,
    }
}

pub(super) const DEVICE_TESTS: [DeviceTest; 11] = [
    write_bw(MessagePath::Shared, 64 << 10, "memcpy"),
    write_bw(MessagePath::Shared, 256 << 10, "memcpy"),
    write_bw(MessagePath::Shared, 1 << 20, "memcpy"),
    write_bw(MessagePath::Private, 64 << 10, "process_vm_writev_64k"),
    write_bw(MessagePath::Private, 256 << 10, "process_vm_writev_256k"),
    write_bw(MessagePath::Private, 1 << 20, "process_vm_writev"),
    write_bw(MessagePath::Udp, 1 << 20, "udp_gso"),
    latency(
        "soft_local_write_lat",
        "write",
        "half round trip of WRITEs between processes, shared memory",
        MessagePath::Shared,
    ),
    latency(
        "soft_local_write_lat_foreign",
        "write",
        "half round trip of WRITEs between processes, private memory",
        MessagePath::Private,
    ),
    latency(
        "soft_local_send_lat",
        "send",
        "half round trip of SENDs between processes, shared memory",
        MessagePath::Shared,
    ),
    DeviceTest {
        name: "soft_local_msg_rate",
        what: "WRITEs between processes, posted 32 at a time; the ratio is of one message per ping-pong",
        bytes: 64,
        against: "shm_pingpong",
        operation: "write",
        test: Test::Rate,
        path: MessagePath::Shared,
    },
];

impl DeviceTest {
    /// The ratio of a value to that of its limit.
    pub(super) fn ratio(&self, value: f64, limit: f64) -> f64 {
        match self.test {
            Test::Bandwidth | Test::Latency => value / limit,
            Test::Rate => value * limit / 1e9,
        }
    }

    pub(super) fn measure(&self, duration: Duration) -> Result<Measurement, String> {
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
                self.operation,
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
        if self.path == MessagePath::Private {
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
        self.value(&output.stdout, key)
    }

    fn value(&self, json: &[u8], key: &str) -> Result<Measurement, String> {
        let report: Value = serde_json::from_slice(json).map_err(|e| format!("the test's result: {e}"))?;
        let (link, selection) = (report["link"].as_str(), self.path.link().0.name());
        if link != Some(selection) {
            return Err(format!(
                "the test went over {}, not {selection}",
                link.unwrap_or("nothing")
            ));
        }
        let value = report["results"][0][key].as_f64();
        let value = value.ok_or_else(|| format!("the test's result has no {key}"))?;
        Ok(match self.test {
            Test::Bandwidth => Measurement::BytesPerS(value),
            Test::Rate => Measurement::PerS(value),
            Test::Latency => Measurement::Ns(value),
        })
    }
}

pub(super) fn idle(period: Duration) -> Result<Measurement, String> {
    let devices = DeviceConfig::from_env().map_err(|e| e.to_string())?;
    let config = devices.first().ok_or("the environment configures no device")?;
    match limits::idle(config, period) {
        Ok(idle) => Ok(Measurement::Ns(idle.used.as_nanos() as f64)),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_over_another_link_gives_no_value() {
        let udp = DEVICE_TESTS
            .iter()
            .find(|device_test| device_test.path == MessagePath::Udp)
            .unwrap();
        let json = |link: &str| format!(r#"{{"link":"{link}","results":[{{"bw_avg_bytes_per_s":5.0}}]}}"#);
        let value = |link: &str| udp.value(json(link).as_bytes(), "bw_avg_bytes_per_s");
        assert_eq!(value("soft-udp"), Ok(Measurement::BytesPerS(5.0)));
        assert!(value("soft-local").is_err_and(|reason| reason.contains("soft-udp")));
        assert!(udp.value(b"{}", "bw_avg_bytes_per_s").is_err());
    }
}

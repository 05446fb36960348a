//! The devices of a test.

use std::fmt::{Display, Write};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Once;
use std::thread;
use std::time::Duration;

use doorbell::softroce::{AddedDevice, DeviceConfig, FaultConfig, FaultConfigError, OpenError, add, api};
use doorbell::{Context, DeviceError, Library};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::captures::Captures;

/// The options of a test's devices.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut devices = doorbell_test::Devices::new().drop(0.01).seed(7).build()?;
/// let (a, b) = (devices.open()?, devices.open()?);
/// # drop((a, b));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Devices {
    name: Option<String>,
    faults: String,
    pcap: Option<PathBuf>,
    expects_panic: bool,
}

/// Why a test has no devices; each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An unknown option, or an invalid value.
    #[error(transparent)]
    Option(#[from] FaultConfigError),
    /// A device cannot be opened.
    #[error(transparent)]
    Device(#[from] OpenError),
    /// Nor a context on it.
    #[error(transparent)]
    Context(#[from] DeviceError),
    /// The folder of the captures cannot be created.
    #[error("the folder of captures: {0}")]
    Captures(io::Error),
}

impl Devices {
    /// Without faults, with the seed 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// The name of the test, for its captures and messages; by default that of the thread, which in
    /// `cargo test` is the test's.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// An option by its name in `DOORBELL_FAULTS`, as `drop`; [`build`](Self::build) checks it.
    pub fn option(mut self, name: &str, value: impl Display) -> Self {
        // Writing to a String cannot fail.
        let _ = write!(self.faults, "{name}={value},");
        self
    }

    /// Loses this fraction of the packets, 0 to 1.
    pub fn drop(self, fraction: f64) -> Self {
        self.option("drop", fraction)
    }

    /// Sends this fraction of the packets twice, 0 to 1.
    pub fn duplicate(self, fraction: f64) -> Self {
        self.option("duplicate", fraction)
    }

    /// Holds this fraction of the packets back for up to 100 µs, 0 to 1.
    pub fn reorder(self, fraction: f64) -> Self {
        self.option("reorder", fraction)
    }

    /// Changes a byte of this fraction of the packets, 0 to 1.
    pub fn corrupt(self, fraction: f64) -> Self {
        self.option("corrupt", fraction)
    }

    /// Marks this fraction of the ECN-capable packets (Congestion Experienced), 0 to 1.
    pub fn mark(self, fraction: f64) -> Self {
        self.option("mark", fraction)
    }

    /// Delays each packet, by at most 10 s.
    pub fn delay(self, delay: Duration) -> Self {
        self.option("delay", format_args!("{}ns", delay.as_nanos()))
    }

    /// The speed at which each device sends, such as `1Gb`.
    pub fn rate(self, rate: &str) -> Self {
        self.option("rate", rate)
    }

    /// The ports are down from a time after their opening on, and for how long: `3s+500ms`.
    pub fn down(self, outage: &str) -> Self {
        self.option("down", outage)
    }

    /// The seed of the first device.
    pub fn seed(self, seed: u64) -> Self {
        self.option("seed", seed)
    }

    /// Keeps the captures, in files of this name with the devices' numbers added: `file-0.pcap`.
    pub fn pcap(mut self, file: impl Into<PathBuf>) -> Self {
        self.pcap = Some(file.into());
        self
    }

    /// The test passes if it panics (`#[should_panic]`).
    pub fn expect_panic(mut self) -> Self {
        self.expects_panic = true;
        self
    }

    /// Checks the options; the devices are opened one by one.
    ///
    /// Raises the process's soft limit of descriptors (`RLIMIT_NOFILE`) to the hard one, at most
    /// 65536: a device takes ten.
    ///
    /// # Errors
    /// When an option is invalid, or the folder of the captures cannot be created.
    pub fn build(self) -> Result<TestDevices, Error> {
        raise_descriptor_limit();
        let thread = thread::current();
        let name = self.name.unwrap_or_else(|| thread.name().unwrap_or("test").to_owned());
        Ok(TestDevices {
            faults: self.faults.parse()?,
            captures: Captures::new(&name, self.pcap.as_deref()).map_err(Error::Captures)?,
            name,
            devices: Vec::new(),
            failed: false,
            expects_panic: self.expects_panic,
        })
    }
}

/// The devices of a running test. Dropped in a panic, or after [`fail`](Self::fail), it prints what
/// they were and keeps the captures.
#[derive(Debug)]
pub struct TestDevices {
    name: String,
    faults: FaultConfig,
    captures: Captures,
    devices: Vec<TestDevice>,
    failed: bool,
    expects_panic: bool,
}

#[derive(Debug)]
enum TestDevice {
    Here(AddedDevice),
    OfChild(Option<IpAddr>),
}

impl Display for TestDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, address) = match self {
            Self::Here(device) => (device.name(), device.address()),
            Self::OfChild(address) => ("child's", *address),
        };
        match address {
            Some(address) => write!(f, "{name} at {address}"),
            None => f.write_str(name),
        }
    }
}

impl TestDevices {
    /// Opens the next device.
    ///
    /// # Errors
    /// When the machine lacks a resource for it.
    pub fn open(&mut self) -> Result<Context, Error> {
        let device = add(DeviceConfig {
            exclusive: true,
            faults: self.next_faults(),
            pcap: Some(self.captures.next_file()),
            ..DeviceConfig::new("soft")
        })?;
        let context = Library::new(api()).open(device.name())?;
        self.devices.push(TestDevice::Here(device));
        Ok(context)
    }

    /// The next device, as the environment of a child process: for [`doorbell::open_from_env`], and
    /// for programs under `doorbell run`, where it is `soft0`. The parent keeps its handle of the
    /// devices until the child has ended.
    ///
    /// # Errors
    /// When no address is free.
    pub fn child(&mut self) -> Result<[(&'static str, String); 6], Error> {
        let address = add(DeviceConfig {
            exclusive: true,
            ..DeviceConfig::new("probe")
        })?
        .address();
        let faults = self.next_faults();
        let capture = self.captures.next_file();
        self.devices.push(TestDevice::OfChild(address));
        Ok([
            ("DOORBELL_DEVICE", "soft0".to_owned()),
            (
                "DOORBELL_SOFT_ADDR",
                address.map_or_else(String::new, |address| address.to_string()),
            ),
            ("DOORBELL_FAULTS", faults.to_string()),
            ("DOORBELL_PCAP", capture.display().to_string()),
            // Those of the parent are of devices that it has by name.
            ("DOORBELL_SOFT_PORT", String::new()),
            ("DOORBELL_LINK", String::new()),
        ])
    }

    /// The test failed, without a panic of this thread.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    fn next_faults(&self) -> FaultConfig {
        FaultConfig {
            seed: self.faults.seed.wrapping_add(self.devices.len() as u64),
            ..self.faults
        }
    }
}

impl Drop for TestDevices {
    fn drop(&mut self) {
        if !self.failed && thread::panicking() == self.expects_panic {
            self.captures.discard();
            return;
        }
        let devices: Vec<_> = self.devices.iter().map(ToString::to_string).collect();
        eprintln!(
            "doorbell-test: {} failed with {}; devices {}; captures {}",
            self.name,
            self.faults,
            devices.join(", "),
            self.captures.pattern()
        );
    }
}

/// Many tests at a time exceed the usual soft limit of 1024, on many processors.
fn raise_descriptor_limit() {
    /// Some programs close all descriptors up to the limit.
    const ENOUGH: u64 = 65_536;
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // If it fails the test does where there are too few.
        if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(ENOUGH)), hard);
        }
    });
}

//! Queries of NVML. A failed call becomes a note; no number or text is trusted to be sensible.

use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use crate::sys::{self, FieldValue, Function, PciInfo, RawDevice, Status, Table, capability, remote_device, status};
use crate::{Ancestor, Gpu, LIBRARY_VARIABLE, Link, LoadError, Machine, P2pStatus, Peer, RemoteDevice};

const LIBRARY: &str = "libnvidia-ml.so.1";
/// Upper bounds: more GPUs, and more links per GPU, than any machine has.
const GPUS: c_uint = 256;
const LINKS: c_uint = 64;
const CPU_WORDS: usize = 128;
const NODE_WORDS: usize = 16;
/// `NVML_DEVICE_NAME_V2_BUFFER_SIZE` and `NVML_DEVICE_UUID_V2_BUFFER_SIZE`.
const TEXT: usize = 96;

/// Queries the system's library, or the one that the environment names.
pub(crate) fn system() -> Result<Machine, LoadError> {
    static SYSTEM: OnceLock<Result<Table, LoadError>> = OnceLock::new();
    let loaded = SYSTEM.get_or_init(|| {
        // SAFETY: the name is that of NVIDIA's library; the variable's setter vouches for another
        // one.
        unsafe { load(&path()) }
    });
    // SAFETY: as above.
    unsafe { read(loaded.as_ref().map_err(Clone::clone)?) }
}

fn path() -> PathBuf {
    let named = doorbell_trust::variable(LIBRARY_VARIABLE).filter(|path| !path.is_empty());
    named.map_or_else(|| LIBRARY.into(), PathBuf::from)
}

/// Queries a library.
///
/// # Safety
/// The library must be NVML, or behave like it.
pub(crate) unsafe fn library(path: &Path) -> Result<Machine, LoadError> {
    // SAFETY: the caller's promise.
    let table = unsafe { load(path) }?;
    // SAFETY: the same.
    unsafe { read(&table) }
}

/// Loads a library.
///
/// # Safety
/// As [`library`].
unsafe fn load(path: &Path) -> Result<Table, LoadError> {
    // SAFETY: NVML's initialisers have no requirements; the caller vouches for another library.
    let library = unsafe { sys::open(path) }.map_err(|reason| LoadError::NoLibrary {
        library: one_line(&path.display().to_string()),
        reason: one_line(&reason),
    })?;
    // SAFETY: the caller's promise.
    unsafe { sys::fill(library) }.map_err(|symbol| LoadError::NoSymbol { symbol })
}

/// Initializes the library and queries it.
///
/// # Safety
/// The functions must be NVML's, or behave like them.
unsafe fn read(table: &Table) -> Result<Machine, LoadError> {
    let refused = |call, code| LoadError::Refused {
        call,
        code,
        text: words(table, code),
    };
    // SAFETY: nvmlInit_v2 has no arguments, and may be called repeatedly.
    match unsafe { (table.init)() } {
        status::SUCCESS => {}
        code => return Err(refused("nvmlInit_v2", code)),
    }
    let mut session = Session {
        table,
        notes: Vec::new(),
    };
    let mut count = 0;
    // SAFETY: the pointer is to a local unsigned int.
    match unsafe { (table.device_get_count)(&raw mut count) } {
        status::SUCCESS => Ok(session.machine(count.min(GPUS))),
        code => Err(refused("nvmlDeviceGetCount_v2", code)),
    }
}

fn words(table: &Table, code: Status) -> String {
    // SAFETY: the function takes any number, and returns null or a string that it never changes or
    // frees.
    let text = unsafe { (table.error_string)(code) };
    if text.is_null() {
        return "no words for it".to_owned();
    }
    // SAFETY: as above.
    one_line(&unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

fn one_line(text: &str) -> String {
    text.trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

struct Session<'a> {
    table: &'a Table,
    notes: Vec<String>,
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // SAFETY: it was initialized; nothing of it is used after this.
        unsafe { (self.table.shutdown)() };
    }
}

/// The error is the function's status, or `None` if it is missing.
fn try_query<F: Copy, T: Default>(
    function: Function<F>,
    query: impl FnOnce(F, &mut T) -> Status,
) -> Result<T, Option<Status>> {
    let mut value = T::default();
    match function.call.map(|function| query(function, &mut value)) {
        Some(status::SUCCESS) => Ok(value),
        refusal => Err(refusal),
    }
}

struct QueriedGpu {
    raw: RawDevice,
    gpu: Gpu,
}

impl Session<'_> {
    fn machine(&mut self, count: c_uint) -> Machine {
        let version = self.table.system_get_driver_version;
        let driver = self.query("the driver", version, |function, room: &mut Text| {
            // SAFETY: the function writes at most as many bytes as the length that is passed.
            unsafe { function(room.0.as_mut_ptr().cast::<c_char>(), TEXT as c_uint) }
        });
        let mut found: Vec<QueriedGpu> = (0..count).filter_map(|index| self.gpu(index)).collect();
        let addresses: Vec<String> = found.iter().map(|queried| queried.gpu.address.clone()).collect();
        for queried in &mut found {
            queried.gpu.links = self.links(queried, &addresses);
        }
        for one in 0..found.len() {
            let others = (0..found.len()).filter(|two| *two != one);
            found[one].gpu.peers = others.map(|two| self.peer(&found[one], &found[two])).collect();
        }
        Machine {
            driver: driver.map(|room| room.message()),
            gpus: found.into_iter().map(|queried| queried.gpu).collect(),
            notes: core::mem::take(&mut self.notes),
        }
    }

    /// Calls a function that fills in a value; on failure adds a note and returns `None`.
    fn query<F: Copy, T: Default>(
        &mut self,
        of: &str,
        function: Function<F>,
        query: impl FnOnce(F, &mut T) -> Status,
    ) -> Option<T> {
        try_query(function, query)
            .map_err(|refusal| self.note(of, function.name, refusal))
            .ok()
    }

    /// Adds a note, once, about a failed or missing function.
    fn note(&mut self, of: &str, call: &'static str, refusal: Option<Status>) {
        let note = match refusal {
            Some(code) => format!("{of}: {call} answers {code} ({})", words(self.table, code)),
            None => format!("this NVML has no {call}: a newer driver is needed"),
        };
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn gpu(&mut self, index: c_uint) -> Option<QueriedGpu> {
        let table = self.table;
        let of = format!("GPU {index}");
        let by_index = Function {
            name: "nvmlDeviceGetHandleByIndex_v2",
            call: Some(table.device_get_handle_by_index),
        };
        let raw: Handle = self.query(&of, by_index, |function, raw: &mut Handle| {
            // SAFETY: the pointer is to a local nvmlDevice_t.
            unsafe { function(index, &raw mut raw.0) }
        })?;
        let Handle(raw) = raw;
        let pci_info = Function {
            name: "nvmlDeviceGetPciInfo_v3",
            call: Some(table.device_get_pci_info),
        };
        let pci = self.query(&of, pci_info, |function, pci: &mut PciInfo| {
            // SAFETY: the device is the library's, and the pointer is to a local nvmlPciInfo_t.
            unsafe { function(raw, pci) }
        })?;
        let address = address(&pci);
        let of = format!("GPU {address}");
        let uuid = self.query(&of, table.device_get_uuid, |function, room: &mut Text| {
            // SAFETY: the function writes at most as many bytes as the length that is passed.
            unsafe { function(raw, room.0.as_mut_ptr().cast::<c_char>(), TEXT as c_uint) }
        });
        let name = self.query(&of, table.device_get_name, |function, room: &mut Text| {
            // SAFETY: as above.
            unsafe { function(raw, room.0.as_mut_ptr().cast::<c_char>(), TEXT as c_uint) }
        });
        let cpus = self.query(
            &of,
            table.device_get_cpu_affinity,
            |function, set: &mut Set<CPU_WORDS>| {
                // SAFETY: the function writes as many words as the count that is passed.
                unsafe { function(raw, CPU_WORDS as c_uint, set.0.as_mut_ptr()) }
            },
        );
        let nodes = self.query(
            &of,
            table.device_get_memory_affinity,
            |function, set: &mut Set<NODE_WORDS>| {
                // SAFETY: as above.
                unsafe { function(raw, NODE_WORDS as c_uint, set.0.as_mut_ptr(), sys::SCOPE_NODE) }
            },
        );
        let gpu = Gpu {
            index,
            address,
            uuid: uuid.map(|room| room.message()),
            name: name.map(|room| room.message()),
            links: Vec::new(),
            peers: Vec::new(),
            cpus: cpus.map(|set| ranges(&set.members())).filter(|list| !list.is_empty()),
            numa_nodes: nodes.map(|set| set.members()).unwrap_or_default(),
        };
        Some(QueriedGpu { raw, gpu })
    }

    /// The active links with their remote ends; `addresses` are those of all GPUs.
    fn links(&mut self, queried: &QueriedGpu, addresses: &[String]) -> Vec<Link> {
        let mut active = Vec::new();
        for link in 0..LINKS {
            let state = try_query(self.table.device_get_nvlink_state, |function, state: &mut c_uint| {
                // SAFETY: the device is the library's, and the pointer is to a local unsigned int.
                unsafe { function(queried.raw, link, state) }
            });
            match state {
                Ok(1) => active.push(link),
                Ok(_) => {}
                // No NVLink, or no link of this number.
                Err(Some(status::NOT_SUPPORTED | status::INVALID_ARGUMENT)) => break,
                Err(refusal) => {
                    self.note(
                        &format!("GPU {}", queried.gpu.address),
                        self.table.device_get_nvlink_state.name,
                        refusal,
                    );
                    break;
                }
            }
        }
        let speeds = self.speeds(queried, &active);
        let links = active.into_iter().zip(speeds);
        links
            .map(|(link, speed)| self.link(queried, link, speed, addresses))
            .collect()
    }

    fn link(&mut self, queried: &QueriedGpu, link: c_uint, speed: Option<u64>, addresses: &[String]) -> Link {
        let (table, raw) = (self.table, queried.raw);
        let of = format!("GPU {}", queried.gpu.address);
        let version = try_query(table.device_get_nvlink_version, |function, version: &mut c_uint| {
            // SAFETY: the device is the library's, and the pointer is to a local unsigned int.
            unsafe { function(raw, link, version) }
        });
        let kind = self.query(
            &of,
            table.device_get_nvlink_remote_device_type,
            |function, kind: &mut c_int| {
                // SAFETY: as above, for an int.
                unsafe { function(raw, link, kind) }
            },
        );
        let remote = |session: &mut Self| {
            let pci = session.query(
                &of,
                table.device_get_nvlink_remote_pci_info,
                |function, pci: &mut PciInfo| {
                    // SAFETY: as above, for an nvmlPciInfo_t.
                    unsafe { function(raw, link, pci) }
                },
            );
            pci.map(|pci| address(&pci))
        };
        let remote_device = match kind {
            Some(remote_device::SWITCH) => RemoteDevice::Switch,
            Some(remote_device::NPU) => RemoteDevice::Processor,
            Some(remote_device::GPU) => remote(self).map_or(RemoteDevice::Unknown, RemoteDevice::Gpu),
            // A device of unreported type is a GPU if it has the address of one.
            _ => remote(self)
                .filter(|address| addresses.contains(address))
                .map_or(RemoteDevice::Unknown, RemoteDevice::Gpu),
        };
        // The version matters only if the speed is not reported.
        if let (Err(refusal), None) = (version, speed) {
            self.note(&of, table.device_get_nvlink_version.name, refusal);
        }
        let version = version.ok();
        Link {
            number: link,
            version,
            bytes_per_s: speed
                .map(nominal_rate)
                .or_else(|| version.and_then(nominal_rate_of_version)),
            remote: remote_device,
        }
    }

    /// The line rates of these links in MB/s.
    fn speeds(&mut self, queried: &QueriedGpu, links: &[c_uint]) -> Vec<Option<u64>> {
        if links.is_empty() {
            return Vec::new();
        }
        let each = links.iter().map(|link| FieldValue::of(sys::FIELD_LINK_SPEED, *link));
        let mut values: Vec<FieldValue> = each.chain([FieldValue::of(sys::FIELD_COMMON_SPEED, 0)]).collect();
        let of = format!("GPU {}", queried.gpu.address);
        let function = self.table.device_get_field_values;
        self.query(&of, function, |function, (): &mut ()| {
            // SAFETY: the device is the library's, and the pointer is to as many nvmlFieldValue_t
            // as the count that is passed.
            unsafe { function(queried.raw, values.len() as c_int, values.as_mut_ptr()) }
        });
        let known = |value: &FieldValue| value.number().filter(|speed| *speed > 0);
        let (common, each) = values
            .split_last()
            .map_or((None, &[][..]), |(last, each)| (known(last), each));
        each.iter().map(|value| known(value).or(common)).collect()
    }

    fn peer(&mut self, one: &QueriedGpu, two: &QueriedGpu) -> Peer {
        let of = format!("GPU {} and GPU {}", one.gpu.address, two.gpu.address);
        let ancestor = self.query(
            &of,
            self.table.device_get_topology_common_ancestor,
            |function, level: &mut c_int| {
                // SAFETY: the devices are the library's, and the pointer is to a local int.
                unsafe { function(one.raw, two.raw, level) }
            },
        );
        let mut reach = |capability| {
            let status = self.query(&of, self.table.device_get_p2p_status, |function, status: &mut c_int| {
                // SAFETY: as above.
                unsafe { function(one.raw, two.raw, capability, status) }
            });
            status.map(|status| match status {
                0 => P2pStatus::Yes,
                1 => P2pStatus::NoChipset,
                2 => P2pStatus::NoGpu,
                3 => P2pStatus::NoHub,
                4 => P2pStatus::Disabled,
                5 => P2pStatus::NoWay,
                _ => P2pStatus::Unknown,
            })
        };
        Peer {
            address: two.gpu.address.clone(),
            nvlink: reach(capability::NVLINK),
            read: reach(capability::READ),
            write: reach(capability::WRITE),
            ancestor: ancestor.and_then(|level| match level {
                0 => Some(Ancestor::Board),
                10 => Some(Ancestor::Switch),
                20 => Some(Ancestor::Switches),
                30 => Some(Ancestor::Bridge),
                40 => Some(Ancestor::Node),
                50 => Some(Ancestor::System),
                _ => None,
            }),
        }
    }
}

/// An `nvmlDevice_t` as an output parameter.
struct Handle(RawDevice);

impl Default for Handle {
    fn default() -> Self {
        Self(ptr::null_mut())
    }
}

struct Text([u8; TEXT]);

impl Default for Text {
    fn default() -> Self {
        Self([0; TEXT])
    }
}

impl Text {
    fn message(&self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(TEXT);
        one_line(&String::from_utf8_lossy(&self.0[..end]))
    }
}

struct Set<const WORDS: usize>([c_ulong; WORDS]);

impl<const WORDS: usize> Default for Set<WORDS> {
    fn default() -> Self {
        Self([0; WORDS])
    }
}

impl<const WORDS: usize> Set<WORDS> {
    fn members(&self) -> Vec<u32> {
        let is_in = |at: u32| self.0[(at / c_ulong::BITS) as usize] >> (at % c_ulong::BITS) & 1 == 1;
        (0..WORDS as u32 * c_ulong::BITS).filter(|at| is_in(*at)).collect()
    }
}

fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<String> = Vec::new();
    for run in numbers.chunk_by(|one, two| one + 1 == *two) {
        match run {
            [one] => parts.push(one.to_string()),
            [first, .., last] => parts.push(format!("{first}-{last}")),
            [] => {}
        }
    }
    parts.join(",")
}

/// A PCI address in sysfs format: GPUs are function 0 of their device.
fn address(pci: &PciInfo) -> String {
    format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device)
}

/// Nominal bytes/s for a line rate in MB/s, of which encoding takes 33/32 (NVLink 2) or 17/16.
fn nominal_rate(line_mb_per_s: u64) -> u64 {
    let nominal_rate = [20_000, 25_000, 50_000, 100_000];
    let by = nominal_rate
        .into_iter()
        .find(|speed| (*speed..=speed + speed / 14).contains(&line_mb_per_s));
    by.unwrap_or(line_mb_per_s).saturating_mul(1_000_000)
}

/// The nominal bytes/s of links of a version, by `nvmlNvlinkVersion_t`.
fn nominal_rate_of_version(version: u32) -> Option<u64> {
    match version {
        1 => Some(20_000_000_000),
        2..=6 => Some(25_000_000_000),
        7 => Some(50_000_000_000),
        _ => None,
    }
}

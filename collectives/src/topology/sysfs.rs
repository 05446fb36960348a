//! Reading sysfs, of which containers hide parts, and hypervisors invent others.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::{Device, DeviceKind, Host, Location, NumaNode};

/// Maximum length of an attribute, and number of devices of a kind.
const MAX_ATTRIBUTE: usize = 4096;
const MAX_DEVICES: usize = 4096;

/// Why there is no topology.
#[derive(Debug, thiserror::Error)]
#[error("{} is no sysfs: {reason}", .root.display())]
pub struct TopologyError {
    /// The path.
    pub root: PathBuf,
    /// The error.
    pub reason: String,
}

impl Host {
    /// Reads the sysfs below `root`, which is `/sys` for this host.
    ///
    /// # Errors
    /// [`TopologyError`] when `root` is not a readable folder. Missing parts are left out; errors
    /// are in the notes.
    pub fn read(root: &Path, name: impl Into<String>) -> Result<Self, TopologyError> {
        let wrong = |reason: String| TopologyError {
            root: root.into(),
            reason,
        };
        let canonical = root.canonicalize().map_err(|e| wrong(e.to_string()))?;
        fs::read_dir(&canonical).map_err(|e| wrong(e.to_string()))?;
        let tree = Tree { root: canonical };
        let mut notes = Vec::new();
        let numa_nodes = tree.numa_nodes(&mut notes);
        let mut devices = tree.adapters(&mut notes);
        devices.extend(tree.gpus());
        Ok(Self {
            name: name.into(),
            numa_nodes,
            devices,
            notes,
        })
    }
}

struct Tree {
    root: PathBuf,
}

impl Tree {
    fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(folder)) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .flatten()
            .take(MAX_DEVICES)
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort_by_cached_key(|name| natural(name));
        names
    }

    /// An attribute's text on one line, without control characters.
    fn attribute(&self, path: &Path) -> Option<String> {
        use std::io::Read;
        let mut bytes = Vec::new();
        fs::File::open(self.root.join(path))
            .ok()?
            .take(MAX_ATTRIBUTE as u64)
            .read_to_end(&mut bytes)
            .ok()?;
        let text: String = String::from_utf8_lossy(&bytes)
            .trim()
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        (!text.is_empty()).then_some(text)
    }

    fn numa_nodes(&self, notes: &mut Vec<String>) -> Vec<NumaNode> {
        let folder = "devices/system/node";
        let mut nodes = Vec::new();
        for name in self.names(folder) {
            let Some(node) = name.strip_prefix("node").and_then(|number| number.parse().ok()) else {
                continue;
            };
            let of = |file: &str| self.attribute(&Path::new(folder).join(&name).join(file));
            let distances = of("distance").unwrap_or_default();
            let parsed: Result<Vec<u32>, _> = distances.split_whitespace().map(str::parse).collect();
            if parsed.is_err() {
                notes.push(format!("NUMA node {node}: distances {distances:?} are no numbers"));
            }
            nodes.push(NumaNode {
                node,
                cpus: of("cpulist").unwrap_or_default(),
                distances: parsed.unwrap_or_default(),
            });
        }
        nodes.sort_by_key(|node| node.node);
        nodes
    }

    fn adapters(&self, notes: &mut Vec<String>) -> Vec<Device> {
        let mut found = Vec::new();
        for name in self.names("class/infiniband") {
            let folder = Path::new("class/infiniband").join(&name);
            let place = self.place(&folder.join("device"));
            if place.pcie_path.is_empty() {
                notes.push(format!("{name} is on no PCIe bus: a device in software"));
            }
            let port = |file: &str| self.attribute(&folder.join("ports/1").join(file));
            let state = port("state").map(|state| state.rsplit(": ").next().unwrap_or_default().to_owned());
            let known: Vec<String> = state.into_iter().chain(port("rate")).collect();
            let port = (!known.is_empty()).then(|| known.join(", "));
            found.push(Device {
                port,
                ..Device::new(name, DeviceKind::Adapter, place)
            });
        }
        found
    }

    /// NVIDIA's display and 3D controllers.
    fn gpus(&self) -> Vec<Device> {
        let mut found = Vec::new();
        for name in self.names("bus/pci/devices") {
            let folder = Path::new("bus/pci/devices").join(&name);
            let hex = |file: &str| {
                self.attribute(&folder.join(file))
                    .and_then(|text| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok())
            };
            let is_display = hex("class").is_some_and(|class| matches!(class >> 8, 0x0300 | 0x0302));
            if is_display && hex("vendor") == Some(0x10de) {
                found.push(Device::new(name, DeviceKind::Gpu, self.place(&folder)));
            }
        }
        found
    }

    fn place(&self, device: &Path) -> Location {
        let numa_node = self
            .attribute(&device.join("numa_node"))
            .and_then(|text| text.parse().ok());
        // In a copy of another machine's tree, a link that leaves it would refer to this machine.
        let canonical = self.root.join(device).canonicalize().ok();
        let inside = canonical
            .as_deref()
            .and_then(|path| path.strip_prefix(&self.root).ok())
            .map(Path::to_path_buf);
        let names = inside
            .iter()
            .flat_map(|path| path.components())
            .filter_map(|component| match component {
                Component::Normal(name) => name.to_str(),
                _ => None,
            });
        let path: Vec<String> = names
            .skip_while(|name| !name.starts_with("pci"))
            .take_while(|name| name.starts_with("pci") || is_address(name))
            .map(str::to_owned)
            .collect();
        Location {
            numa_node,
            pcie_path: path,
        }
    }
}

fn is_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4
        && parts
            .iter()
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// A natural sort key: mlx5_10 after mlx5_9.
pub(super) fn natural(name: &str) -> Vec<(String, u64)> {
    let mut key: Vec<(String, u64)> = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.len() - rest.trim_start_matches(|c: char| !c.is_ascii_digit()).len();
        let digits = rest[text..].len() - rest[text..].trim_start_matches(|c: char| c.is_ascii_digit()).len();
        key.push((
            rest[..text].to_owned(),
            rest[text..text + digits].parse().unwrap_or(u64::MAX),
        ));
        rest = &rest[text + digits..];
    }
    key
}

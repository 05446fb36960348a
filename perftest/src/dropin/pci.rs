//! The places of soft devices among the PCI devices of this machine, as topology code finds them
//! by realpath(3) of `/sys/class/infiniband/soft0/device`: below a root of their own, or next to
//! another device.
//!
//! Their addresses are of domain d00b, by which the preloaded library knows them (softroce/sysfs).

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::sysfs::{Content, File, put};

/// Bus addresses with a domain, as in sysfs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PciAddress(String);

impl FromStr for PciAddress {
    type Err = String;

    /// Also without domain, and with the eight digits of nvidia-smi(1).
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| u32::from_str_radix(digits, 16).ok();
        let parse = || {
            let (rest, function) = text.split_once('.')?;
            let parts: Vec<&str> = rest.split(':').collect();
            let (domain, bus, device) = match parts[..] {
                [domain, bus, device] => (number(domain)?, number(bus)?, number(device)?),
                [bus, device] => (0, number(bus)?, number(device)?),
                _ => return None,
            };
            let function = number(function)?;
            Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
        };
        let address = parse().ok_or_else(|| format!("{text} is not a PCI address, such as 0000:18:00.0"))?;
        Ok(Self(address))
    }
}

/// The link of an adapter, from which topology code computes a bandwidth.
const LINK: [(&str, &str); 4] = [
    ("max_link_speed", "16.0 GT/s PCIe"),
    ("max_link_width", "16"),
    ("current_link_speed", "16.0 GT/s PCIe"),
    ("current_link_width", "16"),
];

/// Of a machine without NUMA nodes the kernel says −1.
const NO_NODE: &str = "-1";

/// A device's place.
#[derive(Debug)]
pub(crate) struct Place {
    /// The folder of the root or bridge above it, relative to `/`.
    above: String,
    address: String,
    /// The device that it is next to.
    near: Option<PathBuf>,
}

impl Place {
    /// The place of a device by its number. NUMA node, processors and link are those of `near`, or
    /// those of an adapter at the first node.
    ///
    /// # Errors
    /// When there is no such device.
    pub(crate) fn new(number: usize, near: Option<&PciAddress>) -> Result<Self, String> {
        let address = format!("d00b:{number:02x}:00.0");
        let Some(PciAddress(other)) = near else {
            return Ok(Self {
                above: "sys/devices/pcid00b:00".into(),
                address,
                near: None,
            });
        };
        let missing = |e| format!("--near: no PCI device {other} here ({e}); lspci -D and nvidia-smi list them");
        let near = fs::canonicalize(format!("/sys/bus/pci/devices/{other}")).map_err(missing)?;
        let above = near.parent().and_then(|above| above.strip_prefix("/").ok());
        Ok(Self {
            above: above
                .map(|above| above.to_string_lossy().into_owned())
                .unwrap_or_default(),
            address,
            near: Some(near),
        })
    }

    /// The folder of the device, relative to `/`.
    pub(crate) fn folder(&self) -> String {
        format!("{}/{}", self.above, self.address)
    }

    /// The link at a path to what is below [`folder`](Self::folder).
    pub(crate) fn link(&self, from: &str, below: &str) -> File {
        let up = "../".repeat(from.split('/').count() - 2);
        let to = self.folder();
        let to = to.strip_prefix("sys/").unwrap_or(&to);
        (from.to_owned(), Content::Link(format!("{up}{to}{below}")))
    }

    /// The files of the PCI device, and the links to it.
    pub(crate) fn put(&self, files: &mut Vec<File>) {
        let folder = self.folder();
        let of_device = [
            ("class", "0x020000"),
            // Of the soft devices' OUI, 02:db:00.
            ("vendor", "0x02db"),
            ("device", "0x0001"),
            ("subsystem_vendor", "0x02db"),
            ("subsystem_device", "0x0001"),
            ("revision", "0x01"),
        ];
        for (name, value) in of_device {
            put(files, &folder, name, value);
        }
        for (name, value) in LINK {
            put(files, &folder, name, &self.read(name).unwrap_or_else(|| value.into()));
            // The slot's, which limits a device behind it.
            if let Some(line) = self
                .near
                .as_deref()
                .and_then(Path::parent)
                .and_then(|above| line_of(above, name))
            {
                put(files, &self.above, name, &line);
            }
        }
        let first_node = Path::new("/sys/devices/system/node/node0");
        let node = if first_node.exists() { "0" } else { NO_NODE };
        put(
            files,
            &folder,
            "numa_node",
            &self.read("numa_node").unwrap_or_else(|| node.into()),
        );
        let bus = self.address.get(..7).unwrap_or_default();
        let cpus = [
            ("local_cpus", "cpumap", "cpuaffinity"),
            ("local_cpulist", "cpulist", "cpulistaffinity"),
        ];
        for (name, of_node, of_bus) in cpus {
            if let Some(cpus) = self.read(name).or_else(|| line_of(first_node, of_node)) {
                put(files, &folder, name, &cpus);
                put(files, &format!("{}/pci_bus/{bus}", self.above), of_bus, &cpus);
            }
        }
        files.push((format!("{folder}/subsystem"), Content::Link("/sys/bus/pci".into())));
        files.push(self.link(&format!("sys/bus/pci/devices/{}", self.address), ""));
        let to_bus = format!(
            "../../{}/pci_bus/{bus}",
            self.above.strip_prefix("sys/").unwrap_or(&self.above)
        );
        files.push((format!("sys/class/pci_bus/{bus}"), Content::Link(to_bus)));
    }

    /// The line that the device has which it is next to.
    fn read(&self, name: &str) -> Option<String> {
        line_of(self.near.as_deref()?, name)
    }
}

fn line_of(folder: &Path, name: &str) -> Option<String> {
    let line = fs::read_to_string(folder.join(name)).ok()?;
    Some(line.trim().to_owned()).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_as_tools_print_them() {
        for text in ["0000:3b:00.1", "3b:00.1", "00000000:3B:00.1"] {
            assert_eq!(text.parse(), Ok(PciAddress("0000:3b:00.1".into())));
        }
        for text in ["", "3b", "3b:00", "3b:00.x", "1:2:3:4.5", "gpu0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn links_lead_back_to_the_device() {
        let place = Place::new(10, None).unwrap();
        assert_eq!(place.folder(), "sys/devices/pcid00b:00/d00b:0a:00.0");
        let (_, content) = place.link("sys/class/infiniband/soft10", "/infiniband/soft10");
        let to = "../../devices/pcid00b:00/d00b:0a:00.0/infiniband/soft10";
        assert_eq!(content, Content::Link(to.into()));
    }
}

//! The files that the kernel would have under `/sys/class`, and `/dev`, for the soft devices,
//! modeled on rxe's.
//!
//! But for the counters, they are written once, from the state of the devices at the start: an
//! interface that goes down later still has an active port here. The library's answers are
//! authoritative.

use std::collections::BTreeSet;
use std::net::IpAddr;

use doorbell_softroce::COUNTER_FILES;
use doorbell_softroce_ibverbs::{DeviceConfig, GID_TABLE_LEN, api, configure, gid_table, last_open_error};
use doorbell_verbs::{Context, GidEntry, GidType, Library, PortAttr, PortState};
use nix::net::if_::if_indextoname;

use super::pci::Place;
use crate::device::PORT;
use crate::failure::one_line;

#[derive(Debug)]
pub(crate) struct ShownDevice {
    name: String,
    place: Place,
    guid: u64,
    active: bool,
    /// Rate of the port, in bits per second.
    bits_per_s: u64,
    /// Of the GIDs the last one is the address.
    gids: Vec<Address>,
}

/// An entry of the GID table.
#[derive(Debug)]
struct Address {
    index: u32,
    address: IpAddr,
    kind: &'static str,
    /// The name of its network interface.
    interface: Option<String>,
}

/// Queries the devices of this configuration. A device that does not open here is only a warning,
/// as the command may run elsewhere, such as in another network namespace.
///
/// # Errors
/// When this process's devices are configured already, which is a bug of this program.
pub(crate) fn query(configs: &[DeviceConfig], places: Vec<Place>) -> Result<(Vec<ShownDevice>, Vec<String>), String> {
    configure(configs.to_vec()).map_err(|e| e.to_string())?;
    let library = Library::new(api());
    let mut warnings = Vec::new();
    let shown = configs.iter().zip(places).map(|(config, place)| {
        let queried = library.open(&config.name).and_then(query_device);
        let (active, bits_per_s, gids) = queried.unwrap_or_else(|error| {
            let why = last_open_error().unwrap_or_else(|| error.to_string());
            warnings.push(one_line(&why));
            (true, RATE, config.address.into_iter().flat_map(Address::all).collect())
        });
        let found = DeviceConfig {
            address: config.address.or(gids.last().map(|gid| gid.address)),
            ..config.clone()
        };
        ShownDevice {
            name: config.name.clone(),
            place,
            guid: found.guid(),
            active,
            bits_per_s,
            gids,
        }
    });
    let shown = shown.collect();
    Ok((shown, warnings))
}

/// The rate of a device that cannot be queried.
const RATE: u64 = 40_000_000_000;

fn query_device(context: Context) -> Result<(bool, u64, Vec<Address>), doorbell_verbs::DeviceError> {
    let PortAttr { state, bits_per_s, .. } = context.port(PORT)?;
    let gids = context.gids(PORT)?.into_iter().map(Address::of).collect();
    Ok((state == PortState::Active, bits_per_s.unwrap_or(RATE), gids))
}

impl Address {
    fn new(index: u32, address: IpAddr, is_v2: bool, interface: u32) -> Self {
        Self {
            index,
            address,
            kind: if is_v2 { "RoCE v2" } else { "IB/RoCE v1" },
            // Index 0, of an interface that is unknown, has an empty name.
            interface: if_indextoname(interface)
                .ok()
                .and_then(|name| name.into_string().ok())
                .filter(|name| !name.is_empty()),
        }
    }

    fn of(entry: GidEntry) -> Self {
        Self::new(
            entry.index,
            entry.gid.to_ip(),
            entry.kind == GidType::RoceV2,
            entry.interface,
        )
    }

    /// The entries of a device at an address, of an unknown interface.
    fn all(address: IpAddr) -> impl Iterator<Item = Self> {
        let table = (0..).zip(gid_table(address));
        table.map(|(index, (gid, version))| Self::new(index, gid.to_ip(), version == 2, 0))
    }

    /// In the notation of sysfs: eight groups of four digits.
    fn groups(&self) -> String {
        let address = match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        address.segments().map(|group| format!("{group:04x}")).join(":")
    }
}

pub(crate) type File = (String, Content);

#[derive(PartialEq, Eq, Hash, Debug)]
pub(crate) enum Content {
    Line(String),
    Link(String),
}

pub(crate) fn files(devices: &[ShownDevice]) -> Vec<File> {
    let mut files = Vec::new();
    put(&mut files, "sys/class/infiniband_verbs", "abi_version", "6");
    for (number, device) in devices.iter().enumerate() {
        let uverbs = format!("sys/class/infiniband_verbs/uverbs{number}");
        put(&mut files, &uverbs, "ibdev", &device.name);
        put(&mut files, &uverbs, "abi_version", "1");
        // UCX requires a readable and writable character device. Only rdma-core's own library opens
        // it, which is not used here.
        files.push((
            format!("dev/infiniband/uverbs{number}"),
            Content::Link("/dev/null".into()),
        ));
        files.push(device.place.link(&format!("{uverbs}/device"), ""));
        device.put(&mut files);
    }
    files
}

impl ShownDevice {
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.gids.last().map(|gid| gid.address)
    }

    fn put(&self, files: &mut Vec<File>) {
        self.place.put(files);
        // As the kernel's: the device's files are below the PCI device, with links to and from it.
        let (pci, below) = (self.place.folder(), format!("/infiniband/{}", self.name));
        let folder = format!("{pci}{below}");
        files.push(self.place.link(&format!("sys/class/infiniband/{}", self.name), &below));
        files.push(self.place.link(&format!("{folder}/device"), ""));
        let guid = [48, 32, 16, 0]
            .map(|shift| format!("{:04x}", self.guid >> shift & 0xffff))
            .join(":");
        let of_device = [
            ("node_type", "1: CA"),
            ("node_guid", &guid),
            ("sys_image_guid", &guid),
            ("node_desc", &self.name),
            ("fw_ver", env!("CARGO_PKG_VERSION")),
            ("hca_type", "doorbell"),
            ("board_id", "doorbell"),
            ("hw_rev", "1"),
        ];
        for (name, value) in of_device {
            put(files, &folder, name, value);
        }
        let port = format!("{folder}/ports/{PORT}");
        let rate = format!("{} Gb/sec (4X QDR)", self.bits_per_s / 1_000_000_000);
        let (state, phys_state) = if self.active {
            ("4: ACTIVE", "5: LinkUp")
        } else {
            ("1: DOWN", "3: Disabled")
        };
        let of_port = [
            ("state", state),
            ("phys_state", phys_state),
            ("rate", &rate),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x0"),
            ("sm_sl", "0"),
            // IsIPBasedGids: GIDs are IP addresses.
            ("cap_mask", "0x04000000"),
            ("link_layer", "Ethernet"),
            ("pkeys/0", "0xffff"),
        ];
        for (name, value) in of_port {
            put(files, &port, name, value);
        }
        // The devices keep them up to date.
        for (name, _) in COUNTER_FILES {
            put(files, &port, name, "0");
        }
        for gid in &self.gids {
            let index = gid.index;
            put(files, &port, &format!("gids/{index}"), &gid.groups());
            put(files, &port, &format!("gid_attrs/types/{index}"), gid.kind);
            if let Some(interface) = &gid.interface {
                put(files, &port, &format!("gid_attrs/ndevs/{index}"), interface);
            }
        }
        let interfaces: BTreeSet<_> = self.gids.iter().filter_map(|gid| gid.interface.as_ref()).collect();
        for interface in interfaces {
            let link = Content::Link(format!("/sys/class/net/{interface}"));
            files.push((format!("{pci}/net/{interface}"), link));
        }
        for empty in self.gids.len()..GID_TABLE_LEN as usize {
            put(
                files,
                &port,
                &format!("gids/{empty}"),
                "0000:0000:0000:0000:0000:0000:0000:0000",
            );
        }
    }
}

pub(crate) fn put(files: &mut Vec<File>, folder: &str, name: &str, line: &str) {
    files.push((format!("{folder}/{name}"), Content::Line(format!("{line}\n"))));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_shown_as_the_kernel_shows_one() {
        let shown = ShownDevice {
            name: "soft0".into(),
            place: Place::new(0, None).unwrap(),
            guid: 0x02db_12b7_7f00_0001,
            active: true,
            bits_per_s: RATE,
            gids: Address::all([127, 0, 0, 1].into()).collect(),
        };
        let files = files(&[shown]);
        let file = |path: &str| match files.iter().find(|file| file.0 == path) {
            Some((_, Content::Line(line))) => Some(line.as_str()),
            Some((_, Content::Link(to))) => Some(to.as_str()),
            None => None,
        };
        let device = "sys/devices/pcid00b:00/d00b:00:00.0/infiniband/soft0";
        let port = &format!("{device}/ports/1");
        assert_eq!(file(&format!("{device}/node_guid")), Some("02db:12b7:7f00:0001\n"));
        assert_eq!(file(&format!("{port}/state")), Some("4: ACTIVE\n"));
        assert_eq!(file(&format!("{port}/rate")), Some("40 Gb/sec (4X QDR)\n"));
        let gid = "0000:0000:0000:0000:0000:ffff:7f00:0001\n";
        assert_eq!(file(&format!("{port}/gids/3")), Some(gid));
        assert_eq!(file("sys/class/infiniband_verbs/uverbs0/ibdev"), Some("soft0\n"));
        assert_eq!(file("dev/infiniband/uverbs0"), Some("/dev/null"));
        assert!(files.iter().all(|(path, _)| !path.ends_with('/')), "{files:?}");
    }
}

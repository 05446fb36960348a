//! GPUs from NVIDIA's driver, by NVML.

use doorbell_nvml as nvml;

use super::gpu::{Gpu, GpuPeer, NvLinkEnd, NvLinkGroup};
use super::sysfs::natural;
use super::{Device, DeviceKind, Distance, Host, Location};

impl Gpu {
    fn known(gpu: &nvml::Gpu) -> Self {
        let mut nvlinks: Vec<NvLinkGroup> = Vec::new();
        for link in &gpu.links {
            let to = NvLinkEnd::from(&link.remote);
            let bytes_per_s = link.bytes_per_s.unwrap_or(0);
            match nvlinks.iter_mut().find(|bundle| bundle.to == to) {
                Some(bundle) => {
                    bundle.links += 1;
                    bundle.bytes_per_s = bundle.bytes_per_s.saturating_add(bytes_per_s);
                }
                None => nvlinks.push(NvLinkGroup {
                    to,
                    links: 1,
                    bytes_per_s,
                }),
            }
        }
        nvlinks.sort_by(|one, two| one.to.cmp(&two.to));
        let known = |reach: Option<nvml::P2pStatus>| reach.filter(|reach| *reach != nvml::P2pStatus::Unknown);
        let peers = gpu.peers.iter().map(|peer| GpuPeer {
            address: peer.address.clone(),
            nvlink: known(peer.nvlink).map(nvml::P2pStatus::is_supported),
            access: known(peer.read)
                .zip(known(peer.write))
                .map(|(read, write)| read.is_supported() && write.is_supported()),
        });
        Self {
            address: gpu.address.clone(),
            uuid: gpu.uuid.clone(),
            nvlinks,
            peers: peers.collect(),
        }
    }
}

impl From<&nvml::RemoteDevice> for NvLinkEnd {
    fn from(far: &nvml::RemoteDevice) -> Self {
        match far {
            nvml::RemoteDevice::Gpu(address) => Self::Gpu(address.clone()),
            nvml::RemoteDevice::Switch => Self::Switch,
            nvml::RemoteDevice::Processor => Self::Processor,
            nvml::RemoteDevice::Unknown => Self::Unknown,
        }
    }
}

fn distance(ancestor: nvml::Ancestor) -> Distance {
    match ancestor {
        nvml::Ancestor::Board | nvml::Ancestor::Switch | nvml::Ancestor::Switches => Distance::Switch,
        nvml::Ancestor::Bridge => Distance::Bridge,
        nvml::Ancestor::Node => Distance::Node,
        nvml::Ancestor::System => Distance::Cross,
    }
}

impl Host {
    /// Adds the driver's information about this machine's GPUs, or a note if there is none.
    pub fn query_driver(&mut self) {
        match nvml::Machine::read() {
            Ok(machine) => self.add_gpus(&machine),
            Err(absent) if self.devices.iter().any(|device| device.kind == DeviceKind::Gpu) => {
                self.notes.push(format!("NVLink is not known: {absent}"));
            }
            Err(_) => {}
        }
    }

    /// Adds the driver's GPUs, matched by PCI address, or without a location.
    pub fn add_gpus(&mut self, machine: &nvml::Machine) {
        self.notes.extend(machine.notes.iter().cloned());
        for gpu in &machine.gpus {
            let is_it = |device: &Device| device.kind == DeviceKind::Gpu && device.name == gpu.address;
            let at = match self.devices.iter().position(is_it) {
                Some(at) => at,
                None => {
                    self.notes.push(format!(
                        "sysfs does not show GPU {}: its PCIe switches are unknown",
                        gpu.address
                    ));
                    self.devices
                        .push(Device::new(gpu.address.clone(), DeviceKind::Gpu, Location::default()));
                    self.devices.len() - 1
                }
            };
            let device = &mut self.devices[at];
            if let (None, [node]) = (device.place.numa_node, &gpu.numa_nodes[..]) {
                device.place.numa_node = Some(*node);
            }
            device.index = Some(gpu.index);
            device.model.clone_from(&gpu.name);
            device.cpus.clone_from(&gpu.cpus);
            let ancestors = gpu.peers.iter();
            let ancestors = ancestors.filter_map(|peer| Some((peer.address.clone(), distance(peer.ancestor?))));
            device.ancestors = ancestors.collect();
            device.gpu = Some(Gpu::known(gpu));
        }
        let gpus = self
            .devices
            .partition_point(|device| device.kind == DeviceKind::Adapter);
        self.devices[gpus..].sort_by_cached_key(|device| natural(&device.name));
        let unknown = self.devices[gpus..]
            .iter()
            .filter(|device| device.gpu.is_none())
            .count();
        if unknown > 0 {
            self.notes.push(format!(
                "{unknown} of the GPUs that sysfs shows are not NVML's: they are hidden from this process, or have no driver"
            ));
        }
    }
}

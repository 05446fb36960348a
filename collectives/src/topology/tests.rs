//! Topologies of fake sysfs trees.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::*;
use crate::types::Rank;

#[cfg(feature = "gpu")]
mod gpu;

struct FakeSysfs(PathBuf);

impl FakeSysfs {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("doorbell-topology-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn pci(&self, path: &str, class: &str, vendor: &str, node: &str) {
        let folder = format!("devices/{path}");
        for (file, text) in [("class", class), ("vendor", vendor), ("numa_node", node)] {
            self.write(&format!("{folder}/{file}"), &format!("{text}\n"));
        }
        let links = self.0.join("bus/pci/devices");
        fs::create_dir_all(&links).unwrap();
        let address = path.rsplit('/').next().unwrap();
        symlink(self.0.join(&folder), links.join(address)).unwrap();
    }

    fn adapter(&self, name: &str, path: &str, node: &str) {
        self.pci(path, "0x020000", "0x15b3", node);
        let folder = format!("devices/{path}/infiniband/{name}");
        self.write(&format!("{folder}/ports/1/state"), "4: ACTIVE\n");
        self.write(&format!("{folder}/ports/1/rate"), "400 Gb/sec (4X NDR)\n");
        symlink(
            self.0.join(format!("devices/{path}")),
            self.0.join(&folder).join("device"),
        )
        .unwrap();
        let class = self.0.join("class/infiniband");
        fs::create_dir_all(&class).unwrap();
        symlink(self.0.join(&folder), class.join(name)).unwrap();
    }

    fn read(&self) -> Host {
        Host::read(&self.0, "h0").unwrap()
    }
}

impl Drop for FakeSysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Two sockets; on the first a switch with a GPU and an adapter, and an adapter elsewhere below the
/// same host bridge; on the second a GPU and an adapter by different bridges.
fn server(name: &str) -> FakeSysfs {
    let fake = FakeSysfs::new(name);
    for (node, cpus, distances) in [(0, "0-15", "10 21"), (1, "16-31", "21 10")] {
        fake.write(&format!("devices/system/node/node{node}/cpulist"), cpus);
        fake.write(&format!("devices/system/node/node{node}/distance"), distances);
    }
    fake.write("devices/system/node/online", "0-1\n");
    fake.pci(
        "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0",
        "0x030200",
        "0x10de",
        "0",
    );
    fake.adapter("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0", "0");
    fake.adapter("mlx5_10", "pci0000:00/0000:00:02.0/0000:04:00.0", "0");
    fake.adapter("mlx5_9", "pci0000:80/0000:80:01.0/0000:81:00.0", "1");
    fake.pci("pci0000:c0/0000:c0:01.0/0000:c1:00.0", "0x030000", "0x10de", "1");
    // Another vendor's display, and a network card without RDMA.
    fake.pci("pci0000:00/0000:00:05.0", "0x030000", "0x1a03", "0");
    fake.pci("pci0000:00/0000:00:06.0", "0x020000", "0x8086", "0");
    fake
}

#[test]
fn distances_are_by_common_ancestor() {
    let fake = server("distances");
    let host = fake.read();
    let names: Vec<&str> = host.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["mlx5_0", "mlx5_9", "mlx5_10", "0000:02:00.0", "0000:c1:00.0"]);
    let found: Vec<(&str, &str, Distance)> = host
        .distances()
        .map(|(one, two, far)| (one.name.as_str(), two.name.as_str(), far))
        .collect();
    let expected = [
        ("mlx5_0", "mlx5_9", Distance::Cross),
        ("mlx5_0", "mlx5_10", Distance::Bridge),
        ("mlx5_0", "0000:02:00.0", Distance::Switch),
        ("mlx5_0", "0000:c1:00.0", Distance::Cross),
        ("mlx5_9", "mlx5_10", Distance::Cross),
        ("mlx5_9", "0000:02:00.0", Distance::Cross),
        ("mlx5_9", "0000:c1:00.0", Distance::Node),
        ("mlx5_10", "0000:02:00.0", Distance::Bridge),
        ("mlx5_10", "0000:c1:00.0", Distance::Cross),
        ("0000:02:00.0", "0000:c1:00.0", Distance::Cross),
    ];
    assert_eq!(found, expected);
    assert_eq!(host.numa_nodes[1].distances, [21, 10]);
    let near: Vec<(&str, Distance)> = host
        .adapters_near(&host.devices[3].place)
        .into_iter()
        .map(|(device, far)| (device.name.as_str(), far))
        .collect();
    assert_eq!(
        near,
        [
            ("mlx5_0", Distance::Switch),
            ("mlx5_10", Distance::Bridge),
            ("mlx5_9", Distance::Cross)
        ]
    );
    let near: Vec<(&str, Distance)> = host
        .gpus_near(&host.devices[1].place)
        .into_iter()
        .map(|(device, far)| (device.name.as_str(), far))
        .collect();
    assert_eq!(
        near,
        [("0000:c1:00.0", Distance::Node), ("0000:02:00.0", Distance::Cross)]
    );
    assert_eq!(host.devices[0].place.distance(&host.devices[0].place), Distance::Same);
}

#[test]
fn the_drawing_shows_the_device_tree() {
    let fake = server("drawing");
    let expected = "\
host h0
  NUMA node 0: processors 0-15, distances 10 21
    pci0000:00
      0000:00:01.0
        0000:01:00.0
          0000:02:00.0 GPU
          0000:03:00.0 mlx5_0 (ACTIVE, 400 Gb/sec (4X NDR))
      0000:00:02.0
        0000:04:00.0 mlx5_10 (ACTIVE, 400 Gb/sec (4X NDR))
  NUMA node 1: processors 16-31, distances 21 10
    pci0000:80
      0000:80:01.0
        0000:81:00.0 mlx5_9 (ACTIVE, 400 Gb/sec (4X NDR))
    pci0000:c0
      0000:c0:01.0
        0000:c1:00.0 GPU
              mlx5_0        mlx5_9        mlx5_10       0000:02:00.0  0000:c1:00.0
mlx5_0        same          cross         bridge        switch        cross
mlx5_9        cross         same          cross         cross         node
mlx5_10       bridge        cross         same          bridge        cross
0000:02:00.0  switch        cross         bridge        same          cross
0000:c1:00.0  cross         node          cross         cross         same
near 0000:02:00.0: adapters mlx5_0 (switch)
near 0000:c1:00.0: adapters mlx5_9 (node)
";
    assert_eq!(fake.read().to_string(), expected);
}

#[test]
fn missing_and_invalid_parts_are_left_out() {
    assert!(
        Host::read(Path::new("/nowhere/at/all"), "h")
            .unwrap_err()
            .to_string()
            .starts_with("/nowhere/at/all is no sysfs: ")
    );
    let fake = FakeSysfs::new("nonsense");
    assert_eq!(fake.read().to_string(), "host h0\n  neither adapters nor GPUs\n");
    fake.write("devices/system/node/node0/distance", "10 ten");
    fake.write("devices/system/node/nodeX/distance", "10");
    fake.write("class/infiniband/rxe0/node_guid", "0000:0000");
    fake.write("class/infiniband/rxe0/ports/1/state", "4: ACT\x1b[31mIVE\n");
    fake.write("bus/pci/devices/0000:00:00.0/class", "zero");
    let class = fake.0.join("class/infiniband/out0");
    fs::create_dir_all(&class).unwrap();
    symlink("/", class.join("device")).unwrap();
    let host = fake.read();
    assert_eq!(host.numa_nodes.len(), 1);
    assert_eq!(host.devices.len(), 2);
    assert!(host.devices.iter().all(|device| device.place == Location::default()));
    assert_eq!(host.devices[1].port.as_deref(), Some("ACT [31mIVE"));
    assert_eq!(
        host.notes,
        [
            "NUMA node 0: distances \"10 ten\" are no numbers",
            "out0 is on no PCIe bus: a device in software",
            "rxe0 is on no PCIe bus: a device in software"
        ]
    );
    assert_eq!(host.devices[0].place.distance(&host.devices[1].place), Distance::Cross);
}

fn member(host: &str, node: u32, path: &str) -> Member {
    let pcie_path = path
        .split('/')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    Member {
        host: host.into(),
        place: Location {
            numa_node: Some(node),
            pcie_path,
        },
        gpu: None,
    }
}

#[test]
fn a_ring_enters_each_host_node_and_switch_once() {
    let members = [
        member("b", 0, "p0/s0/d0"),
        member("a", 1, "p8/s0/d0"),
        member("b", 1, "p8/s0/d0"),
        member("a", 0, "p0/s0/d0"),
        member("b", 0, "p0/s1/d0"),
        member("a", 1, "p8/s1/d0"),
        member("b", 0, "p0/s0/d1"),
        member("a", 0, "p0/s0/d1"),
        member("a", 1, "p8/s0/d1"),
    ];
    let order: Vec<u32> = ring(&members).into_iter().map(|Rank(rank)| rank).collect();
    assert_eq!(order, [0, 6, 4, 2, 1, 8, 5, 3, 7]);
    assert_eq!(ring(&[]), []);
}

#[test]
fn any_members_are_ordered_with_each_host_entered_once() {
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for ranks in 1..60 {
        let members: Vec<Member> = (0..ranks)
            .map(|_| {
                let path: Vec<String> = (0..random(4)).map(|_| format!("d{}", random(3))).collect();
                let numa_node = if random(4) == 0 { None } else { Some(random(2) as u32) };
                Member {
                    host: format!("h{}", random(5)),
                    place: Location {
                        numa_node,
                        pcie_path: path,
                    },
                    gpu: None,
                }
            })
            .collect();
        let order = ring(&members);
        let mut sorted: Vec<u32> = order.iter().map(|rank| rank.0).collect();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..ranks).collect::<Vec<u32>>());
        let mut hosts: Vec<&str> = order.iter().map(|rank| members[rank.index()].host.as_str()).collect();
        hosts.dedup();
        let entered = hosts.len();
        hosts.sort_unstable();
        hosts.dedup();
        assert_eq!(entered, hosts.len());
    }
}

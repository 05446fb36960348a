//! GPUs and their NVLinks: hosts, pairs and rings.

use doorbell_nvml as nvml;
use nvml::{Ancestor, Machine, P2pStatus};

use super::*;
use crate::topology::order::ring;

/// A machine of so many GPUs, with the number of direct links between each two, and to switches.
fn machine(count: usize, links: impl Fn(usize, usize) -> u32, switched: u32) -> Machine {
    let address = |at: usize| format!("0000:{:02x}:00.0", at + 1);
    let link = |number, far| nvml::Link {
        number,
        version: Some(6),
        bytes_per_s: Some(25_000_000_000),
        remote: far,
    };
    let gpu = |one: usize| {
        let others = (0..count).filter(|two| *two != one);
        let direct = others
            .clone()
            .flat_map(|two| vec![nvml::RemoteDevice::Gpu(address(two)); links(one, two) as usize]);
        let ends = direct.chain(vec![nvml::RemoteDevice::Switch; switched as usize]);
        let peers = others.map(|two| {
            let joined = switched > 0 || links(one, two) > 0;
            nvml::Peer {
                address: address(two),
                ancestor: Some(if one / 2 == two / 2 {
                    Ancestor::Switch
                } else {
                    Ancestor::System
                }),
                nvlink: Some(if joined { P2pStatus::Yes } else { P2pStatus::NoWay }),
                read: Some(if joined { P2pStatus::Yes } else { P2pStatus::NoChipset }),
                write: Some(P2pStatus::Yes),
            }
        });
        nvml::Gpu {
            index: one as u32,
            address: address(one),
            uuid: Some(format!("GPU-{one}")),
            name: Some("A100".to_owned()),
            links: ends.zip(0..).map(|(far, number)| link(number, far)).collect(),
            peers: peers.collect(),
            cpus: None,
            numa_nodes: vec![(one * 2 / count) as u32],
        }
    };
    Machine {
        driver: None,
        gpus: (0..count).map(gpu).collect(),
        notes: Vec::new(),
    }
}

/// A DGX-1 with V100s: two cubes of four, each with rings of single and of double links.
const DGX1: [[u32; 8]; 8] = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
];

fn dgx1() -> Machine {
    machine(8, |one, two| DGX1[one][two], 0)
}

fn host(machine: &Machine) -> Host {
    let mut host = Host {
        name: "h0".to_owned(),
        numa_nodes: Vec::new(),
        devices: Vec::new(),
        notes: Vec::new(),
    };
    host.add_gpus(machine);
    host
}

fn members(machine: &Machine, name: &str) -> Vec<Member> {
    let host = Host {
        name: name.to_owned(),
        ..host(machine)
    };
    let all = machine.gpus.iter().map(|gpu| host.member(&gpu.address).unwrap());
    all.collect()
}

fn links(one: &Member, two: &Member) -> Option<u32> {
    Some(one.gpu.as_ref()?.nvlink(two.gpu.as_ref()?)?.links)
}

fn ranks(order: Vec<Rank>) -> Vec<usize> {
    order.into_iter().map(Rank::index).collect()
}

fn random(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    }
}

fn shuffled<T>(mut all: Vec<T>, random: &mut impl FnMut(u64) -> u64) -> Vec<T> {
    for at in (1..all.len()).rev() {
        all.swap(at, random(at as u64 + 1) as usize);
    }
    all
}

#[test]
fn links_join_gpus_directly_or_by_a_switch() {
    let two = members(&machine(2, |_, _| 4, 0), "h");
    let joined = two[0].gpu.as_ref().unwrap().nvlink(two[1].gpu.as_ref().unwrap());
    assert_eq!(
        joined,
        Some(NvLink {
            links: 4,
            bytes_per_s: 100_000_000_000
        })
    );

    let mut switched = machine(8, |_, _| 0, 18);
    // One whose links are not all up.
    switched.gpus[3].links.truncate(17);
    let eight = members(&switched, "h");
    for one in 0..8 {
        for two in 0..8 {
            let expected = match one == two {
                true => None,
                false => Some(if one == 3 || two == 3 { 17 } else { 18 }),
            };
            assert_eq!(links(&eight[one], &eight[two]), expected, "{one} {two}");
        }
    }

    let mesh = members(&dgx1(), "h");
    for (one, row) in DGX1.iter().enumerate() {
        for (two, count) in row.iter().enumerate() {
            assert_eq!(links(&mesh[one], &mesh[two]).unwrap_or(0), *count, "{one} {two}");
        }
    }
    assert_eq!(links(&members(&machine(2, |_, _| 0, 0), "h")[0], &mesh[0]), None);
}

#[test]
fn the_drivers_report_of_a_pair_overrides_link_ends() {
    // An NVSwitch whose fabric manager has not started: the links are up, without remote ends.
    let mut idle = machine(2, |_, _| 0, 18);
    idle.gpus[0].peers[0].nvlink = Some(P2pStatus::NoWay);
    let two = members(&idle, "h");
    assert_eq!((links(&two[0], &two[1]), links(&two[1], &two[0])), (None, None));

    // A guest that does not see the remote ends of its links.
    let hidden = |known| {
        let mut machine = machine(2, |_, _| 0, 18);
        for gpu in &mut machine.gpus {
            gpu.links
                .iter_mut()
                .for_each(|link| link.remote = nvml::RemoteDevice::Unknown);
            gpu.peers[0].nvlink = known;
        }
        let two = members(&machine, "h");
        links(&two[0], &two[1])
    };
    assert_eq!(hidden(Some(P2pStatus::Yes)), Some(18));
    assert_eq!(hidden(Some(P2pStatus::Unknown)), None);
    assert_eq!(hidden(None), None);
    // Links to a CPU connect no GPUs.
    let mut power = machine(2, |_, _| 0, 3);
    for gpu in &mut power.gpus {
        gpu.links
            .iter_mut()
            .for_each(|link| link.remote = nvml::RemoteDevice::Processor);
    }
    let two = members(&power, "h");
    assert_eq!(links(&two[0], &two[1]), None);
}

/// The server of the other tests, with connected GPUs.
#[test]
fn a_host_shows_nvlink_before_pcie() {
    let fake = server("nvlink");
    let mut driver = machine(2, |_, _| 0, 18);
    driver.gpus[0].address = "0000:02:00.0".to_owned();
    driver.gpus[1].address = "0000:c1:00.0".to_owned();
    driver.gpus[0].peers[0].address = "0000:c1:00.0".to_owned();
    driver.gpus[1].peers[0].address = "0000:02:00.0".to_owned();
    driver.gpus[0].cpus = Some("0-15".to_owned());
    driver.gpus[0].name = Some("H200".to_owned());
    driver.notes.push("a note".to_owned());
    let mut host = fake.read();
    host.add_gpus(&driver);
    assert_eq!(host.notes, ["a note"]);
    let expected = "\
host h0
  NUMA node 0: processors 0-15, distances 10 21
    pci0000:00
      0000:00:01.0
        0000:01:00.0
          0000:02:00.0 GPU 0 (H200, 18 NVLinks)
          0000:03:00.0 mlx5_0 (ACTIVE, 400 Gb/sec (4X NDR))
      0000:00:02.0
        0000:04:00.0 mlx5_10 (ACTIVE, 400 Gb/sec (4X NDR))
  NUMA node 1: processors 16-31, distances 21 10
    pci0000:80
      0000:80:01.0
        0000:81:00.0 mlx5_9 (ACTIVE, 400 Gb/sec (4X NDR))
    pci0000:c0
      0000:c0:01.0
        0000:c1:00.0 GPU 1 (A100, 18 NVLinks)
              mlx5_0        mlx5_9        mlx5_10       0000:02:00.0  0000:c1:00.0
mlx5_0        same          cross         bridge        switch        cross
mlx5_9        cross         same          cross         cross         node
mlx5_10       bridge        cross         same          bridge        cross
0000:02:00.0  switch        cross         bridge        same          nvlink x18
0000:c1:00.0  cross         node          cross         nvlink x18    same
nvlink x18: 450 GB/s each way
near 0000:02:00.0: adapters mlx5_0 (switch), processors 0-15
near 0000:c1:00.0: adapters mlx5_9 (node)
";
    assert_eq!(host.to_string(), expected);
    let gpu = &host.devices[3];
    assert_eq!(host.distance(gpu, &host.devices[4]), Distance::NvLink);
    assert_eq!(host.pcie_distance(gpu, &host.devices[4]), Distance::Cross);
    // CUDA may use capitals.
    let member = host.member("0000:C1:00.0").unwrap();
    assert_eq!((member.host.as_str(), member.place.numa_node), ("h0", Some(1)));
    assert_eq!(member.gpu.unwrap().uuid.as_deref(), Some("GPU-1"));
    assert_eq!(host.member("0000:c2:00.0"), None);
}

#[test]
fn gpus_that_only_one_side_knows_are_shown_and_noted() {
    let fake = server("sides");
    let mut host = fake.read();
    host.add_gpus(&machine(2, |_, _| 0, 0));
    let names: Vec<&str> = host.devices[3..].iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["0000:01:00.0", "0000:02:00.0", "0000:c1:00.0"]);
    assert_eq!(
        host.notes,
        [
            "sysfs does not show GPU 0000:01:00.0: its PCIe switches are unknown",
            "1 of the GPUs that sysfs shows are not NVML's: they are hidden from this process, or have no driver"
        ]
    );
    // The driver may show what sysfs does not.
    let [one, two, unknown] = &host.devices[3..] else {
        panic!("{names:?}");
    };
    assert_eq!(
        (one.place.numa_node, host.distance(one, two)),
        (Some(0), Distance::Switch)
    );
    assert_eq!((unknown.index, host.distance(one, unknown)), (None, Distance::Cross));
    let drawn = host.to_string();
    assert!(
        drawn.contains("\n0000:01:00.0 and 0000:02:00.0 do not reach each other's memory\n"),
        "{drawn}"
    );
}

#[test]
fn a_ring_goes_by_the_best_links() {
    let mesh = members(&dgx1(), "h");
    assert_eq!(ranks(ring(&mesh)), [0, 3, 2, 1, 5, 6, 7, 4]);
    // For any assignment of ranks, no neighbours have less than two links: there is such a ring.
    let mut random = random(7);
    for _ in 0..50 {
        let members = shuffled(mesh.clone(), &mut random);
        let order = ranks(ring(&members));
        assert_eq!(order[0], 0);
        for at in 0..8 {
            assert_eq!(
                links(&members[order[at]], &members[order[(at + 1) % 8]]),
                Some(2),
                "{order:?}"
            );
        }
    }
}

#[test]
fn each_host_is_entered_once_and_its_way_ends_anywhere() {
    let mut all = members(&dgx1(), "a");
    // A chain of four: as a ring, its ends would be neighbours.
    all.extend(members(
        &machine(4, |one, two| u32::from(one.abs_diff(two) == 1), 0),
        "b",
    ));
    let mut random = random(3);
    for _ in 0..20 {
        let members = shuffled(all.clone(), &mut random);
        let order = ranks(ring(&members));
        let hosts: Vec<&str> = order.iter().map(|rank| members[*rank].host.as_str()).collect();
        assert_eq!(hosts.chunk_by(|one, two| one == two).count(), 2);
        for pair in order
            .windows(2)
            .filter(|pair| members[pair[0]].host == members[pair[1]].host)
        {
            let least = if members[pair[0]].host == "a" { 2 } else { 1 };
            assert!(links(&members[pair[0]], &members[pair[1]]) >= Some(least), "{order:?}");
        }
    }
}

#[test]
fn links_that_are_all_alike_change_no_order() {
    let mut random = random(11);
    for switched in [0, 18] {
        let members = shuffled(members(&machine(8, |_, _| 0, switched), "h"), &mut random);
        let plain: Vec<Member> = members
            .iter()
            .map(|member| Member {
                gpu: None,
                ..member.clone()
            })
            .collect();
        assert_eq!(ring(&members), ring(&plain));
    }
    // Ranks that share a GPU stay together.
    let mut twice = members(&machine(3, |_, _| 0, 18), "h");
    twice.extend(twice.clone());
    twice
        .iter_mut()
        .for_each(|member| member.place.pcie_path = vec![member.gpu.clone().unwrap().address]);
    assert_eq!(ranks(ring(&twice)), [0, 3, 1, 4, 2, 5]);
}

fn weight(members: &[Member], order: &[usize]) -> (u64, u64) {
    let each: Vec<u64> = (0..order.len())
        .map(|at| {
            let (one, two) = (&members[order[at]], &members[order[(at + 1) % order.len()]]);
            links(one, two).map_or(0, |links| u64::from(links) * 2_500_000)
        })
        .collect();
    (each.iter().copied().min().unwrap_or(0), each.iter().sum())
}

fn permutations(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(count - 1);
    let with = |order: &Vec<usize>, at: usize| [&order[..at], &[count - 1], &order[at..]].concat();
    shorter
        .iter()
        .flat_map(|order| (0..count).map(move |at| with(order, at)))
        .collect()
}

#[test]
fn no_other_ring_is_better() {
    let mut random = random(5);
    for round in 0..40 {
        let count = 3 + round % 4;
        let table: Vec<Vec<u32>> = (0..count)
            .map(|_| (0..count).map(|_| random(4) as u32).collect())
            .collect();
        let members = members(&machine(count, |one, two| table[one.min(two)][one.max(two)], 0), "h");
        let found = weight(&members, &ranks(ring(&members)));
        let best = permutations(count)
            .iter()
            .map(|order| weight(&members, order))
            .max()
            .unwrap();
        assert_eq!(found, best, "{table:?}");
    }
}

fn any_member(random: &mut impl FnMut(u64) -> u64) -> Member {
    let address = |random: &mut dyn FnMut(u64) -> u64| format!("0000:{:02x}:00.0", random(6));
    let any = |random: &mut dyn FnMut(u64) -> u64| match random(3) {
        0 => None,
        said => Some(said == 1),
    };
    let gpu = (random(4) > 0).then(|| Gpu {
        address: address(random),
        uuid: (random(2) == 0).then(|| "GPU-0".to_owned()),
        nvlinks: (0..random(4))
            .map(|_| NvLinkGroup {
                to: match random(4) {
                    0 => NvLinkEnd::Gpu(address(random)),
                    1 => NvLinkEnd::Switch,
                    2 => NvLinkEnd::Processor,
                    _ => NvLinkEnd::Unknown,
                },
                links: [0, 1, 18, u32::MAX][random(4) as usize],
                bytes_per_s: [0, 25_000_000_000, u64::MAX][random(3) as usize],
            })
            .collect(),
        peers: (0..random(4))
            .map(|_| GpuPeer {
                address: address(random),
                nvlink: any(random),
                access: any(random),
            })
            .collect(),
    });
    Member {
        host: format!("h{}", random(3)),
        place: Location {
            numa_node: (random(3) > 0).then(|| random(2) as u32),
            pcie_path: (0..random(4)).map(|_| format!("d{}", random(3))).collect(),
        },
        gpu,
    }
}

#[test]
fn any_members_are_ordered_completely_and_alike_on_all_ranks() {
    let mut random = random(1);
    for round in 0..300 {
        let count = random(if round % 10 == 0 { 60 } else { 14 });
        let members: Vec<Member> = (0..count).map(|_| any_member(&mut random)).collect();
        let order = ring(&members);
        let heard: Vec<Member> = members
            .iter()
            .map(|member| Member::decode(&member.encode()).unwrap())
            .collect();
        assert_eq!(heard, members);
        assert_eq!(ring(&heard), order);
        let mut sorted = ranks(order.clone());
        let hosts: Vec<&str> = sorted.iter().map(|rank| members[*rank].host.as_str()).collect();
        let entered = hosts.chunk_by(|one, two| one == two).count();
        let mut distinct = hosts.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(entered, distinct.len());
        sorted.sort_unstable();
        assert_eq!(sorted, (0..members.len()).collect::<Vec<_>>());
        for one in &members {
            for two in &members {
                if let (Some(gpu), Some(other)) = (&one.gpu, &two.gpu) {
                    assert_eq!(gpu.nvlink(other), other.nvlink(gpu));
                    assert_eq!(gpu.access(other), other.access(gpu));
                }
            }
        }
    }
}

#[test]
fn invalid_members_are_refused() {
    let member = &members(&dgx1(), "a host")[5];
    let bytes = member.encode();
    assert_eq!(Member::decode(&bytes).as_ref(), Some(member));
    assert_eq!(Member::decode(&Member::default().encode()), Some(Member::default()));
    for end in 0..bytes.len() {
        assert_eq!(Member::decode(&bytes[..end]), None, "{end}");
    }
    assert_eq!(Member::decode(&[&bytes[..], &[0]].concat()), None);
    let other = [&b"{\"of_another_release\":1,"[..], &bytes[1..]].concat();
    assert_eq!(Member::decode(&other), None);
    // Any byte may be corrupt: the result is an error, or a member that encodes again.
    let mut random = random(9);
    for _ in 0..2000 {
        let mut wrong = bytes.clone();
        wrong[random(bytes.len() as u64) as usize] = random(256) as u8;
        if let Some(read) = Member::decode(&wrong) {
            assert_eq!(Member::decode(&read.encode()), Some(read));
        }
    }
}

#[test]
fn overlong_values_are_truncated() {
    let mut member = members(&machine(2, |_, _| 1, 0), "h")[0].clone();
    member.host = "h".repeat(1000);
    member.place.pcie_path = vec!["0000:00:00.0".to_owned(); 100];
    let gpu = member.gpu.as_mut().unwrap();
    gpu.nvlinks = vec![gpu.nvlinks[0].clone(); 1000];
    gpu.peers = vec![gpu.peers[0].clone(); 1000];
    let read = Member::decode(&member.encode()).unwrap();
    assert_eq!((read.host.len(), read.place.pcie_path.len()), (255, 64));
    let gpu = read.gpu.unwrap();
    assert_eq!((gpu.nvlinks.len(), gpu.peers.len()), (64, 256));
}

#[test]
fn all_are_joined_or_they_are_not() {
    assert_eq!(least_nvlink(&[]), None);
    let mut eight = members(&machine(8, |_, _| 0, 18), "h");
    assert_eq!(least_nvlink(&eight[..1]), None);
    let all = Some(NvLink {
        links: 18,
        bytes_per_s: 450_000_000_000,
    });
    assert_eq!(least_nvlink(&eight), all);
    // Ranks that share a GPU, a rank without one, and one on another host.
    eight.push(eight[2].clone());
    assert_eq!(least_nvlink(&eight), all);
    let elsewhere = Member {
        host: "other".to_owned(),
        ..eight[0].clone()
    };
    assert_eq!(least_nvlink(&[&eight[..], &[elsewhere]].concat()), None);
    let without = Member {
        gpu: None,
        ..eight[0].clone()
    };
    assert_eq!(least_nvlink(&[&eight[..], &[without]].concat()), None);
    let mesh = members(&dgx1(), "h");
    assert_eq!(least_nvlink(&mesh), None);
    assert_eq!(
        least_nvlink(&mesh[..4]),
        Some(NvLink {
            links: 1,
            bytes_per_s: 25_000_000_000
        })
    );
    assert_eq!(least_nvlink(&members(&machine(2, |_, _| 0, 0), "h")), None);
}

//! Machines described to a fake NVML (`fake/nvml.c`).

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_nvml::{Ancestor, Link, LoadError, Machine, P2pStatus, RemoteDevice};
use libloading::os::unix::Library;

/// A library file of this test alone, as the dynamic loader gives each file its own state.
struct Fake {
    library: Library,
    path: PathBuf,
}

impl Fake {
    fn new(description: &str) -> Self {
        Self::compiled(&[], description)
    }

    fn compiled(flags: &[&str], description: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nvml-{}-{next}.so", process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/nvml.c");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC"])
            .args(flags)
            .arg("-o")
            .args([&path, &source]);
        assert!(cc.status().expect("a C compiler, cc").success());
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        let fake = Self { library, path };
        let description = CString::new(description).unwrap();
        // SAFETY: the type is that in nvml.c.
        unsafe {
            let describe = fake
                .library
                .get::<unsafe extern "C" fn(*const core::ffi::c_char)>(b"fake_describe")
                .unwrap();
            describe(description.as_ptr());
        }
        fake
    }

    fn read(&self) -> Result<Machine, LoadError> {
        // SAFETY: the fake library implements the functions called here like NVML.
        let read = unsafe { Machine::read_from(&self.path) };
        // SAFETY: the type is that in nvml.c.
        let started = unsafe {
            self.library
                .get::<unsafe extern "C" fn() -> i32>(b"fake_started")
                .unwrap()()
        };
        assert_eq!(started, 0, "the library was not shut down");
        read
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // A leftover file in the build folder is harmless.
        drop(fs::remove_file(&self.path));
    }
}

const TWO: &str = "\
driver 580.159.03
gpu 0:18:0 GPU-aa NVIDIA H200
gpu 1a0b2:c1:0 GPU-bb NVIDIA H200
links 0 2 26562 6 1
links 0 1 25781 3 switch
dead 0 1
links 0 1 0 7 npu
links 0 1 0 -1 unknown
links 0 1 31000 6 unknown
links 1 2 26562 6 0
ancestor 0 1 30
p2p 1 0 2 4
cpus 0 0 15
cpus 0 32 32
cpus 0 40 47
node 0 1
";

#[test]
fn a_machine_is_read_whole() {
    let machine = Fake::new(TWO).read().unwrap();
    assert_eq!(machine.notes, [""; 0]);
    assert_eq!(machine.driver.as_deref(), Some("580.159.03"));
    let [one, two] = &machine.gpus[..] else {
        panic!("{machine:?}");
    };
    assert_eq!(
        (one.index, one.address.as_str(), two.address.as_str()),
        (0, "0000:18:00.0", "1a0b2:c1:00.0")
    );
    assert_eq!(
        (one.uuid.as_deref(), one.name.as_deref()),
        (Some("GPU-aa"), Some("NVIDIA H200"))
    );
    assert_eq!(
        (one.cpus.as_deref(), &one.numa_nodes[..]),
        (Some("0-15,32,40-47"), &[1][..])
    );
    assert_eq!((two.cpus.as_deref(), &two.numa_nodes[..]), (None, &[][..]));
    let link = |number, version, gb_per_s: Option<u64>, far: RemoteDevice| Link {
        number,
        version,
        bytes_per_s: gb_per_s.map(|speed| speed * 1_000_000_000),
        remote: far,
    };
    let gpu = || RemoteDevice::Gpu("1a0b2:c1:00.0".to_owned());
    let links = [
        link(0, Some(6), Some(25), gpu()),
        link(1, Some(6), Some(25), gpu()),
        link(2, Some(3), Some(25), RemoteDevice::Switch),
        // Links without a speed of their own have the GPU's common speed.
        link(4, Some(7), Some(25), RemoteDevice::Processor),
        link(5, None, Some(25), RemoteDevice::Unknown),
        link(6, Some(6), Some(31), RemoteDevice::Unknown),
    ];
    assert_eq!(one.links, links);
    let peer = &two.peers[0];
    assert_eq!(
        (peer.address.as_str(), peer.ancestor, peer.nvlink),
        ("0000:18:00.0", Some(Ancestor::Bridge), Some(P2pStatus::Disabled))
    );
    assert_eq!(
        (one.peers[0].nvlink, one.peers[0].write),
        (Some(P2pStatus::Yes), Some(P2pStatus::Yes))
    );
}

#[test]
fn unreported_speed_is_inferred_from_the_version() {
    let speed = |version: &str| {
        let described = format!("gpu 0:18:0 a A\nlinks 0 1 0 {version} switch");
        Fake::new(&described).read().unwrap().gpus[0].links[0].bytes_per_s
    };
    assert_eq!(speed("1"), Some(20_000_000_000));
    assert_eq!(speed("6"), Some(25_000_000_000));
    assert_eq!(speed("7"), Some(50_000_000_000));
    assert_eq!(speed("99"), None);
    assert_eq!(speed("-1"), None);
}

#[test]
fn gpu_without_nvlink_has_no_links_and_no_notes() {
    let machine = Fake::new("driver 1\ngpu 0:1:0 a A\ngpu 0:2:0 b B").read().unwrap();
    assert_eq!((machine.notes.len(), machine.gpus[0].links.len()), (0, 0));
    assert_eq!(machine.gpus[0].peers[0].nvlink, Some(P2pStatus::NoWay));
    assert_eq!(machine.gpus[0].peers[0].read, Some(P2pStatus::NoChipset));
    assert_eq!(machine.gpus[1].peers[0].ancestor, Some(Ancestor::System));
}

#[test]
fn failed_queries_become_notes() {
    let whole = Fake::new(TWO).read().unwrap();
    // The expected machine when a function is missing.
    type Without = fn(&mut Machine);
    let cases: [(&str, Without); 10] = [
        ("SystemGetDriverVersion", |machine| machine.driver = None),
        // The versions of links imply speeds too, except for a link that has neither.
        ("DeviceGetFieldValues", |machine| {
            for link in &mut machine.gpus[0].links {
                link.bytes_per_s = match link.version {
                    Some(7) => Some(50_000_000_000),
                    Some(_) => Some(25_000_000_000),
                    None => None,
                };
            }
        }),
        ("DeviceGetUUID", |machine| {
            machine.gpus.iter_mut().for_each(|gpu| gpu.uuid = None)
        }),
        ("DeviceGetName", |machine| {
            machine.gpus.iter_mut().for_each(|gpu| gpu.name = None)
        }),
        ("DeviceGetCpuAffinity", |machine| {
            machine.gpus.iter_mut().for_each(|gpu| gpu.cpus = None)
        }),
        ("DeviceGetMemoryAffinity", |machine| {
            machine.gpus.iter_mut().for_each(|gpu| gpu.numa_nodes.clear())
        }),
        ("DeviceGetNvLinkState", |machine| {
            machine.gpus.iter_mut().for_each(|gpu| gpu.links.clear())
        }),
        ("DeviceGetTopologyCommonAncestor", |machine| {
            let peers = machine.gpus.iter_mut().flat_map(|gpu| &mut gpu.peers);
            peers.for_each(|peer| peer.ancestor = None);
        }),
        ("DeviceGetP2PStatus", |machine| {
            for peer in machine.gpus.iter_mut().flat_map(|gpu| &mut gpu.peers) {
                (peer.nvlink, peer.read, peer.write) = (None, None, None);
            }
        }),
        ("DeviceGetNvLinkRemotePciInfo_v2", |machine| {
            let links = machine.gpus.iter_mut().flat_map(|gpu| &mut gpu.links);
            links
                .filter(|link| matches!(link.remote, RemoteDevice::Gpu(_)))
                .for_each(|link| link.remote = RemoteDevice::Unknown);
        }),
    ];
    for (function, without) in cases {
        let mut expected = whole.clone();
        without(&mut expected);
        let machine = Fake::new(&format!("{TWO}fail {function} 999")).read().unwrap();
        assert!(!machine.notes.is_empty(), "{function}");
        for note in &machine.notes {
            // For the link without a version, which matters only now.
            if note.contains("nvmlDeviceGetNvLinkVersion answers 3 ") && function == "DeviceGetFieldValues" {
                continue;
            }
            assert!(
                note.ends_with(&format!(": nvml{function} answers 999 (no words for it)")),
                "{note}"
            );
        }
        expected.notes.clone_from(&machine.notes);
        assert_eq!(machine, expected, "{function}");
    }
}

#[test]
fn remote_device_type_is_inferred_from_a_gpu_address() {
    let machine = Fake::new(&format!("{TWO}fail DeviceGetNvLinkRemoteDeviceType 999"))
        .read()
        .unwrap();
    let links = &machine.gpus[0].links;
    assert_eq!(links[0].remote, RemoteDevice::Gpu("1a0b2:c1:00.0".to_owned()));
    // Only that it is not a GPU is known of a switch.
    assert_eq!(links[2].remote, RemoteDevice::Unknown);
    assert_eq!(machine.notes.len(), 2, "one for each GPU: {:?}", machine.notes);
}

#[test]
fn nothing_leaks_when_every_call_fails() {
    let refused = Fake::new(&format!("{TWO}fail * 3")).read().unwrap_err();
    assert_eq!(
        refused.to_string(),
        "no NVML: nvmlDeviceGetCount_v2 answers 3 (Not Supported)"
    );
    let lost = Fake::new(&format!("{TWO}fail DeviceGetHandleByIndex_v2 15"))
        .read()
        .unwrap();
    assert!(lost.gpus.is_empty());
    assert_eq!(
        lost.notes[0],
        "GPU 0: nvmlDeviceGetHandleByIndex_v2 answers 15 (Unknown Error)"
    );
    let unplaced = Fake::new(&format!("{TWO}fail DeviceGetPciInfo_v3 3")).read().unwrap();
    assert!(unplaced.gpus.is_empty() && unplaced.notes.len() == 2);
}

#[test]
fn what_is_missing_is_said_in_one_line() {
    let mismatch = Fake::new("fail Init_v2 18").read().unwrap_err();
    assert_eq!(
        mismatch.to_string(),
        "no NVML: nvmlInit_v2 answers 18 (Driver/library version mismatch); the kernel's module is of another version than the library: reboot, or load that of the same version"
    );
    // SAFETY: there is no such file.
    let nowhere = unsafe { Machine::read_from(Path::new("/nowhere/libnvidia-ml.so.1")) }.unwrap_err();
    let said = nowhere.to_string();
    assert!(
        said.starts_with("no NVML: cannot load /nowhere/libnvidia-ml.so.1: cannot open shared object file"),
        "{said}"
    );
    // A library without any of the functions. SAFETY: the C library's initialisers have no
    // requirements, and nothing of it is called.
    let other = unsafe { Machine::read_from(Path::new("libc.so.6")) }.unwrap_err();
    assert_eq!(
        other,
        LoadError::NoSymbol {
            symbol: "nvmlErrorString"
        }
    );
}

#[test]
fn old_library_reports_what_it_supports() {
    let machine = Fake::compiled(&["-DOLD"], TWO).read().unwrap();
    assert_eq!(machine.gpus.len(), 2);
    assert!(
        machine
            .gpus
            .iter()
            .all(|gpu| gpu.links.is_empty() && gpu.name.is_none())
    );
    assert!(
        machine
            .notes
            .contains(&"this NVML has no nvmlDeviceGetNvLinkState: a newer driver is needed".to_owned())
    );
    let mut distinct = machine.notes.clone();
    distinct.dedup();
    assert_eq!(distinct, machine.notes);
}

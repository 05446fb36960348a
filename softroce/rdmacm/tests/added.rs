//! The connection manager keeps its devices open: those that are added, and go, are none of them.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::{DeviceConfig, add, api, configure};
use doorbell_softroce_rdmacm::{rdma_free_devices, rdma_get_devices};

/// Whether the added device's thread runs: it has its name.
fn has_thread() -> bool {
    let mut threads = fs::read_dir("/proc/self/task").unwrap();
    threads.any(|thread| {
        let name = fs::read_to_string(thread.unwrap().path().join("comm"));
        name.is_ok_and(|name| name.starts_with("own-"))
    })
}

#[test]
fn an_added_device_is_not_the_connection_managers() {
    let own = |name: &str| DeviceConfig {
        exclusive: true,
        ..DeviceConfig::new(name)
    };
    configure(vec![own("soft0")]).unwrap();
    let added = add(own("own")).unwrap();
    let (mut listed, mut opened) = (0, 0);
    // SAFETY: the counts may be written; each list is freed once.
    unsafe {
        (api().free_device_list)((api().get_device_list)(&mut listed));
        rdma_free_devices(rdma_get_devices(&mut opened));
    }
    assert_eq!((listed, opened), (2, 1));
    assert!(has_thread());
    drop(added);
    // A joined thread is listed until the kernel has removed it.
    let began = Instant::now();
    while has_thread() {
        assert!(began.elapsed() < Duration::from_secs(10), "it stays open");
        thread::sleep(Duration::from_millis(1));
    }
}

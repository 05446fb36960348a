//! Devices that are added to those of the process: many at a time, each with an address of its own,
//! and gone with all their descriptors and threads.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs;
use std::slice;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::{AddedDevice, DeviceConfig, OpenError, add, api};
use doorbell_verbs_sys::ibv_context;

/// Of a device with a context on it: socket, multicast sockets' epoll, interface notices; the
/// group's name, epoll and registry; the progress thread's wake-up; device file and events.
const DESCRIPTORS: usize = 9;

const DEVICES: usize = 90;

fn own() -> DeviceConfig {
    DeviceConfig {
        exclusive: true,
        faults: "drop=0.1".parse().unwrap(),
        ..DeviceConfig::new("own")
    }
}

fn listed() -> HashSet<String> {
    let mut count = 0;
    // SAFETY: the list has `count` devices, each with a name, until it is freed.
    unsafe {
        let list = (api().get_device_list)(&mut count);
        let devices = slice::from_raw_parts(list, count as usize).iter();
        let name = |device| CStr::from_ptr((api().get_device_name)(device)).to_str().unwrap();
        let names = devices.map(|&device| name(device).to_owned()).collect();
        (api().free_device_list)(list);
        names
    }
}

fn open(device: &AddedDevice) -> *mut ibv_context {
    let mut count = 0;
    // SAFETY: as in `listed`; it is opened before the list is freed.
    unsafe {
        let list = (api().get_device_list)(&mut count);
        let devices = slice::from_raw_parts(list, count as usize).iter();
        let is_it = |&&other: &&_| CStr::from_ptr((api().get_device_name)(other)).to_str() == Ok(device.name());
        let context = (api().open_device)(*devices.clone().find(is_it).unwrap());
        (api().free_device_list)(list);
        assert!(!context.is_null());
        context
    }
}

/// Descriptors and threads.
fn counts() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|folder| fs::read_dir(folder).unwrap().count())
}

/// Waits for them: a joined thread is listed until the kernel has removed it, and a progress thread
/// that reads the interfaces has a socket meanwhile.
fn await_counts(expected: [usize; 2]) {
    let began = Instant::now();
    while counts() != expected {
        let late = began.elapsed() > Duration::from_secs(10);
        assert!(!late, "{:?} and not {expected:?}", counts());
        thread::sleep(Duration::from_millis(1));
    }
}

// One test: it counts what the process has.
#[test]
fn devices_come_and_go() {
    let listed_before = listed();
    let before = counts();
    let open_counts = [before[0] + DEVICES * DESCRIPTORS, before[1] + DEVICES];
    let added: Vec<_> = (0..DEVICES).map(|_| add(own()).unwrap()).collect();
    let contexts: Vec<_> = added.iter().map(open).collect();
    let addresses: HashSet<_> = added.iter().map(|device| device.address().unwrap()).collect();
    assert_eq!(addresses.len(), DEVICES, "each has its own");
    assert_eq!(listed().len(), listed_before.len() + DEVICES);
    await_counts(open_counts);

    let is_refused = |config| matches!(add(config), Err(OpenError::Bind { .. }));
    let at = |address, exclusive| DeviceConfig {
        address,
        exclusive,
        ..own()
    };
    assert!(is_refused(at(added[0].address(), false)), "it is shared with none");
    let free = add(own()).unwrap().address();
    let shared = add(at(free, false)).unwrap();
    assert!(is_refused(at(free, true)), "nor does it share another's");
    drop(shared);

    drop(added);
    assert_eq!(listed(), listed_before, "a device goes with its handle");
    await_counts(open_counts);
    for context in contexts {
        // SAFETY: open, and closed once.
        assert_eq!(unsafe { (api().close_device)(context) }, 0);
    }
    await_counts(before);
}

//! Attributes of devices and memory.

use doorbell_verbs::{AtomicSupport, PeerRead};

use crate::Side;

#[test]
fn a_device_describes_itself_with_its_ports() {
    let side = Side::new(0);
    let device = side.context.describe().unwrap();
    assert_eq!(device.name, side.context.name());
    assert_eq!(device.atomics, AtomicSupport::Device);
    let limit = |name: &str| device.limits.iter().find(|(known, _)| *known == name).unwrap().1;
    assert_eq!(limit("max_cqe"), u64::from(side.context.attr().max_cqe));
    assert_eq!(limit("max_qp_wr"), u64::from(side.context.attr().max_qp_wr));
    let [port] = &device.ports[..] else {
        panic!("one port");
    };
    assert_eq!(port.attr, side.context.port(1).unwrap());
    assert_eq!(port.gids, side.context.gids(1).unwrap());
    assert_eq!(port.pkeys, [(0, 0xffff)]);
    let shown = device.to_string();
    let entry = port.gids.last().unwrap();
    let (index, gid) = (entry.index, entry.gid);
    for line in [
        side.context.name(),
        "  atomic_cap Device",
        "  port 1 active, Ethernet",
        "    P_Key 0: 0xffff",
        &format!("    GID {index}: {gid}, RoceV2"),
    ] {
        assert!(shown.lines().any(|shown| shown == line), "no line {line:?} in\n{shown}");
    }
}

#[test]
fn a_buffer_describes_itself_with_its_region() {
    let side = Side::new(0);
    let whole = side.pd.register(vec![0; 64], PeerRead).unwrap();
    let (rkey, start) = (whole.remote().rkey(), whole.addr());
    let (_, second) = whole.split_at(24);
    let memory = second.describe();
    assert_eq!((memory.addr, memory.len), (start + 24, 40));
    assert_eq!((memory.region_addr, memory.region_len, memory.rkey), (start, 64, rkey));
    assert_eq!(
        memory.to_string(),
        format!(
            "40 bytes at {:#x}, of a region of 64 at {start:#x}, lkey {:#010x}, rkey {rkey}; peers may READ",
            start + 24,
            memory.lkey
        )
    );
}

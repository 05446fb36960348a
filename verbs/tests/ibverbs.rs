//! The crate `ibverbs` beside ours: `cargo test -p doorbell-verbs --features ibverbs ibverbs`.

use doorbell_verbs::{Endpoint, Gid, GidEntry, GidType, Library, Lid, Mtu, Psn, Qpn};
use doorbell_verbs_sys as ours;
use ibverbs_sys as theirs;

use crate::stub::Stub;

fn gid() -> Gid {
    Gid::from(std::net::IpAddr::from([10, 9, 0, 1]))
}

#[test]
fn gids_are_the_same_there_and_back() {
    let there = ::ibverbs::Gid::from(gid());
    assert_eq!(there.interface_id(), 0xffff_0a09_0001);
    assert_eq!(Gid::from(there), gid());
    let entry = ::ibverbs::GidEntry {
        gid: there,
        gid_index: 3,
        port_num: 1,
        gid_type: theirs::IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: 7,
    };
    let here = GidEntry::from(&entry);
    assert_eq!((here.index, here.gid, here.kind), (3, gid(), GidType::RoceV2));
    assert_eq!(here.interface, 7);
}

#[test]
fn endpoints_are_the_same_there_and_back() {
    let here = Endpoint {
        gid: gid(),
        lid: Lid(7),
        qpn: Qpn::truncated(0x1234),
        psn: Psn::truncated(0),
        mtu: Mtu::B1024,
        max_dest_rd_atomic: 1,
    };
    let there = here.to_ibverbs();
    assert_eq!((there.num, there.lid), (0x1234, 7));
    assert_eq!(Endpoint::from_ibverbs(there, Mtu::B1024, 1), Some(here));
    let without = Endpoint {
        gid: Gid::default(),
        ..here
    };
    assert_eq!(without.to_ibverbs().gid, None);
    let nonsense = ::ibverbs::QueuePairEndpoint { num: 1 << 24, ..there };
    assert_eq!(Endpoint::from_ibverbs(nonsense, Mtu::B1024, 1), None);
}

#[test]
fn a_device_is_given_only_if_it_is_of_the_library_linked_with() {
    assert!(Stub::new().open().as_ibverbs().is_none());
    // This program is linked with it, so it is there; and the library loaded is the same.
    let system = Library::system().unwrap().api();
    assert_eq!(system.open_device as *const (), theirs::ibv_open_device as *const ());
    for device in Library::system().unwrap().devices().unwrap() {
        let context = Library::system().unwrap().open(&device.name).unwrap();
        let there = context.as_ibverbs().unwrap();
        assert_eq!(there.name().unwrap().to_str(), Ok(device.name.as_str()));
    }
}

/// Pointers are interchangeable. Not ibv_port_attr's: it grows, and its queries pass its length.
#[test]
fn structs_are_laid_out_alike() {
    macro_rules! alike {
        ($($name:ident)*) => {
            $(assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), stringify!($name));)*
        };
    }
    alike!(
        ibv_device ibv_context ibv_pd ibv_mr ibv_mw ibv_cq ibv_qp ibv_srq ibv_ah ibv_comp_channel
        ibv_qp_attr ibv_qp_init_attr ibv_device_attr ibv_send_wr ibv_recv_wr ibv_sge ibv_ah_attr ibv_gid_entry
    );
    assert_eq!(
        core::mem::offset_of!(ours::ibv_qp, qp_num),
        core::mem::offset_of!(theirs::ibv_qp, qp_num)
    );
    assert_eq!(
        core::mem::offset_of!(ours::ibv_mr, rkey),
        core::mem::offset_of!(theirs::ibv_mr, rkey)
    );
    assert_eq!(
        core::mem::offset_of!(ours::ibv_context, ops),
        core::mem::offset_of!(theirs::ibv_context, ops)
    );
}

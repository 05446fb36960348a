//! Each reason to refuse a binding, an access through a window, and an invalidation.

use doorbell_roce_proto::LKey;
use doorbell_roce_proto::memory::{Memory, Placement};

use super::*;
use crate::memory::table::Region;
use crate::memory::{Rights, WindowsBound};

const PD: PdId = PdId(3);
const VIA: AccessContext = AccessContext {
    pd: PD,
    qpn: Qpn::new(5),
};
const OTHER_QP: AccessContext = AccessContext {
    pd: PD,
    qpn: Qpn::new(6),
};
const OTHER_PD: AccessContext = AccessContext {
    pd: PdId(4),
    qpn: Qpn::new(7),
};
const ALL: RemoteAccess = RemoteAccess {
    read: true,
    write: true,
    atomic: true,
    flush: Placement::NONE,
};
const BINDABLE: Rights = Rights {
    local_write: true,
    remote_write: false,
    remote_read: false,
    remote_atomic: false,
    bind: true,
    on_demand: false,
    flush_global: true,
};
const IOVA: u64 = 0x1_0000;

struct Setup {
    table: Table,
    region: u32,
    window: u32,
}

/// 64 leaked bytes at [`IOVA`], and an unbound window.
fn setup(kind: WindowKind, rights: Rights) -> Setup {
    let words: &'static mut [u64; 8] = Box::leak(Box::new([0; 8]));
    let mut table = Table::new();
    let region = Region::new(words.as_mut_ptr().cast(), 64, IOVA, PD, rights);
    let region = table.add_region(region).unwrap();
    let window = table.add_window(PD, kind).unwrap();
    Setup { table, region, window }
}

impl Setup {
    /// Binds bytes 16 to 48, with `low` as the lower bits of the window's key.
    fn request(&self, low: u32) -> Bind {
        Bind {
            rkey: RKey(self.window & !0xff | low),
            region: LKey(self.region),
            addr: IOVA + 16,
            len: 32,
            access: ALL,
            zero_based: false,
        }
    }

    fn bind(&mut self, low: u32) -> RKey {
        let request = self.request(low);
        self.table.bind(VIA, &request).unwrap();
        request.rkey
    }

    fn reads(&mut self, via: AccessContext, rkey: RKey, addr: u64, len: u64) -> bool {
        self.table.check_remote(via, rkey, addr, len, RemoteRight::Read).is_ok()
    }

    fn refuses(&mut self, via: AccessContext, change: impl FnOnce(&mut Bind)) {
        let mut request = self.request(9);
        change(&mut request);
        assert_eq!(self.table.bind(via, &request), Err(AccessError), "{request:?}");
        assert_eq!(
            (self.table.bindings, self.slot_key()),
            (0, self.window),
            "nothing changed"
        );
    }

    fn slot_key(&self) -> u32 {
        self.table.slots[usize::from(self.table.keys.find(self.window).unwrap())].key
    }
}

#[test]
fn a_window_grants_its_range_and_nothing_else() {
    for kind in [WindowKind::One, WindowKind::Two] {
        let mut setup = setup(kind, BINDABLE);
        let first = RKey(setup.window);
        assert!(!setup.reads(VIA, first, IOVA + 16, 1), "it is not bound yet");
        let rkey = setup.bind(first.0 & 0xff ^ 9);
        assert!(setup.reads(VIA, rkey, IOVA + 16, 32));
        for (addr, len) in [(IOVA + 15, 2), (IOVA + 16, 33), (IOVA + 48, 1), (0, 1), (u64::MAX, 2)] {
            assert!(!setup.reads(VIA, rkey, addr, len), "{len} bytes at {addr:#x}");
        }
        let region = RKey(setup.region);
        assert!(
            !setup.reads(VIA, region, IOVA + 16, 1),
            "the region itself grants nothing"
        );
        assert!(!setup.reads(VIA, first, IOVA + 16, 1), "its former key is invalid");
        assert!(!setup.reads(OTHER_PD, rkey, IOVA + 16, 1));
        assert_eq!(setup.reads(OTHER_QP, rkey, IOVA + 16, 1), kind == WindowKind::One);
        setup.table.remote_write(VIA, rkey, IOVA + 16, &[1; 32]).unwrap();
        let add = doorbell_roce_proto::memory::AtomicOp::FetchAdd { add: 1 };
        assert_eq!(
            setup.table.remote_atomic(VIA, rkey, IOVA + 40, add),
            Ok(u64::from_ne_bytes([1; 8]))
        );
        let mut bytes = [9; 64];
        setup.table.gather(PD, LKey(setup.region), IOVA, &mut bytes).unwrap();
        assert_eq!(
            (bytes[..16].as_ref(), bytes[48..].as_ref()),
            ([0; 16].as_ref(), [0; 16].as_ref())
        );
        assert_eq!(bytes[16..40], [1; 24]);
    }
}

#[test]
fn a_window_grants_what_was_bound() {
    for (right, access) in [
        (
            RemoteRight::Read,
            RemoteAccess {
                read: true,
                ..RemoteAccess::default()
            },
        ),
        (
            RemoteRight::Write,
            RemoteAccess {
                write: true,
                ..RemoteAccess::default()
            },
        ),
        (
            RemoteRight::Atomic,
            RemoteAccess {
                atomic: true,
                ..RemoteAccess::default()
            },
        ),
    ] {
        let mut setup = setup(WindowKind::Two, BINDABLE);
        let request = Bind {
            access,
            ..setup.request(1)
        };
        setup.table.bind(VIA, &request).unwrap();
        for other in [RemoteRight::Read, RemoteRight::Write, RemoteRight::Atomic] {
            let granted = setup.table.check_remote(VIA, request.rkey, IOVA + 16, 8, other).is_ok();
            assert_eq!(granted, other == right, "{other:?} with {access:?}");
        }
    }
}

#[test]
fn what_cannot_be_bound() {
    for kind in [WindowKind::One, WindowKind::Two] {
        let mut setup = setup(kind, BINDABLE);
        setup.refuses(OTHER_PD, |_| {});
        setup.refuses(VIA, |bind| bind.region = LKey(bind.region.0 ^ 1));
        setup.refuses(VIA, |bind| bind.region = LKey(bind.rkey.0));
        setup.refuses(VIA, |bind| bind.rkey = RKey(bind.region.0));
        setup.refuses(VIA, |bind| bind.rkey = RKey(bind.rkey.0 ^ 0x100));
        setup.refuses(VIA, |bind| bind.addr = IOVA + 40);
        setup.refuses(VIA, |bind| bind.addr = IOVA - 1);
        setup.refuses(VIA, |bind| bind.len = u64::MAX);
    }
    setup(WindowKind::One, BINDABLE).refuses(VIA, |bind| bind.zero_based = true);
    setup(WindowKind::Two, BINDABLE).refuses(VIA, |bind| bind.len = 0);
    let without = |change: fn(&mut Rights)| {
        let mut rights = BINDABLE;
        change(&mut rights);
        setup(WindowKind::Two, rights)
    };
    without(|rights| rights.bind = false).refuses(VIA, |_| {});
    let mut read_only = without(|rights| rights.local_write = false);
    read_only.refuses(VIA, |bind| bind.access.atomic = false);
    read_only.refuses(VIA, |bind| bind.access.write = false);
    let read = RemoteAccess {
        read: true,
        ..RemoteAccess::default()
    };
    let request = Bind {
        access: read,
        ..read_only.request(9)
    };
    assert_eq!(
        read_only.table.bind(VIA, &request),
        Ok(()),
        "reading needs no LOCAL_WRITE"
    );
}

#[test]
fn a_window_of_type_1_is_bound_again_and_unbound_by_binding() {
    let mut setup = setup(WindowKind::One, BINDABLE);
    let first = setup.bind(1);
    let second = setup.bind(2);
    assert!(!setup.reads(VIA, first, IOVA + 16, 1));
    assert!(setup.reads(VIA, second, IOVA + 16, 1));
    assert_eq!(
        setup.table.invalidate(VIA, second, Invalidator::Local),
        Err(AccessError)
    );
    assert_eq!(setup.table.deregister(setup.region), Err(WindowsBound));
    let nothing = Bind {
        len: 0,
        region: LKey(0),
        ..setup.request(3)
    };
    setup.table.bind(OTHER_QP, &nothing).unwrap();
    assert!(!setup.reads(VIA, nothing.rkey, IOVA + 16, 1));
    assert_eq!(setup.table.deregister(setup.region), Ok(()));
}

#[test]
fn a_window_of_type_2_is_bound_once_and_invalidated() {
    let mut setup = setup(WindowKind::Two, BINDABLE);
    let rkey = setup.bind(1);
    let again = setup.request(2);
    assert_eq!(setup.table.bind(VIA, &again), Err(AccessError));
    for by in [Invalidator::Local, Invalidator::Peer] {
        let mut fails = |via, rkey| assert_eq!(setup.table.invalidate(via, rkey, by), Err(AccessError));
        fails(OTHER_QP, rkey);
        fails(OTHER_PD, rkey);
        fails(VIA, RKey(rkey.0 ^ 1));
        fails(VIA, RKey(setup.region));
        fails(VIA, RKey(u32::MAX));
    }
    assert!(setup.reads(VIA, rkey, IOVA + 16, 1));
    setup.table.invalidate(VIA, rkey, Invalidator::Peer).unwrap();
    assert!(!setup.reads(VIA, rkey, IOVA + 16, 1));
    assert_eq!(
        setup.table.invalidate(VIA, rkey, Invalidator::Peer),
        Err(AccessError),
        "not bound"
    );
    assert_eq!(
        setup.table.invalidate(VIA, rkey, Invalidator::Local),
        Ok(()),
        "the owner need not know"
    );
    assert_eq!(
        setup.table.invalidate(OTHER_PD, rkey, Invalidator::Local),
        Err(AccessError)
    );
    let rkey = setup.bind(2);
    assert!(setup.reads(VIA, rkey, IOVA + 16, 1));
}

#[test]
fn addresses_from_zero() {
    let mut setup = setup(WindowKind::Two, BINDABLE);
    let request = Bind {
        zero_based: true,
        ..setup.request(1)
    };
    setup.table.bind(VIA, &request).unwrap();
    setup.table.remote_write(VIA, request.rkey, 0, &[5]).unwrap();
    let mut byte = [0];
    setup
        .table
        .gather(PD, LKey(setup.region), IOVA + 16, &mut byte)
        .unwrap();
    assert_eq!(byte, [5]);
    assert!(setup.reads(VIA, request.rkey, 31, 1));
    assert!(!setup.reads(VIA, request.rkey, 31, 2));
    assert!(!setup.reads(VIA, request.rkey, IOVA + 16, 1));
}

#[test]
fn regions_queue_pairs_and_windows_go_in_any_order() {
    // The region first.
    let mut one = setup(WindowKind::One, BINDABLE);
    let rkey = one.bind(1);
    one.table.remove(one.region);
    assert!(!one.reads(VIA, rkey, IOVA + 16, 1));
    assert_eq!(one.table.bindings, 0);
    one.table.remove_window(one.window);
    // The window first; its slot is reused, its key is invalid.
    let mut two = setup(WindowKind::Two, BINDABLE);
    let rkey = two.bind(1);
    two.table.remove_window(two.window);
    assert!(!two.reads(VIA, rkey, IOVA + 16, 1));
    assert_eq!((two.table.windows, two.table.bindings), (0, 0));
    assert_eq!(two.table.bind(VIA, &two.request(2)), Err(AccessError));
    assert_eq!(two.table.deregister(two.region), Ok(()));
    // The queue pair first: windows of type 2 are unbound, those of type 1 stay.
    for (kind, stays) in [(WindowKind::One, true), (WindowKind::Two, false)] {
        let mut setup = setup(kind, BINDABLE);
        let rkey = setup.bind(1);
        setup.table.release_windows_of(OTHER_QP.qpn);
        assert!(setup.reads(VIA, rkey, IOVA + 16, 1));
        setup.table.release_windows_of(VIA.qpn);
        assert_eq!(setup.reads(VIA, rkey, IOVA + 16, 1), stays);
        assert_eq!(setup.table.deregister(setup.region).is_err(), stays);
    }
}

//! The GID table, and peers addressed by its entries.

use std::mem::MaybeUninit;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

const LEN: u32 = 16;

fn text(gid: ibv_gid) -> String {
    // SAFETY: a GID is 16 bytes however it was written.
    std::net::Ipv6Addr::from(unsafe { gid.raw }).to_string()
}

/// Index, type and GID.
type Entry = (u32, ibv_gid_type, String);

fn table(context: *mut ibv_context, room: usize) -> Result<Vec<Entry>, isize> {
    let mut entries = [const { MaybeUninit::<ibv_gid_entry>::uninit() }; LEN as usize];
    let (query, size) = (api().query_gid_table.unwrap(), size_of::<ibv_gid_entry>());
    // SAFETY: live, with at least that room; as many are filled as it returns.
    unsafe {
        let found = query(context, entries[0].as_mut_ptr(), room, 0, size);
        let found = usize::try_from(found).map_err(|_| found)?;
        let entry = |entry: &MaybeUninit<ibv_gid_entry>| {
            let entry = entry.assume_init();
            assert_eq!(entry.port_num, 1);
            (entry.gid_index, entry.gid_type, text(entry.gid))
        };
        Ok(entries[..found].iter().map(entry).collect())
    }
}

fn by_index(context: *mut ibv_context, index: u32) -> (Result<String, i32>, Result<Entry, i32>) {
    let (mut gid, mut entry) = (MaybeUninit::uninit(), MaybeUninit::<ibv_gid_entry>::uninit());
    // SAFETY: live; filled on success.
    unsafe {
        let plain = match (api().query_gid)(context, 1, index as i32, gid.as_mut_ptr()) {
            0 => Ok(text(gid.assume_init())),
            _ => Err(errno()),
        };
        let size = size_of::<ibv_gid_entry>();
        let extended = match api().query_gid_ex.unwrap()(context, 1, index, entry.as_mut_ptr(), 0, size) {
            0 => Ok(entry.assume_init()).map(|entry| (entry.gid_index, entry.gid_type, text(entry.gid))),
            value => Err(value),
        };
        (plain, extended)
    }
}

#[test]
fn the_table_is_an_adapters() {
    crate::setup();
    let octets = match own_address(1) {
        std::net::IpAddr::V4(v4) => v4.octets(),
        std::net::IpAddr::V6(_) => unreachable!("of 127.0.0.0/8"),
    };
    let [a, b, c, d] = octets.map(u16::from);
    let link_local = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0xdb, a << 8 | 0xff, 0xfe00 | b, c << 8 | d);
    let v4 = format!("::ffff:{a}.{b}.{c}.{d}");
    for (name, link_local, routable) in [("soft0", &*link_local.to_string(), &*v4), ("six", "fe80::1", "::1")] {
        let context = open(name).unwrap();
        let (v1, v2) = (IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2);
        let expected = [
            (0, v1, link_local),
            (1, v2, link_local),
            (2, v1, routable),
            (3, v2, routable),
        ];
        let expected = expected.map(|(index, kind, gid)| (index, kind, gid.to_owned()));
        assert_eq!(table(context, LEN as usize).as_deref(), Ok(&expected[..]));
        assert_eq!(table(context, 4).as_deref(), Ok(&expected[..]));
        for room in [0, 3] {
            assert_eq!(table(context, room), Err(-(libc::EINVAL as isize)), "too small");
        }
        for (index, entry) in (0..).zip(expected) {
            assert_eq!(by_index(context, index), (Ok(entry.2.clone()), Ok(entry)));
        }
        for empty in [4, LEN - 1] {
            assert_eq!(by_index(context, empty), (Ok("::".into()), Err(libc::ENODATA)));
        }
        assert_eq!(by_index(context, LEN), (Err(libc::EINVAL), Err(libc::EINVAL)));
        let mut port = MaybeUninit::<ibv_port_attr>::uninit();
        // SAFETY: live, filled on success, and closed once.
        unsafe {
            assert_eq!(inline::query_port(api(), context, 1, port.as_mut_ptr()), 0);
            assert_eq!(port.assume_init().gid_tbl_len, LEN as i32);
            assert_eq!((api().close_device)(context), 0);
        }
    }
}

#[test]
fn any_gid_of_a_peer_reaches_it_from_any_index() {
    crate::setup();
    let indices = 0..4_u8;
    let pairs = indices
        .clone()
        .flat_map(|source| indices.clone().map(move |to| (source, to)));
    for ((source_index, to), names) in pairs.flat_map(|pair| [(pair, ("soft0", "soft1")), (pair, ("six", "six"))]) {
        let setup = Setup {
            source_index,
            ..Setup::default()
        };
        let (a, b) = (Side::new(names.0, &setup), Side::new(names.1, &setup));
        a.init(&setup);
        b.init(&setup);
        a.connect_to(&setup, b.gid_at(to), b.qpn(), (1, 2));
        b.connect_to(&setup, a.gid(), a.qpn(), (2, 1));
        a.fill(0, &pattern(100, 1));
        assert_eq!(b.receive(1, &mut [b.sge(4096, 100)]), 0);
        assert_eq!(a.post(request(2, IBV_WR_SEND), &mut [a.sge(0, 100)]), 0);
        b.done(1);
        a.done(2);
        assert_eq!(b.bytes(4096..4196), pattern(100, 1));
        let (mut found, mut init) = (attr(), MaybeUninit::uninit());
        // SAFETY: live; both are filled on success.
        unsafe { assert_eq!((api().query_qp)(a.qp, &mut found, -1, init.as_mut_ptr()), 0) };
        let grh = found.ah_attr.grh;
        assert_eq!((grh.sgid_index, text(grh.dgid)), (source_index, text(b.gid_at(to))));
    }
}

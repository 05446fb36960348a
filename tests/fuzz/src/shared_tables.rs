//! What processes of one host share beside rings: the registry of the group, the records of its
//! control sockets, and the tables of directly accessible memory. All of it is a peer's to write.

use std::fs::File;
use std::os::unix::fs::FileExt;

use arbitrary::{Result, Unstructured};
use doorbell_roce_proto::memory::RemoteRight;
use doorbell_softroce::fuzzing_direct::{Region, Request, Tables};
use doorbell_softroce::host::fuzzing::{Registry, control_record, is_registry};

use crate::shm_ring::sealed;

const SEGMENT_LEN: usize = 8192;
/// Keys and queue pairs that share entries, and others.
const KEYS: [u32; 4] = [0x0001_1234, 0x0001_5678, 0x0002_1234, 0xffff_ffff];
const QPNS: [u32; 3] = [5, 5 + (1 << 15), 9];

/// One of the three.
pub fn shared_tables(data: &[u8]) {
    let Some((which, data)) = data.split_first() else {
        return;
    };
    let mut input = Unstructured::new(data);
    match which % 3 {
        0 => drop(control_record(data)),
        1 => drop(registry(&mut input)),
        _ => drop(direct(&mut input)),
    }
}

/// A member writes to the registry's file between the calls of another.
fn registry(input: &mut Unstructured<'_>) -> Result<()> {
    let registry = Registry::create().expect("a registry");
    let file = registry.file().expect("a descriptor");
    let shared = File::from(file.try_clone().expect("a descriptor"));
    let len = shared.metadata().expect("it is open").len();
    while !input.is_empty() {
        // The header, the members and, from the end, the services: near where something is read.
        let near = u64::from(input.arbitrary::<u16>()?);
        let at = match input.arbitrary::<u8>()? % 4 {
            0 => near % 64,
            1 => 64 + near % 512,
            2 => 64 + 64 * 1024 + near % 512,
            _ => len - 8 - near % 512,
        };
        let bytes = input.arbitrary::<u64>()?.to_ne_bytes();
        shared.write_all_at(&bytes, at).expect("members may write");
        registry.use_all(input.arbitrary::<u16>()? % 1100, input.arbitrary()?, input.arbitrary()?);
    }
    registry.leave();
    is_registry(file);
    Ok(())
}

/// A peer publishes and withdraws anything between the requests of an initiator.
fn direct(input: &mut Unstructured<'_>) -> Result<()> {
    let mut tables = Tables::create(sealed(SEGMENT_LEN as u64), SEGMENT_LEN).expect("tables");
    while !input.is_empty() {
        let (key, qpn) = (*input.choose(&KEYS)?, *input.choose(&QPNS)?);
        match input.arbitrary::<u8>()? % 8 {
            0 => tables.set_region(key, None),
            1 => tables.set_qp(qpn, None),
            2 => tables.set_qp(qpn, Some((input.int_in_range(0..=1)?, input.arbitrary()?))),
            3 | 4 => tables.set_region(key, Some(region(input)?)),
            _ => {
                tables.request(&Request {
                    qpn,
                    rkey: key,
                    addr: number(input)?,
                    len: input.int_in_range(1..=2 * SEGMENT_LEN)?,
                    right: *input.choose(&[RemoteRight::Read, RemoteRight::Write, RemoteRight::Atomic])?,
                });
            }
        }
    }
    Ok(())
}

fn region(input: &mut Unstructured<'_>) -> Result<Region> {
    Ok(Region {
        pd: input.int_in_range(0..=1)?,
        rights: input.arbitrary()?,
        iova: number(input)?,
        len: number(input)?,
        segment: input.int_in_range(0..=2)?,
        at: number(input)?,
    })
}

/// Mostly small, or near the end of the range.
fn number(input: &mut Unstructured<'_>) -> Result<u64> {
    let near = u64::from(input.arbitrary::<u16>()?);
    Ok(match input.arbitrary::<u8>()? {
        0..192 => near,
        192..224 => u64::MAX - near,
        _ => input.arbitrary()?,
    })
}

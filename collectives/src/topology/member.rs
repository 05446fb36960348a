//! Where a rank is, and how it tells the others.

use super::{Bundle, Far, Gpu, Peer, Place};
use crate::bootstrap::{Reader, put_text};

/// What an encoding begins with.
const VERSION: u8 = 1;
/// The longest names, in bytes: of hosts as DNS has them, of what is on PCIe, and a UUID.
const HOST: usize = 255;
const ADDRESS: usize = 32;
const UUID: usize = 96;
/// The most bridges above a device, bundles of links, and GPUs of a host.
const DEPTH: usize = 64;
const BUNDLES: usize = 64;
const PEERS: usize = 256;

/// Where a rank is: what ranks tell each other at the start.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Member {
    /// What names its host, and no other.
    pub host: String,
    /// Where it is on it: its GPU's or adapter's place, or its processor's NUMA node.
    pub place: Place,
    /// Its GPU, if it has one and the driver says something of it.
    pub gpu: Option<Gpu>,
}

impl Member {
    /// As bytes for another rank. What is longer than any machine has it is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = vec![VERSION];
        put_text(&mut to, &self.host, HOST);
        put_optional(&mut to, self.place.numa_node, |to, node| {
            to.extend_from_slice(&node.to_le_bytes())
        });
        put_list(&mut to, &self.place.pcie_path, DEPTH, |to, name| {
            put_text(to, name, ADDRESS)
        });
        put_optional(&mut to, self.gpu.as_ref(), put_gpu);
        to
    }

    /// From what another rank has said; none if that is no member, or of another release.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        if from.u8()? != VERSION {
            return None;
        }
        let member = Self {
            host: from.text(HOST)?,
            place: Place {
                numa_node: optional(&mut from, Reader::u32)?,
                pcie_path: list(&mut from, DEPTH, |from| from.text(ADDRESS))?,
            },
            gpu: optional(&mut from, gpu)?,
        };
        from.end()?;
        Some(member)
    }
}

fn put_gpu(to: &mut Vec<u8>, gpu: &Gpu) {
    put_text(to, &gpu.address, ADDRESS);
    put_optional(to, gpu.uuid.as_deref(), |to, uuid| put_text(to, uuid, UUID));
    put_list(to, &gpu.nvlinks, BUNDLES, |to, bundle| {
        match &bundle.to {
            Far::Gpu(address) => {
                to.push(0);
                put_text(to, address, ADDRESS);
            }
            Far::Switch => to.push(1),
            Far::Processor => to.push(2),
            Far::Unknown => to.push(3),
        }
        to.extend_from_slice(&bundle.links.to_le_bytes());
        to.extend_from_slice(&bundle.bytes_per_s.to_le_bytes());
    });
    put_list(to, &gpu.peers, PEERS, |to, peer| {
        put_text(to, &peer.address, ADDRESS);
        put_optional(to, peer.nvlink, |to, is| to.push(is.into()));
        put_optional(to, peer.access, |to, is| to.push(is.into()));
    });
}

fn gpu(from: &mut Reader) -> Option<Gpu> {
    Some(Gpu {
        address: from.text(ADDRESS)?,
        uuid: optional(from, |from| from.text(UUID))?,
        nvlinks: list(from, BUNDLES, |from| {
            let to = match from.u8()? {
                0 => Far::Gpu(from.text(ADDRESS)?),
                1 => Far::Switch,
                2 => Far::Processor,
                3 => Far::Unknown,
                _ => return None,
            };
            Some(Bundle {
                to,
                links: from.u32()?,
                bytes_per_s: from.u64()?,
            })
        })?,
        peers: list(from, PEERS, |from| {
            Some(Peer {
                address: from.text(ADDRESS)?,
                nvlink: optional(from, flag)?,
                access: optional(from, flag)?,
            })
        })?,
    })
}

fn flag(from: &mut Reader) -> Option<bool> {
    match from.u8()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

fn put_optional<T>(to: &mut Vec<u8>, value: Option<T>, put: impl FnOnce(&mut Vec<u8>, T)) {
    to.push(value.is_some().into());
    if let Some(value) = value {
        put(to, value);
    }
}

fn optional<'a, T>(from: &mut Reader<'a>, read: impl FnOnce(&mut Reader<'a>) -> Option<T>) -> Option<Option<T>> {
    match flag(from)? {
        true => read(from).map(Some),
        false => Some(None),
    }
}

fn put_list<T>(to: &mut Vec<u8>, all: &[T], most: usize, mut put: impl FnMut(&mut Vec<u8>, &T)) {
    let all = &all[..all.len().min(most)];
    to.extend_from_slice(&(all.len() as u16).to_le_bytes());
    all.iter().for_each(|one| put(to, one));
}

fn list<'a, T>(
    from: &mut Reader<'a>,
    most: usize,
    mut read: impl FnMut(&mut Reader<'a>) -> Option<T>,
) -> Option<Vec<T>> {
    let count = usize::from(from.u16()?);
    if count > most {
        return None;
    }
    (0..count).map(|_| read(from)).collect()
}

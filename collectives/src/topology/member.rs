//! The location of a rank and its encoding for other ranks.

use super::{Gpu, GpuPeer, Location, NvLinkEnd, NvLinkGroup};
use crate::bootstrap::{Reader, put_text};

const VERSION: u8 = 1;
/// Maximum lengths in bytes: of host names (DNS), PCI addresses, and UUIDs.
const MAX_HOST: usize = 255;
const MAX_ADDRESS: usize = 32;
const MAX_UUID: usize = 96;
const MAX_DEPTH: usize = 64;
const MAX_GROUPS: usize = 64;
const MAX_PEERS: usize = 256;

/// The location of a rank, exchanged at creation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Member {
    /// Unique name of its host.
    pub host: String,
    /// Its place on the host: that of its GPU or adapter, or its processor's NUMA node.
    pub place: Location,
    /// Its GPU, if it has one that the driver describes.
    pub gpu: Option<Gpu>,
}

impl Member {
    /// Encodes it for another rank. Values beyond the limits are truncated.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = vec![VERSION];
        put_text(&mut to, &self.host, MAX_HOST);
        put_optional(&mut to, self.place.numa_node, |to, node| {
            to.extend_from_slice(&node.to_le_bytes())
        });
        put_list(&mut to, &self.place.pcie_path, MAX_DEPTH, |to, name| {
            put_text(to, name, MAX_ADDRESS)
        });
        put_optional(&mut to, self.gpu.as_ref(), put_gpu);
        to
    }

    /// Decodes a rank's message; `None` if it is invalid, or of another release.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        if from.u8()? != VERSION {
            return None;
        }
        let member = Self {
            host: from.text(MAX_HOST)?,
            place: Location {
                numa_node: optional(&mut from, Reader::u32)?,
                pcie_path: list(&mut from, MAX_DEPTH, |from| from.text(MAX_ADDRESS))?,
            },
            gpu: optional(&mut from, gpu)?,
        };
        from.end()?;
        Some(member)
    }
}

fn put_gpu(to: &mut Vec<u8>, gpu: &Gpu) {
    put_text(to, &gpu.address, MAX_ADDRESS);
    put_optional(to, gpu.uuid.as_deref(), |to, uuid| put_text(to, uuid, MAX_UUID));
    put_list(to, &gpu.nvlinks, MAX_GROUPS, |to, bundle| {
        match &bundle.to {
            NvLinkEnd::Gpu(address) => {
                to.push(0);
                put_text(to, address, MAX_ADDRESS);
            }
            NvLinkEnd::Switch => to.push(1),
            NvLinkEnd::Processor => to.push(2),
            NvLinkEnd::Unknown => to.push(3),
        }
        to.extend_from_slice(&bundle.links.to_le_bytes());
        to.extend_from_slice(&bundle.bytes_per_s.to_le_bytes());
    });
    put_list(to, &gpu.peers, MAX_PEERS, |to, peer| {
        put_text(to, &peer.address, MAX_ADDRESS);
        put_optional(to, peer.nvlink, |to, is| to.push(is.into()));
        put_optional(to, peer.access, |to, is| to.push(is.into()));
    });
}

fn gpu(from: &mut Reader) -> Option<Gpu> {
    Some(Gpu {
        address: from.text(MAX_ADDRESS)?,
        uuid: optional(from, |from| from.text(MAX_UUID))?,
        nvlinks: list(from, MAX_GROUPS, |from| {
            let to = match from.u8()? {
                0 => NvLinkEnd::Gpu(from.text(MAX_ADDRESS)?),
                1 => NvLinkEnd::Switch,
                2 => NvLinkEnd::Processor,
                3 => NvLinkEnd::Unknown,
                _ => return None,
            };
            Some(NvLinkGroup {
                to,
                links: from.u32()?,
                bytes_per_s: from.u64()?,
            })
        })?,
        peers: list(from, MAX_PEERS, |from| {
            Some(GpuPeer {
                address: from.text(MAX_ADDRESS)?,
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

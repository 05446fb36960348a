//! The location of a rank and its encoding for other ranks.

use serde::{Deserialize, Serialize};

use super::{Gpu, Location, NvLinkEnd};
use crate::bootstrap::one_line;

/// Maximum lengths in bytes: of host names (DNS), PCI addresses, and UUIDs.
const MAX_HOST: usize = 255;
const MAX_ADDRESS: usize = 32;
const MAX_UUID: usize = 96;
const MAX_DEPTH: usize = 64;
const MAX_GROUPS: usize = 64;
const MAX_PEERS: usize = 256;

/// The location of a rank, exchanged at creation.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Unique name of its host.
    pub host: String,
    /// Its place on the host: that of its GPU or adapter, or its processor's NUMA node.
    pub place: Location,
    /// Its GPU, if it has one that the driver describes.
    pub gpu: Option<Gpu>,
}

impl Member {
    /// Encodes it for another rank, as JSON.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes a rank's message; `None` if it is invalid, or of another release. Values beyond the
    /// limits are truncated.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut member: Self = serde_json::from_slice(bytes).ok()?;
        limit(&mut member.host, MAX_HOST);
        member.place.pcie_path.truncate(MAX_DEPTH);
        for name in &mut member.place.pcie_path {
            limit(name, MAX_ADDRESS);
        }
        if let Some(gpu) = &mut member.gpu {
            gpu.limit();
        }
        Some(member)
    }
}

impl Gpu {
    fn limit(&mut self) {
        limit(&mut self.address, MAX_ADDRESS);
        self.uuid.iter_mut().for_each(|uuid| limit(uuid, MAX_UUID));
        self.nvlinks.truncate(MAX_GROUPS);
        for group in &mut self.nvlinks {
            if let NvLinkEnd::Gpu(address) = &mut group.to {
                limit(address, MAX_ADDRESS);
            }
        }
        self.peers.truncate(MAX_PEERS);
        for peer in &mut self.peers {
            limit(&mut peer.address, MAX_ADDRESS);
        }
    }
}

fn limit(text: &mut String, max: usize) {
    *text = one_line(text, max);
}

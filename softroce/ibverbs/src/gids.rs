//! The GID table of a device with one address, as mlx5's driver and the kernel fill it.

use std::net::IpAddr;

use doorbell_roce_proto::Gid;

/// The length of the GID table. Entries beyond [`gid_table`] are empty.
pub const GID_TABLE_LEN: u32 = 16;

/// The link-local GID and that of the address, once if the same, each with both versions of RoCE.
pub fn gid_table(address: IpAddr) -> impl Iterator<Item = (Gid, u8)> {
    let (link_local, routable) = (Gid::link_local(address), Gid::from(address));
    let gids = [Some(link_local).filter(|&gid| gid != routable), Some(routable)];
    let both = |gid| [(gid, 1), (gid, 2)];
    gids.into_iter().flatten().flat_map(both)
}

/// The index of the address with RoCE v2, the last entry.
#[must_use]
pub fn routable_index(address: IpAddr) -> u8 {
    gid_table(address).count() as u8 - 1
}

//! The links: what carries packets between devices (decision 068).
//!
//! | link | paths | sending | receiving |
//! |---|---|---|---|
//! | [`udp`] | to any address | a batch is filled under core and tx, and sent under tx alone | datagrams, in batches |
//! | `shm` | between processes of the device's address; lossless, by reference | a record is put on the peer's ring under core | records of each peer's ring ([`shm_ring`]) |
//!
//! The engine sees neither: it knows the capabilities of a path
//! ([`LinkCapabilities`](doorbell_roce_proto::LinkCapabilities)). Other links that carry
//! datagrams implement [`udp::Transmit`] and [`udp::Receive`], as fault injection and capture do.

pub(crate) mod shm;
pub mod shm_ring;
pub mod udp;

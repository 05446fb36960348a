//! Attaching queue pairs to multicast groups: to the engine's groups, and with the first queue pair
//! of a group to the link's.

use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::qp::Qp;

/// Why a queue pair could not be attached; nothing changed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Not a multicast address of the device's family, or not a UD queue pair (`EINVAL`).
    #[error("only UD queue pairs can be attached, and to groups of the device's own family")]
    Invalid,
    /// No more groups, or queue pairs in this one (`ENOMEM`).
    #[error("the device has no more multicast groups, or the group no more queue pairs")]
    Exhausted,
    /// The system refuses to receive from the group.
    #[error("the group cannot be received from: {0}")]
    Link(io::Error),
}

impl From<doorbell_roce_proto::AttachError> for AttachError {
    fn from(error: doorbell_roce_proto::AttachError) -> Self {
        use doorbell_roce_proto::AttachError::{Exhausted, NotDatagram, NotMulticast};
        match error {
            NotDatagram | NotMulticast => Self::Invalid,
            Exhausted => Self::Exhausted,
        }
    }
}

impl Qp {
    /// Attaches it to a multicast group (ibv_attach_mcast(3)), without effect if it is attached.
    /// `block_own` excludes its own packets (IBV_QP_CREATE_BLOCK_SELF_MCAST_LB).
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach_multicast(&self, group: IpAddr, block_own: bool) -> Result<(), AttachError> {
        let (device, group) = (self.device(), group.to_canonical());
        let address = device.info().address;
        if group.is_ipv4() != address.is_ipv4() {
            return Err(AttachError::Invalid);
        }
        let mut core = device.shared().core.lock();
        let blocked = block_own.then(|| address.ip());
        core.endpoint.attach_multicast(group, self.number(), blocked)?;
        let joined = device.multicast().join(SocketAddr::new(group, address.port()));
        joined.map_err(|error| {
            core.endpoint.detach_multicast(group, self.number());
            AttachError::Link(error)
        })
    }

    /// Detaches it (ibv_detach_mcast(3)); false when it is not attached.
    pub fn detach_multicast(&self, group: IpAddr) -> bool {
        let mut core = self.device().shared().core.lock();
        let detached = core.endpoint.detach_multicast(group, self.number());
        self.device().multicast().keep_joined(&core.endpoint);
        detached
    }

    /// Whether it is attached to a group.
    pub fn is_attached(&self) -> bool {
        self.device().shared().core.lock().endpoint.is_attached(self.number())
    }
}

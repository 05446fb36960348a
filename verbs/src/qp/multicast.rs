//! Multicast groups of UD queue pairs (ibv_attach_mcast(3); IBTA vol 1, 10.5).

use std::io;

use doorbell_verbs_sys as sys;

use super::backend::Backend;
use super::connected::QueuePair;
use super::object::QpObject;
use super::transport::Connectionless;
use crate::error::{QueuePairError, check};
use crate::sync::lock;
use crate::types::{Gid, Lid};

/// A group that a queue pair is attached to, by MGID and MLID.
pub(super) type Group = (Gid, Lid);

type Attach = unsafe extern "C" fn(*mut sys::ibv_qp, *const sys::ibv_gid, u16) -> core::ffi::c_int;

impl<T: Connectionless, B: Backend> QueuePair<T, B> {
    /// Attaches it to the multicast group: it receives datagrams with its Q_Key that are sent to
    /// [`Qpn::MULTICAST`](crate::Qpn::MULTICAST) at the group's GID, its own too. Sending to a group
    /// requires no attachment. On RoCE v2 the GID is the group's IP address, and `lid` 0; on
    /// InfiniBand both are of a group that this port has joined at the subnet administrator.
    ///
    /// It is detached when it is dropped.
    ///
    /// # Errors
    /// When the device has no multicast, the GID is no group of its address family, or there are
    /// too many groups, or queue pairs in this one.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_multicast(&mut self, group: Gid, lid: Lid) -> Result<(), QueuePairError> {
        self.object.attach_multicast((group, lid))
    }

    /// Detaches it from a group.
    ///
    /// # Errors
    /// When it is not attached to it.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_multicast(&mut self, group: Gid, lid: Lid) -> Result<(), QueuePairError> {
        self.object.detach_multicast((group, lid))
    }

    pub(crate) fn device(&self) -> &str {
        &self.object.pd().context.name
    }

    pub(crate) fn port(&self) -> u8 {
        self.send.ud.port
    }
}

impl QpObject {
    fn attach_multicast(&self, group: Group) -> Result<(), QueuePairError> {
        self.change_group("ibv_attach_mcast", self.pd().context.api.attach_mcast, group)?;
        let mut groups = lock(&self.groups);
        if !groups.contains(&group) {
            groups.push(group);
        }
        Ok(())
    }

    fn detach_multicast(&self, group: Group) -> Result<(), QueuePairError> {
        self.change_group("ibv_detach_mcast", self.pd().context.api.detach_mcast, group)?;
        lock(&self.groups).retain(|attached| *attached != group);
        Ok(())
    }

    /// An attached queue pair cannot be destroyed (ibv_destroy_qp(3): `EBUSY`).
    pub(super) fn detach_all(&self) {
        while let Some(group) = lock(&self.groups).pop() {
            // It fails where the device is gone; destroying then reports what is wrong.
            let _ = self.change_group("ibv_detach_mcast", self.pd().context.api.detach_mcast, group);
        }
    }

    fn change_group(
        &self,
        verb: &'static str,
        function: Option<Attach>,
        (group, lid): Group,
    ) -> Result<(), QueuePairError> {
        let gid = group.to_sys();
        let result = match function {
            // SAFETY: the queue pair is live, and the GID may be read.
            Some(function) => check(unsafe { function(self.raw(), &gid, lid.0) }),
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        result.map_err(|error| QueuePairError::Multicast {
            call: format!("{verb}({}, {group})", self.name()),
            error,
        })
    }
}

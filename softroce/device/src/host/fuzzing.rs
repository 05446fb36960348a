//! Entry points of `tests/fuzz`: what other processes of the group write. Not a part of the API.

use std::io;
use std::os::fd::OwnedFd;

use doorbell_roce_proto::{Qpn, QpnBlock};

use super::Flags;
use super::peers::ControlRecord;
use super::registry::{self, MemberId, SLOTS};

/// A record of a control socket; whether it is one.
///
/// # Panics
/// When it does not survive being encoded and decoded.
pub fn control_record(bytes: &[u8]) -> bool {
    let record = ControlRecord::decode(bytes);
    if let Some(record) = record {
        assert_eq!(ControlRecord::decode(&record.encode()), Some(record));
    }
    record.is_some()
}

/// A registry, whose file any member may write.
pub struct Registry(registry::Registry, MemberId);

impl Registry {
    /// A new one, with a member.
    ///
    /// # Errors
    /// When there is no memory or descriptor left.
    pub fn create() -> io::Result<Self> {
        let registry = registry::Registry::create()?;
        let me = registry.add_member(0, Flags::default(), 1);
        Ok(Self(registry, me))
    }

    /// The file, for a member that writes anything to it.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn file(&self) -> io::Result<OwnedFd> {
        self.0.fd().try_clone()
    }

    /// Calls every function of a member once.
    ///
    /// # Panics
    /// When a result is not within its bounds.
    pub fn use_all(&self, slot: u16, qpn: u32, service: u64) {
        let Self(registry, me) = self;
        let member = registry.member(slot).unwrap_or(*me);
        assert!(usize::from(member.slot()) < SLOTS);
        let _ = (
            registry.flags(member),
            registry.udp_port(member),
            registry.is_latest(member),
        );
        assert!(registry.port_holder().is_none_or(|holder| registry.is_alive(holder)));
        assert!(
            registry
                .owner_of(Qpn::new(qpn))
                .is_none_or(|owner| registry.is_alive(owner))
        );
        assert!(
            registry
                .find_service(service)
                .is_none_or(|owner| registry.is_alive(owner))
        );
        if let Some(block) = registry.claim(*me, slot) {
            assert!(block.index() < QpnBlock::COUNT);
        }
        if registry.add_service(service, *me) {
            registry.remove_service(service, *me);
        }
        registry.mark_gone(member);
        let _ = (registry.name(), registry.services_added());
    }

    /// Leaves the group.
    pub fn leave(self) {
        self.0.leave(self.1);
    }
}

/// Whether a file from a member is taken for a registry.
pub fn is_registry(file: OwnedFd) -> bool {
    registry::Registry::attach(file).is_ok()
}

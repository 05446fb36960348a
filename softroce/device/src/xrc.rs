//! XRC domains and XRC targets (IBTA vol 1, annex A14).

use std::sync::Arc;

use doorbell_roce_proto::work::XrcDomain;

use crate::cq::Cq;
use crate::device::Device;

/// An XRC domain (ibv_open_xrcd(3)): shared receive queues, and the targets that take from them.
/// Clones name the same one.
#[derive(Clone, Debug)]
pub struct Xrcd(Arc<XrcdHandle>);

#[derive(Debug)]
struct XrcdHandle {
    device: Arc<Device>,
    id: XrcDomain,
}

/// What an XRC shared receive queue is created with in addition.
#[derive(Clone, Debug)]
pub struct XrcSrqConfig {
    /// Its domain.
    pub xrcd: Xrcd,
    /// The CQ of its receives.
    pub cq: Cq,
}

impl Device {
    /// A new XRC domain.
    pub fn xrc_domain(self: &Arc<Self>) -> Xrcd {
        let id = self.shared().core.lock().objects.next_xrc_domain();
        Xrcd(Arc::new(XrcdHandle {
            device: Arc::clone(self),
            id,
        }))
    }
}

impl Xrcd {
    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// Whether anything else, such as a queue, holds this domain.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn id(&self) -> XrcDomain {
        self.0.id
    }
}

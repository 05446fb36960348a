//! Queue pairs: creating, modifying and querying them, and posting work requests.

use std::io;
use std::sync::Arc;

use doorbell_roce_proto::memory::PdId;
use doorbell_roce_proto::qp::{Attributes, Modify, ModifyError, Path, QpInit, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{CqId, Destination, PostError, ReceiveRequest, Remote, SendRequest};
use doorbell_roce_proto::{Instant, Qpn};

use crate::capacity;
use crate::cq::Cq;
use crate::device::Device;
use crate::drive::{COARSE_TIMEOUT, Shared};
use crate::event::EventOwner;
use crate::links::shm::PathError;
use crate::pd::Pd;
use crate::srq::Srq;
use crate::state::Core;
use crate::xrc::Xrcd;

/// `IBV_QP_AV`, the attribute mask of the path to the peer.
const PATH: u32 = 1 << 7;

/// What a queue pair is created with (ibv_create_qp(3)).
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// The CQ of send requests.
    pub send_cq: Cq,
    /// The CQ of receives.
    pub recv_cq: Cq,
    /// Send requests outstanding at most.
    pub max_send_wr: u32,
    /// Receive requests outstanding at most.
    pub max_recv_wr: u32,
    /// Elements per send request at most.
    pub max_send_sge: u32,
    /// Elements per receive request at most.
    pub max_recv_sge: u32,
    /// Inline bytes per send request at most.
    pub max_inline: u32,
    /// Every send request is signaled, whatever its flag.
    pub signal_all: bool,
    /// Its transport service.
    pub transport: Transport,
    /// Where it takes receives from in place of a queue of its own.
    pub srq: Option<Srq>,
}

/// Why a queue pair could not be created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CreateQpError {
    /// A size beyond [`capacity`] (`EINVAL`).
    #[error("a queue pair on a soft device has at most {wr} requests of {sge} elements per queue, and {inline} inline bytes",
        wr = capacity::WORK_REQUESTS, sge = capacity::SGES, inline = capacity::INLINE)]
    Size,
    /// Completion queues, shared receive queue and protection domain are of different devices
    /// (`EINVAL`).
    #[error("a queue pair's completion queues, shared receive queue and protection domain must be of one device")]
    OtherDevice,
    /// No more queue pairs (`ENOMEM`).
    #[error("the device has {max} queue pairs already", max = capacity::QPS)]
    Exhausted,
}

/// Why a modify failed; nothing changed.
#[derive(Debug)]
pub enum ModifyQpError {
    /// The attributes or the transition are invalid (`EINVAL`).
    Invalid(ModifyError),
    /// The system refuses what the link to the peer's process needs, such as descriptors.
    Link(io::Error),
}

impl From<ModifyError> for ModifyQpError {
    fn from(error: ModifyError) -> Self {
        Self::Invalid(error)
    }
}

/// A queue pair. Dropping it destroys it: queued work requests are dropped without completions, and
/// their memory is not accessed again.
#[derive(Debug)]
pub struct Qp {
    device: Arc<Device>,
    number: Qpn,
    /// All that it uses, kept until it is gone.
    of: Parts,
}

#[derive(Debug)]
enum Parts {
    Domain { _pd: Pd, config: QpConfig },
    XrcTarget { _xrcd: Xrcd },
}

impl Pd {
    /// A queue pair in RESET, whose events go to `owner`.
    ///
    /// # Errors
    /// When a size is out of range, objects do not belong together, or the device is full.
    pub fn queue_pair(&self, config: &QpConfig, owner: EventOwner) -> Result<Qp, CreateQpError> {
        // With a shared receive queue it has no receive queue, whatever the sizes say
        // (ibv_create_qp(3)).
        let (max_recv_wr, max_recv_sge) = match config.srq {
            Some(_) => (0, 0),
            None => (config.max_recv_wr, config.max_recv_sge),
        };
        let sizes_fit = config.max_send_wr.max(max_recv_wr) <= capacity::WORK_REQUESTS
            && config.max_send_sge.max(max_recv_sge) <= capacity::SGES
            && config.max_inline <= capacity::INLINE;
        if !sizes_fit {
            return Err(CreateQpError::Size);
        }
        let srq_fits = config.srq.as_ref().is_none_or(|srq| srq.is_of(self.device()));
        if !config.send_cq.is_of(self.device()) || !config.recv_cq.is_of(self.device()) || !srq_fits {
            return Err(CreateQpError::OtherDevice);
        }
        let init = QpInit {
            pd: self.id(),
            send_cq: config.send_cq.id(),
            recv_cq: config.recv_cq.id(),
            max_send_wr: config.max_send_wr,
            max_recv_wr,
            max_send_sge: config.max_send_sge,
            max_recv_sge,
            max_inline: config.max_inline,
            signal_all: config.signal_all,
            transport: config.transport,
            srq: config.srq.as_ref().map(Srq::id),
            xrc_domain: None,
            // The application sleeps, and so will its peer: ACKs keep their order as from an
            // adapter.
            ack_before_requests: config.send_cq.has_channel() || config.recv_cq.has_channel(),
        };
        let (_pd, config) = (self.clone(), config.clone());
        Qp::add(self.device(), init, owner, Parts::Domain { _pd, config })
    }
}

impl Xrcd {
    /// An XRC target in RESET, whose events go to `owner`: it has no queues of its own.
    ///
    /// # Errors
    /// When the device is full.
    pub fn target(&self, owner: EventOwner) -> Result<Qp, CreateQpError> {
        // Those of the shared receive queues are used.
        let (pd, no_cq) = (PdId(0), CqId(u32::MAX));
        let init = QpInit {
            pd,
            send_cq: no_cq,
            recv_cq: no_cq,
            max_send_wr: 0,
            max_recv_wr: 0,
            max_send_sge: 0,
            max_recv_sge: 0,
            max_inline: 0,
            signal_all: false,
            transport: Transport::Xrc,
            srq: None,
            xrc_domain: Some(self.id()),
            ack_before_requests: true,
        };
        Qp::add(self.device(), init, owner, Parts::XrcTarget { _xrcd: self.clone() })
    }
}

impl Qp {
    fn add(device: &Arc<Device>, init: QpInit, owner: EventOwner, of: Parts) -> Result<Self, CreateQpError> {
        let added = device.shared().core.lock().add_qp(init, owner);
        Ok(Self {
            device: Arc::clone(device),
            number: added.ok_or(CreateQpError::Exhausted)?,
            of,
        })
    }
}

/// Work requests being posted: the device's lock is held, and packets leave when it is released.
pub struct Posting<'a> {
    core: &'a mut Core,
    shared: &'a Shared,
    now: Option<Instant>,
    qpn: Qpn,
}

impl Posting<'_> {
    /// The time, read only if needed: that takes a tenth of a short message.
    fn now(&mut self) -> Instant {
        *self.now.get_or_insert_with(|| self.shared.now())
    }

    /// Posts a send request.
    ///
    /// # Errors
    /// When it is refused; nothing of it was queued.
    #[inline(always)]
    pub fn send(&mut self, request: &SendRequest<'_>) -> Result<(), PostError> {
        if self.core.send_direct(self.qpn, request) {
            return Ok(());
        }
        self.send_packets(request)
    }

    #[inline(never)]
    fn send_packets(&mut self, request: &SendRequest<'_>) -> Result<(), PostError> {
        let (shared, now) = (self.shared, &mut self.now);
        let start = |timeout| match timeout >= COARSE_TIMEOUT {
            true => shared.about_now(),
            false => *now.get_or_insert_with(|| shared.now()),
        };
        if self.core.send_fast(start, self.qpn, request) {
            return Ok(());
        }
        let now = self.now();
        self.core.endpoint.post_send(now, self.qpn, request)
    }

    /// Posts a SEND of a UD queue pair.
    ///
    /// # Errors
    /// When it is refused; nothing of it was queued.
    pub fn send_datagram(&mut self, request: &SendRequest<'_>, to: &Destination) -> Result<(), PostError> {
        let Ok(link) = self.core.route(&to.path, to.qpn) else {
            return Err(PostError::Invalid);
        };
        let path = Path { link, ..to.path };
        let to = Remote::Datagram(Destination { path, ..*to });
        self.core.endpoint.post_to(self.qpn, request, &to)
    }

    /// Posts a SEND of a UD queue pair, or any request of an XRC initiator.
    ///
    /// # Errors
    /// When it is refused; nothing of it was queued.
    pub fn send_to(&mut self, request: &SendRequest<'_>, to: &Remote) -> Result<(), PostError> {
        match to {
            Remote::Datagram(to) => self.send_datagram(request, to),
            Remote::Srq(_) => self.core.endpoint.post_to(self.qpn, request, to),
        }
    }

    /// Whether [`send`](Self::send), or [`send_to`](Self::send_to) for a `remote` end, would queue
    /// a request after `ahead` others.
    ///
    /// # Errors
    /// When it would be refused.
    pub fn check_send(&self, request: &SendRequest<'_>, remote: bool, ahead: u32) -> Result<(), PostError> {
        self.core.endpoint.check_send(self.qpn, request, remote, ahead)
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// When it is refused; nothing of it was queued.
    pub fn receive(&mut self, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.core.endpoint.post_receive(self.qpn, request)
    }
}

impl Qp {
    /// Its queue pair number.
    pub fn number(&self) -> Qpn {
        self.number
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Posts send requests as one batch: all that `requests` posts leave with one doorbell.
    #[inline]
    pub fn post_send<R>(&self, requests: impl FnOnce(&mut Posting<'_>) -> R) -> R {
        let shared = self.device().shared();
        let mut core = shared.core.lock();
        let result = requests(&mut Posting {
            core: &mut core,
            shared,
            now: None,
            qpn: self.number,
        });
        shared.flush_posted(core);
        result
    }

    /// Posts receives: nothing is sent for them.
    pub fn post_receive<R>(&self, requests: impl FnOnce(&mut Posting<'_>) -> R) -> R {
        let shared = self.device().shared();
        let mut core = shared.core.lock();
        let result = requests(&mut Posting {
            core: &mut core,
            shared,
            now: None,
            qpn: self.number,
        });
        // In the error state a receive is flushed at once.
        if core.endpoint.has_output() {
            shared.deliver(core);
        }
        result
    }

    /// Modifies state and attributes (ibv_modify_qp(3)).
    ///
    /// # Errors
    /// When the table of transitions refuses it, or the peer's process cannot be connected to;
    /// nothing changed then.
    pub fn modify(&self, modify: &Modify) -> Result<(), ModifyQpError> {
        let shared = self.device().shared();
        if matches!(modify.state, Some(State::Reset | State::Err)) {
            shared.wait_for_copies(Some(self.number), None);
            shared.flush_waiting(shared.core.lock());
        }
        if shared.core.lock().withdraw_qp(self.number) {
            shared.wait_for_direct(Some(self.number), None);
        }
        let mut core = shared.core.lock();
        let path = self.resolve_path(modify, &mut core);
        let result = path.and_then(|path| {
            let modify = &Modify { path, ..*modify };
            Ok(core.endpoint.modify_qp(shared.now(), self.number, modify)?)
        });
        if result.is_ok() && modify.state == Some(State::Reset) {
            core.memory.release_windows_of(self.number);
            core.drop_deferred(self.number);
        }
        if result.is_ok() && modify.path.is_some() {
            core.pin_known_port(self.number);
        }
        core.publish_qp(self.number);
        shared.flush(core);
        if modify.state == Some(State::Reset) {
            shared.wait_for_copies(Some(self.number), None);
            if let (Ok(()), Parts::Domain { config, .. }) = (&result, &self.of) {
                config.send_cq.remove_of(self.number);
                config.recv_cq.remove_of(self.number);
            }
        }
        result
    }

    /// The path to set, with the shm link to the peer if there is one.
    fn resolve_path(&self, modify: &Modify, core: &mut Core) -> Result<Option<Path>, ModifyQpError> {
        let Some(path) = modify.path else {
            return Ok(None);
        };
        let before = core.endpoint.query_qp(self.number).and_then(|qp| qp.set.dest_qpn);
        // Without a peer the transition is refused anyway.
        let Some(peer) = modify.dest_qpn.or(before) else {
            return Ok(modify.path);
        };
        match core.route(&path, peer) {
            Ok(link) => Ok(Some(Path { link, ..path })),
            Err(PathError::Failed(error)) => Err(ModifyQpError::Link(error)),
            Err(error @ PathError::NotLocal(_)) => {
                tracing::warn!("{} cannot be connected: {error}", self.number);
                Err(ModifyError::Value(PATH).into())
            }
        }
    }

    /// Its state and attributes. `None` never happens while the handle lives.
    pub fn query(&self) -> Option<Attributes> {
        self.device().shared().core.lock().endpoint.query_qp(self.number)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let shared = self.device.shared();
        shared.wait_for_copies(Some(self.number), None);
        shared.flush_waiting(shared.core.lock());
        let mut core = shared.core.lock();
        core.withdraw_qp(self.number);
        core.remove_qp(self.number);
        self.device().multicast().keep_joined(&core.endpoint);
        // Its timers are gone with it.
        shared.deliver(core);
        shared.wait_for_access(Some(self.number), None);
    }
}

//! One end of a test: its queue pairs, connected to the peer's, and the memory that the peer may
//! access.
//!
//! [`TestEnd::establish`] exchanges parameters and QP information, connects, and waits at the
//! barrier before the first size. The tests allocate their memory, mostly with `memory`.
//!
//! A C tool as the peer cycles through the first page at the address it was given
//! (`memory::cycle`), so every queue pair has at least a page.

mod gpu;
mod memory;

use std::time::Duration;

use doorbell_verbs::{
    Buffer, Context, Endpoint, GidEntry, KeyAccess as RemoteRight, LinkLayer, Mtu, Opaque, PeerAtomic, PeerRead,
    PeerWrite, PortState, ProtectionDomain, Qpn, Remote,
};

pub(crate) use gpu::slots;
pub(crate) use memory::{allocate, available_memory, frozen, registration, scratch};

use super::control::TestStart;
use super::layout::{Address, Header};
use super::settings::{Exchange, Settings};
use super::tool::{Kind, Tool, Verb};
use super::wire::{ControlConnection, QpInfo, SharedParameters};
use crate::device::{Device, Gpu};
use crate::engine::cm::QpConnector;
use crate::engine::message::Cycle;
use crate::engine::setup::{Connector, PreparedEnd, QpAttributes, RemoteAccess};
use crate::engine::test_end;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, one_line, refused};

/// The page size and cache line this end reports; no message of a test depends on them.
const PAGE: u32 = 4096;
const CACHE_LINE: u32 = 64;
/// For a group's switches, as in the C tools.
const JOIN_DELAY: Duration = Duration::from_millis(50);
/// Default inline size of `ib_write_lat` on adapters of [`INLINE_VENDORS`].
const INLINE_WRITE_LATENCY: u32 = 220;
/// Default inline size of `ib_send_lat` on adapters of [`INLINE_VENDORS`].
const INLINE_SEND_LATENCY: u32 = 236;

/// Vendor ids of the adapters on which the C tools send inline by default; on others, software
/// devices among them, they do not. Results are comparable only where this is the same.
const INLINE_VENDORS: [u32; 8] = [
    0x02c9, // Mellanox, NVIDIA
    0x15b3, // the same, by PCI
    0x119f, // Bull
    0x1077, // QLogic
    0x1425, // Chelsio
    0x14e4, // Broadcom
    0x19e5, // HiSilicon
    0x8086, // Intel
];

#[derive(Debug)]
pub(crate) enum Target {
    Nothing,
    Write(Buffer<PeerWrite>),
    Read(Buffer<PeerRead>),
    Atomic(Buffer<PeerAtomic>),
    GpuWrite(Buffer<Opaque<PeerWrite>>),
    GpuRead(Buffer<Opaque<PeerRead>>),
}

impl Target {
    fn rkey_and_addr(&self) -> (u32, u64) {
        match self {
            Target::Nothing => (0, 0),
            Target::Write(memory) => (memory.remote().rkey().0, memory.addr()),
            Target::Read(memory) => (memory.remote().rkey().0, memory.addr()),
            Target::Atomic(memory) => (memory.remote().rkey().0, memory.addr()),
            Target::GpuWrite(memory) => (memory.remote().rkey().0, memory.addr()),
            Target::GpuRead(memory) => (memory.remote().rkey().0, memory.addr()),
        }
    }
}

/// What the two ends know of a queue pair and its peer, and the memory that the peer may access.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) ours: QpInfo,
    pub(crate) theirs: QpInfo,
    pub(crate) target: Target,
}

impl Link {
    /// The peer's memory, as far as `cycle` goes.
    pub(crate) fn remote<K: RemoteRight>(&self, cycle: &Cycle) -> Remote<K> {
        Remote::from_raw(self.theirs.vaddr, self.theirs.rkey, cycle.len())
    }
}

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.theirs.gid {
            Some(gid) => write!(f, "peer {} (queue pair {})", gid.to_ip(), self.theirs.qpn),
            None => write!(f, "peer at LID {} (queue pair {})", self.theirs.lid, self.theirs.qpn),
        }
    }
}

#[derive(Debug)]
pub(crate) struct TestEnd<T: TestTransport> {
    /// With `-e` its completion queue has a completion channel.
    pub(crate) end: test_end::TestEnd<T>,
    /// One per queue pair.
    pub(crate) links: Vec<Link>,
    /// Messages of up to so many bytes are sent inline.
    pub(crate) inline: u32,
    pub(crate) parameters: SharedParameters,
    pub(crate) pd: ProtectionDomain,
    /// The GPU whose memory messages lie in, with `--use_cuda`.
    pub(crate) gpu: Option<Gpu>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Depths {
    pub(crate) send: u32,
    /// Of the receive queue, or of the shared one.
    pub(crate) receive: u32,
}

impl Depths {
    /// The depths of these settings: at least one of each, as devices require.
    pub(crate) fn of(settings: &Settings) -> Depths {
        let sends = sends(settings);
        let receives = settings.tool.verb == Verb::Send
            && (settings.receives() || settings.bidirectional || settings.tool.kind == Kind::Lat);
        Depths {
            send: if sends { settings.tx_depth.max(1) } else { 1 },
            receive: if receives { settings.rx_depth.max(1) } else { 1 },
        }
    }
}

fn sends(settings: &Settings) -> bool {
    let answers = settings.tool.kind == Kind::Lat && matches!(settings.tool.verb, Verb::Write | Verb::Send);
    !settings.receives() || settings.bidirectional || answers
}

/// Whether the peer accesses this end's memory.
fn is_target(settings: &Settings) -> bool {
    let answered = settings.tool.kind == Kind::Lat && settings.tool.verb == Verb::Write;
    settings.tool.verb != Verb::Send && (settings.receives() || settings.bidirectional || answered)
}

/// What the peer may do here.
fn access(settings: &Settings) -> RemoteAccess {
    match settings.tool.verb {
        _ if !is_target(settings) => RemoteAccess::Nothing,
        Verb::Write => RemoteAccess::Write,
        Verb::Read => RemoteAccess::Read,
        Verb::Atomic => RemoteAccess::Atomic,
        Verb::Send => RemoteAccess::Nothing,
    }
}

impl<T: TestTransport> TestEnd<T> {
    /// Creates this end and connects it to the peer, from the exchange of parameters to the barrier
    /// after the exchange of QP information. Prints the header on the way.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses something or the peer fails; [`Failure::Lost`]
    /// when it is gone; [`Failure::Interrupted`].
    pub(crate) fn establish(
        start: &mut TestStart<'_, '_>,
        control: &mut ControlConnection,
        connector: Option<QpConnector>,
        depths: Depths,
    ) -> Result<TestEnd<T>, Failure> {
        let TestStart {
            settings,
            device,
            interrupt,
            ref mut printer,
        } = *start;
        let context = &device.context;
        let port = context.port(settings.device_port).map_err(refused)?;
        if !matches!(port.state, PortState::Active | PortState::ActiveDefer) {
            return Err(Failure::test(format!(
                "{} port {} is not active: it is {:?}",
                context.name(),
                settings.device_port,
                port.state
            )));
        }
        let ours = SharedParameters {
            page: PAGE,
            cache_line: CACHE_LINE,
            mtu: path_mtu(settings, context.name(), port.active_mtu)?,
        };
        let parameters = control.exchange_parameters(ours)?;
        let gid = choose_gid(settings, device, port.link_layer)?;
        let pd = context.protection_domain().map_err(refused)?;
        let attributes = QpAttributes {
            port: settings.device_port,
            gid_index: gid.and_then(|gid| u8::try_from(gid.index).ok()),
            traffic_class: settings.traffic_class,
            hop_limit: settings.hop_limit,
            flow_label: settings.flow_label,
            service_level: settings.service_level,
            pkey_index: settings.pkey_index,
            mtu: Some(parameters.mtu),
            timeout: settings.timeout,
            retry: settings.retry,
            outstanding: outstanding(settings, device)?,
            access: access(settings),
            by_cm: settings.exchange == Exchange::RdmaCm,
            qps: settings.qps,
            send: depths.send,
            receive: depths.receive,
            shares_receives: settings.shared_receive && settings.tool.verb == Verb::Send,
            inline: inline(settings, context.attr().vendor_id),
            events: settings.events.then_some(settings.vector),
        };
        let mut builder = EndBuilder {
            settings,
            parameters,
            gid,
            attributes,
            pd: &pd,
            gpu: device.gpu.as_ref(),
        };
        let targets = builder.targets()?;
        builder.fit_inline::<T>(context)?;
        printer.header(&builder.header(context.name(), port.link_layer))?;
        let mut prepared = PreparedEnd::<T>::new(context, &pd, builder.attributes)?;
        let endpoints = prepared.endpoints();
        let mut ours: Vec<QpInfo> = endpoints
            .iter()
            .zip(&targets)
            .map(|(endpoint, target)| builder.qp_info(endpoint, target))
            .collect();
        if let Some(group) = settings.joined_group() {
            for (qp, qp_info) in prepared.qps().iter_mut().zip(&mut ours) {
                T::join(qp, group).map_err(|reason| Failure::test(one_line(&reason)))?;
                (qp_info.gid, qp_info.qpn) = (Some(group), Qpn::MULTICAST);
            }
        }
        let mut connector = connector;
        let is_managed = connector.is_some();
        if is_managed {
            if settings.is_server() {
                printer.waiting_for_queue_pairs()?;
            }
            control.cm_barrier()?;
        }
        let connector = connector.as_mut().map(|by| Connector {
            by,
            announces: settings.goes_both_ways(),
            peer: format!("peer {}", control.peer()),
            interrupt,
        });
        let mut links = Vec::with_capacity(targets.len());
        let mut end = prepared.connect(connector, || {
            if is_managed {
                control.cm_barrier()?;
            }
            let theirs = control.exchange_qp_infos(&ours)?;
            let addresses = |qp_infos: &[QpInfo]| qp_infos.iter().map(address).collect::<Vec<_>>();
            printer.addresses(&addresses(&ours), &addresses(&theirs))?;
            for ((target, &ours), theirs) in targets.into_iter().zip(&ours).zip(theirs) {
                links.push(Link { ours, theirs, target });
            }
            let peer = |link: &Link| Ok((builder.endpoint_of(&link.theirs)?, link.to_string()));
            links.iter().map(peer).collect()
        })?;
        control.keep_connected(std::mem::take(&mut end.connections));
        if settings.group.is_some() {
            std::thread::sleep(JOIN_DELAY);
        }
        // The second exchange is the barrier at which both ends are connected.
        control.exchange_qp_infos(&ours)?;
        let inline = builder.attributes.inline;
        let test_end = TestEnd {
            end,
            links,
            inline,
            parameters,
            pd,
            gpu: device.gpu.clone(),
        };
        test_end.barrier(control)?;
        Ok(test_end)
    }
}

impl<T: TestTransport> TestEnd<T> {
    /// Barrier: waits until the peer has got here too. For barriers before a measurement.
    pub(crate) fn barrier(&self, control: &mut ControlConnection) -> Result<(), Failure> {
        control.barrier(&self.links[0].ours)
    }

    /// As [`TestEnd::barrier`], without a deadline, as the peer may still be measuring.
    pub(crate) fn barrier_after_test(&self, control: &mut ControlConnection) -> Result<(), Failure> {
        control.barrier_after_test(&self.links[0].ours)
    }

    pub(crate) fn is_inline(&self, bytes: u64) -> bool {
        bytes <= u64::from(self.inline)
    }

    pub(crate) fn cycle(&self, bytes: u64) -> Cycle {
        memory::cycle(bytes, T::HEADER, &self.parameters)
    }
}

struct EndBuilder<'a> {
    settings: &'a Settings,
    parameters: SharedParameters,
    gid: Option<GidEntry>,
    attributes: QpAttributes,
    pd: &'a ProtectionDomain,
    gpu: Option<&'a Gpu>,
}

impl EndBuilder<'_> {
    /// Memory for the peer, one piece for each queue pair.
    fn targets(&self) -> Result<Vec<Target>, Failure> {
        let settings = self.settings;
        let qps = settings.qps as usize;
        if !is_target(settings) {
            return Ok((0..qps).map(|_| Target::Nothing).collect());
        }
        let longest = settings.sizes.iter().max().copied().unwrap_or(0);
        // Shorter messages cycle through the whole page.
        let len = memory::cycle(longest, 0, &self.parameters)
            .len()
            .max(self.parameters.page.into());
        if let Some(gpu) = self.gpu {
            return match settings.tool.verb {
                Verb::Write => gpu::pieces(settings, gpu, self.pd, len, PeerWrite, Target::GpuWrite),
                Verb::Read => gpu::pieces(settings, gpu, self.pd, len, PeerRead, Target::GpuRead),
                Verb::Atomic | Verb::Send => Err(Failure::usage("atomics in a GPU's memory are not supported")),
            };
        }
        match settings.tool.verb {
            Verb::Write => memory::pieces(settings, self.pd, len, PeerWrite, Target::Write),
            Verb::Read => memory::pieces(settings, self.pd, len, PeerRead, Target::Read),
            Verb::Atomic => memory::pieces(settings, self.pd, len, PeerAtomic, Target::Atomic),
            Verb::Send => Ok(Vec::new()),
        }
    }

    /// The size of `-I`, or the C tools' default if the device supports it.
    fn fit_inline<T: TestTransport>(&mut self, context: &Context) -> Result<(), Failure> {
        let inline = self.attributes.inline;
        if inline > 0 {
            let is_required = self.settings.inline.is_some();
            let usable = self.attributes.usable_inline::<T>(context, self.pd, is_required);
            self.attributes.inline = usable.map_err(|e| Failure::test(format!("-I {inline}: {e}")))?;
        }
        Ok(())
    }

    fn header(&self, device: &str, layer: LinkLayer) -> Header {
        Header {
            device: device.to_owned(),
            infiniband: layer != LinkLayer::Ethernet,
            mtu: self.parameters.mtu.bytes(),
            gid_index: self.gid.map(|gid| gid.index),
            inline_bytes: self.attributes.inline,
            outstanding: self.attributes.outstanding.into(),
            relaxed_ordering: self.settings.relaxed_ordering,
            new_post: false,
        }
    }

    fn qp_info(&self, endpoint: &Endpoint, target: &Target) -> QpInfo {
        let (rkey, vaddr) = target.rkey_and_addr();
        QpInfo {
            lid: endpoint.lid,
            out_reads: self.attributes.outstanding.into(),
            qpn: endpoint.qpn,
            psn: endpoint.psn,
            rkey,
            vaddr,
            gid: self.gid.map(|_| endpoint.gid),
            srqn: 0,
        }
    }

    fn endpoint_of(&self, theirs: &QpInfo) -> Result<Endpoint, Failure> {
        let verb = self.settings.tool.verb;
        if theirs.out_reads == 0 && matches!(verb, Verb::Read | Verb::Atomic) {
            return Err(Failure::test(
                "the peer serves no READs and no atomics: is its --outs 0, or its device without them?",
            ));
        }
        Ok(Endpoint {
            gid: theirs.gid.unwrap_or_default(),
            lid: theirs.lid,
            qpn: theirs.qpn,
            psn: theirs.psn,
            mtu: self.parameters.mtu,
            max_dest_rd_atomic: u8::try_from(theirs.out_reads).unwrap_or(u8::MAX),
        })
    }
}

fn path_mtu(settings: &Settings, device: &str, active: Mtu) -> Result<Mtu, Failure> {
    match settings.mtu {
        None => Ok(active),
        Some(bytes) => Mtu::from_bytes(bytes)
            .filter(|mtu| *mtu <= active)
            .ok_or_else(|| {
                Failure::test(format!(
                    "-m {bytes}: {device} port {} has an MTU of {active}, and the standard those of 256, 512, 1024, 2048 and 4096 B",
                    settings.device_port
                ))
            }),
    }
}

/// The source GID; none on an InfiniBand fabric, which routes by LID.
fn choose_gid(settings: &Settings, device: &Device, layer: LinkLayer) -> Result<Option<GidEntry>, Failure> {
    let (context, port) = (&device.context, settings.device_port);
    if let Some(index) = settings.gid_index {
        return context.gid(port, index.into()).map(Some).map_err(refused);
    }
    if settings.ipv6 {
        let gids = context.gids(port).map_err(refused)?;
        // The last one, as tables begin with the default GIDs, which are link-local.
        let found = gids.into_iter().rfind(|entry| entry.gid.to_ip().is_ipv6());
        return found.map(Some).ok_or_else(|| {
            Failure::test(format!(
                "--ipv6: {} port {port} has no GID of an IPv6 address",
                context.name()
            ))
        });
    }
    match layer {
        LinkLayer::Ethernet => context.default_gid(port).map(Some).map_err(refused),
        _ => Ok(None),
    }
}

/// Outstanding READs and atomics of a queue pair (max_rd_atomic, max_dest_rd_atomic): one where the
/// test has none.
fn outstanding(settings: &Settings, device: &Device) -> Result<u8, Failure> {
    let most = device.context.attr().max_rd_atomic;
    match (settings.tool.verb, settings.outstanding) {
        (Verb::Write | Verb::Send, _) => Ok(1.min(most)),
        (Verb::Read | Verb::Atomic, None) => Ok(most),
        (Verb::Read | Verb::Atomic, Some(requested)) if requested <= most => Ok(requested),
        (Verb::Read | Verb::Atomic, Some(requested)) => Err(Failure::test(format!(
            "-o {requested}: {} has {most} at most",
            device.context.name()
        ))),
    }
}

fn inline(settings: &Settings, vendor: u32) -> u32 {
    if settings.cuda.is_some() {
        // Inline payload is copied by the CPU.
        return 0;
    }
    let Tool { verb, kind, .. } = settings.tool;
    settings.inline.unwrap_or(match (verb, kind) {
        _ if !INLINE_VENDORS.contains(&vendor) => 0,
        (Verb::Write, Kind::Lat) => INLINE_WRITE_LATENCY,
        (Verb::Send, Kind::Lat) => INLINE_SEND_LATENCY,
        _ => 0,
    })
}

fn address(qp_info: &QpInfo) -> Address {
    Address {
        lid: qp_info.lid.0,
        qpn: qp_info.qpn.get(),
        psn: qp_info.psn.get(),
        outstanding: qp_info.out_reads.into(),
        rkey: qp_info.rkey,
        vaddr: qp_info.vaddr,
        gid: qp_info.gid.map(|gid| gid.0),
    }
}

//! Opening a device, and its properties.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use doorbell_roce_proto::cm::CmConfig;
use doorbell_roce_proto::{Counters, Endpoint, EndpointConfig, Gid, Mtu, NumberKey};

use crate::clock::ticks;
use crate::cm::{ConnectionManager, Connections};
use crate::config::{DeviceConfig, LinkChoice};
use crate::counters::CounterFiles;
use crate::drive::Shared;
use crate::event::{Event, EventQueue};
use crate::host::{Flags, Host};
use crate::links::shm::CopyMode;
use crate::links::shm_ring::segment::{self, Segment};
use crate::links::udp::pcap::Capture;
use crate::links::udp::{BindError, Link, MulticastSockets, PortState, require_unicast};
use crate::progress;
use crate::state::Core;
use crate::wakeup::Wakeup;

/// Why a device could not be opened; each message is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The address cannot be bound.
    #[error("cannot open {device}: {error}")]
    Bind {
        /// The device's name.
        device: String,
        /// The cause.
        error: BindError,
    },
    /// All of the addresses tried are in use.
    #[error(
        "cannot open {device}: UDP port {port} is taken on every address of 127.0.0.0/8 tried: the kernel's rxe (rdma link show) takes it on \
         all; choose another port on both ends (--udp-port, DOORBELL_SOFT_PORT), or use a network namespace of its own"
    )]
    NoFreeAddress {
        /// The device's name.
        device: String,
        /// The UDP port.
        port: u16,
    },
    /// The interface's frames are too small for any RoCEv2 packet.
    #[error("cannot open {device}: the interface of {address} has an MTU of {mtu} bytes, too small for RoCEv2")]
    Mtu {
        /// The device's name.
        device: String,
        /// The address bound.
        address: IpAddr,
        /// The interface's MTU in bytes.
        mtu: u32,
    },
    /// Port 0, which peers cannot know.
    #[error("cannot open {device}: RoCEv2 needs a definite UDP port, not 0")]
    Port {
        /// The device's name.
        device: String,
    },
    /// Other processes on this address have all queue pair numbers.
    #[error("cannot open {device}: the processes on {address} have all queue pair numbers")]
    NoQpns {
        /// The device's name.
        device: String,
        /// The address.
        address: IpAddr,
    },
    /// The capture file cannot be written.
    #[error("cannot open {device}: cannot capture into {}: {error}", path.display())]
    Capture {
        /// The device's name.
        device: String,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// No memory for the shm rings.
    #[error("cannot open {device}: no memory to share with other processes of this host: {error}")]
    ShmRing {
        /// The device's name.
        device: String,
        /// The cause.
        error: io::Error,
    },
    /// The progress thread could not be started.
    #[error("cannot open {device}: cannot start its progress thread: {error}")]
    Thread {
        /// The device's name.
        device: String,
        /// The cause.
        error: io::Error,
    },
}

/// No space for another object, or a size out of range; see [`capacity`](crate::capacity).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LimitError {
    /// An unsupported size (`EINVAL`).
    #[error("the size is 0, or more than the device allows")]
    Size,
    /// No more objects of this kind (`ENOMEM`).
    #[error("the device has no more objects of this kind")]
    Exhausted,
}

/// The properties of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its address and UDP port, shared by all processes of its group.
    pub address: SocketAddr,
    /// The GID of the address.
    pub gid: Gid,
    /// The largest path MTU of its interface when it was opened.
    pub mtu: Mtu,
    /// The MTU of its interface in bytes, at that time.
    pub netdev_mtu: u32,
}

/// A userspace RoCEv2 device, bound to an address. It is closed, with its progress thread, when its
/// last object is dropped.
pub struct Device {
    info: DeviceInfo,
    shared: Arc<Shared>,
    host: Arc<Host>,
    multicast: MulticastSockets,
    /// Packets for processes of this host use shm links.
    uses_shm: bool,
    uses_segments: bool,
    copy_mode: Option<CopyMode>,
    progress: Option<JoinHandle<()>>,
}

/// The highest address tried for a device without one.
const LAST_TRIED: u8 = 250;

/// The random addresses tried for a device that shares none: one that is taken is rare.
const EXCLUSIVE_TRIED: u8 = 64;

impl Device {
    /// Opens the device and starts its progress thread.
    ///
    /// # Errors
    /// When the address cannot be bound, or the machine lacks a resource.
    pub fn open(config: &DeviceConfig) -> Result<Arc<Self>, OpenError> {
        let device = || config.name.clone();
        if config.port == 0 {
            return Err(OpenError::Port { device: device() });
        }
        let (host, mut link) = join(config)?;
        // The group's, which peers know, not that of this process's socket.
        let address = host.address();
        if let Some(path) = &config.pcap {
            let capture = Capture::create(path).map_err(|error| OpenError::Capture {
                device: device(),
                path: path.clone(),
                error,
            })?;
            link = link.with_capture(capture);
        }
        // After the capture, which then shows the wire.
        link = link.with_faults(config.faults, config.start.unwrap_or_else(ticks));
        let mtu = Mtu::for_netdev(link.mtu).ok_or_else(|| OpenError::Mtu {
            device: device(),
            address: address.ip(),
            mtu: link.mtu,
        })?;
        let info = DeviceInfo {
            name: device(),
            address,
            gid: Gid::from(address.ip()),
            mtu,
            netdev_mtu: link.mtu,
        };
        let key = NumberKey::random();
        let mut endpoint = Endpoint::with_config(EndpointConfig {
            key,
            window: window(link.receive_buffer, mtu),
            mtu,
            congestion: config.congestion,
            tail_loss_probes: config.tail_loss_probes,
            selective_repeat: config.selective_repeat,
            ..EndpointConfig::default()
        });
        let block = host.claim(endpoint.next_qpn_block()).ok_or_else(|| OpenError::NoQpns {
            device: device(),
            address: address.ip(),
        })?;
        endpoint.add_qpn_block(block);
        let host = Arc::new(host);
        if config.separate_gpu_context {
            crate::gpu::separate_contexts();
        }
        let found = DeviceConfig {
            address: Some(address.ip()),
            ..config.clone()
        };
        let connections = Connections::new(CmConfig {
            address: address.ip(),
            guid: found.guid(),
            mtu,
            slot: host.me().slot(),
            key,
        });
        let mut core = Core::new(endpoint, connections, Arc::clone(&host), address);
        let mut own = None;
        if !config.is_udp_only() {
            let enabled = core.enable_shm(config.link == LinkChoice::Local, config.copy_mode);
            own = Some(enabled.map_err(|error| OpenError::ShmRing {
                device: device(),
                error,
            })?);
        }
        let wakeup = Wakeup::new().map_err(|error| OpenError::Thread {
            device: device(),
            error,
        })?;
        let shared = Arc::new(Shared::new(link.local, link.rx, link.tx, link.acks, wakeup, core));
        if let Some((me, receiver)) = own {
            shared.enable_shm(me, receiver);
        }
        if let Some(port) = link.port.changed() {
            shared.set_port(port);
        }
        let progress = doorbell_threads::spawn(format!("{}-progress", config.name), {
            let (shared, host, files) = (Arc::clone(&shared), Arc::clone(&host), link.files);
            let spin = config.spin;
            let view = config.view.as_deref();
            let counters = view.and_then(|view| CounterFiles::open(view, &config.name, shared.now()));
            move || progress::run(&shared, &host, (files, link.port), counters, spin)
        })
        .map_err(|error| OpenError::Thread {
            device: device(),
            error,
        })?;
        tracing::debug!(device = info.name, %address, ?mtu, "soft device opened");
        Ok(Arc::new(Self {
            info,
            shared,
            host,
            multicast: link.multicast,
            uses_shm: !config.is_udp_only(),
            copy_mode: config.copy_mode,
            uses_segments: !config.is_udp_only() && config.copy_mode != Some(CopyMode::Ring),
            progress: Some(progress),
        }))
    }

    /// Its properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The largest path MTU of its interface now.
    pub fn mtu(&self) -> Mtu {
        self.port().mtu.unwrap_or(self.info.mtu)
    }

    /// The state of its port.
    pub fn port(&self) -> PortState {
        self.shared.port()
    }

    /// Adds a receiver of port and device events.
    pub fn add_event_queue(&self, listener: Arc<EventQueue<Event>>) {
        self.shared.core.lock().objects.listeners.push(listener);
    }

    /// Removes such a receiver.
    pub fn remove_event_queue(&self, listener: &Arc<EventQueue<Event>>) {
        let listeners = &mut self.shared.core.lock().objects.listeners;
        listeners.retain(|other| !Arc::ptr_eq(other, listener));
    }

    /// Its connection manager.
    pub fn cm(self: &Arc<Self>) -> ConnectionManager {
        ConnectionManager::new(Arc::clone(self))
    }

    /// The engine's counters since it was opened.
    pub fn counters(&self) -> Counters {
        *self.shared.core.lock().endpoint.counters()
    }

    /// The process group on its address.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// The segment of a memfd, if segments are used.
    pub(crate) fn segment_of(&self, fd: BorrowedFd<'_>) -> Option<Arc<Segment>> {
        self.uses_segments.then(|| segment::of(fd)).flatten()
    }

    /// The [group](Host::group) reached by shm links; `None` where all traffic uses UDP.
    pub fn shm_group(&self) -> Option<u64> {
        self.uses_shm.then(|| self.host.group())
    }

    /// The available and permitted copy modes, the best first; none where all traffic uses UDP.
    pub fn copy_modes(&self) -> Vec<CopyMode> {
        let permits = |mode: &CopyMode| self.uses_shm && self.copy_mode.is_none_or(|forced| forced == *mode);
        CopyMode::ALL.into_iter().filter(permits).collect()
    }

    /// Used under the core lock, which keeps it in accord with the engine's groups.
    pub(crate) fn multicast(&self) -> &MulticastSockets {
        &self.multicast
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let progress = self.progress.take();
        if let Some(progress) = progress.filter(|_| self.host.is_ours()) {
            self.shared.wakeup.stop();
            // A panic was caught and reported there.
            let _ = progress.join();
        }
    }
}

/// The most packets in flight of a queue pair: four batches of the link, so that it sends while the
/// first ACK is under way, unless a peer with a receive buffer like ours would lose some of them.
fn window(receive_buffer: usize, mtu: Mtu) -> u32 {
    const WINDOW: usize = 256;
    /// The kernel charges a datagram up to twice its size.
    const OVERHEAD: usize = 2;
    let packets = receive_buffer / (OVERHEAD * mtu.bytes());
    // Fewer than 16 packets would not fill the batches.
    (packets.min(WINDOW) as u32).max(16)
}

/// How long a port in use is retried: a killed process may lose its names before its socket, and be
/// preempted in between for more than a tenth of a second.
const BIND_RETRY: Duration = Duration::from_secs(1);

fn join(config: &DeviceConfig) -> Result<(Host, Link), OpenError> {
    let exclusive = Flags::EXCLUSIVE.only_if(config.exclusive);
    let flags = Flags::UDP_ONLY.only_if(config.is_udp_only()).and(exclusive);
    let bind = |address, patience| -> Result<_, BindError> {
        let addr = require_unicast(SocketAddr::new(address, config.port))?;
        let (host, socket) = Host::join(addr, flags, patience)?;
        let link = Link::from_socket(socket).map_err(|error| BindError::new(addr, error))?;
        Ok((host, link))
    };
    let failed = |error| OpenError::Bind {
        device: config.name.clone(),
        error,
    };
    if let Some(address) = config.address {
        return bind(address, BIND_RETRY).map_err(failed);
    }
    let mut first_reason = None;
    for address in candidates(config.exclusive) {
        let is_default = address == Ipv4Addr::LOCALHOST;
        let patience = if is_default { BIND_RETRY } else { Duration::ZERO };
        match bind(IpAddr::V4(address), patience) {
            Err(BindError::AddressInUse { .. }) => {}
            Err(BindError::NotShared(error)) if error.is_of_address() => {
                first_reason.get_or_insert(error);
            }
            // A network namespace without IPv4.
            Err(error @ BindError::AddressNotAvailable { .. }) if is_default => {
                let other = bind(IpAddr::V6(Ipv6Addr::LOCALHOST), BIND_RETRY);
                return other.map_err(|_| failed(error));
            }
            other => {
                if let Some(reason) = first_reason.filter(|_| !config.exclusive) {
                    tracing::warn!(%reason, "{} has the address {address}", config.name);
                }
                return other.map_err(failed);
            }
        }
    }
    Err(OpenError::NoFreeAddress {
        device: config.name.clone(),
        port: config.port,
    })
}

/// The addresses to try for a device without one. Exclusive ones stay clear of the low host numbers
/// that people and configurations choose.
fn candidates(exclusive: bool) -> impl Iterator<Item = Ipv4Addr> {
    let random = RandomState::new();
    let tried = if exclusive { EXCLUSIVE_TRIED } else { LAST_TRIED };
    (1..=tried).map(move |number| {
        if !exclusive {
            return Ipv4Addr::new(127, 0, 0, number);
        }
        let [second, third, last, ..] = random.hash_one(number).to_ne_bytes();
        Ipv4Addr::new(127, second | 1, third, 128 + last % 120)
    })
}

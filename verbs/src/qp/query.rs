//! What a device says of a queue pair (ibv_query_qp(3), IBTA vol 1, 11.2.5.3), as a value that can be shown.

use core::fmt;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::transport::TransportKind;
use crate::types::{Gid, Lid, Mtu, Psn, QKey, Qpn};

/// A queue pair's state and attributes (ibv_query_qp(3)). [`Display`](fmt::Display) shows all of them, one group a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePairAttr {
    /// Its number.
    pub qpn: Qpn,
    /// Its transport.
    pub transport: TransportKind,
    /// Its state.
    pub state: QpState,
    /// In SQD: whether requests that were begun are still going on.
    pub draining: bool,
    /// Its port, from 1; 0 in RESET.
    pub port: u8,
    /// The index of its partition key.
    pub pkey_index: u16,
    /// The sizes of its queues, as the device made them: at least as asked for.
    pub capacity: Capacity,
    /// Whether every send has a completion.
    pub signal_all: bool,
    /// What peers may do, as far as their keys allow it. UD has no such rights.
    pub rights: RemoteRights,
    /// The key that datagrams must carry; UD alone has one.
    pub qkey: Option<QKey>,
    /// The connection, from RTR on; UD has none.
    pub connection: Option<ConnectionAttr>,
    /// The sequence number of its next packet, or of its first: devices differ.
    pub send_psn: Psn,
}

/// The sizes of a queue pair's queues (ibv_create_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capacity {
    /// Requests that its send queue holds.
    pub send_depth: u32,
    /// Receives that its receive queue holds.
    pub recv_depth: u32,
    /// Buffers of a request of the send queue.
    pub max_send_sge: u32,
    /// Buffers of a receive.
    pub max_recv_sge: u32,
    /// Bytes that a request may carry inline.
    pub max_inline: u32,
}

/// What peers may do through a queue pair (IBTA vol 1, 11.2.5.2). None by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteRights {
    /// RDMA READ; with RC alone.
    pub read: bool,
    /// RDMA WRITE.
    pub write: bool,
    /// Atomics; with RC alone.
    pub atomic: bool,
}

/// A queue pair's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionAttr {
    /// The peer's queue pair.
    pub peer: Qpn,
    /// The way to it.
    pub path: PathAttr,
    /// The path MTU; `None` if the device says what the standard does not know.
    pub mtu: Option<Mtu>,
    /// The sequence number of the packet expected next, or of the first: devices differ.
    pub receive_psn: Psn,
    /// Where it stands with its alternate path.
    pub migration: PathMigration,
    /// What RC has besides; from RTS on all of it.
    pub reliable: Option<ReliableAttr>,
}

/// What acknowledgements, READs and atomics add to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReliableAttr {
    /// How long an acknowledgement is waited for: 4.096 µs · 2^`timeout`, 0 for ever.
    pub timeout: u8,
    /// Retries without an answer.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted; 7 is for ever.
    pub rnr_retry: u8,
    /// How long the peer is to wait when there is no receive here: a code of IBTA vol 1, table 46.
    pub min_rnr_timer: u8,
    /// READs and atomics that it may have outstanding.
    pub initiator_depth: u8,
    /// READs and atomics that it serves at once.
    pub responder_resources: u8,
}

/// The way to a peer: an address vector (IBTA vol 1, 11.2.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathAttr {
    /// The port that packets leave by, from 1.
    pub port: u8,
    /// The peer's GID, and what goes with it; `None` where packets go by LID alone.
    pub global: Option<GlobalPath>,
    /// The peer's LID; 0 on RoCE.
    pub lid: Lid,
    /// The InfiniBand service level.
    pub service_level: u8,
}

/// A path's global route header (IBTA vol 1, 8.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GlobalPath {
    /// The peer's GID.
    pub gid: Gid,
    /// The index of this side's GID.
    pub source_index: u8,
    /// How many routers packets may pass.
    pub hop_limit: u8,
    /// On RoCEv2 the IP header's DSCP and ECN.
    pub traffic_class: u8,
    /// The label of the flow, of 20 bits.
    pub flow_label: u32,
}

/// Where a queue pair stands with automatic path migration (IBTA vol 1, 17.2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathMigration {
    /// It goes by its primary path, and the alternate one is not in use.
    Migrated,
    /// An alternate path was given, and both sides are to be ready for it.
    Rearm,
    /// Both sides are ready to go over to the alternate path.
    Armed,
    /// A value the standard does not know.
    Unknown(u32),
}

impl PathMigration {
    fn from_sys(state: sys::ibv_mig_state) -> Self {
        match state {
            sys::IBV_MIG_MIGRATED => Self::Migrated,
            sys::IBV_MIG_REARM => Self::Rearm,
            sys::IBV_MIG_ARMED => Self::Armed,
            other => Self::Unknown(other),
        }
    }

    pub(super) fn to_sys(self) -> sys::ibv_mig_state {
        match self {
            Self::Migrated => sys::IBV_MIG_MIGRATED,
            Self::Rearm => sys::IBV_MIG_REARM,
            Self::Armed => sys::IBV_MIG_ARMED,
            Self::Unknown(state) => state,
        }
    }
}

impl RemoteRights {
    pub(super) fn to_sys(self) -> sys::ibv_access_flags {
        let bit = |granted, bit| if granted { bit } else { 0 };
        bit(self.read, sys::IBV_ACCESS_REMOTE_READ)
            | bit(self.write, sys::IBV_ACCESS_REMOTE_WRITE)
            | bit(self.atomic, sys::IBV_ACCESS_REMOTE_ATOMIC)
    }

    pub(crate) fn from_sys(flags: sys::ibv_access_flags) -> Self {
        Self {
            read: flags & sys::IBV_ACCESS_REMOTE_READ != 0,
            write: flags & sys::IBV_ACCESS_REMOTE_WRITE != 0,
            atomic: flags & sys::IBV_ACCESS_REMOTE_ATOMIC != 0,
        }
    }
}

impl PathAttr {
    fn from_sys(vector: &sys::ibv_ah_attr) -> Self {
        Self {
            port: vector.port_num,
            global: (vector.is_global != 0).then(|| GlobalPath {
                gid: Gid::from_sys(&vector.grh.dgid),
                source_index: vector.grh.sgid_index,
                hop_limit: vector.grh.hop_limit,
                traffic_class: vector.grh.traffic_class,
                flow_label: vector.grh.flow_label,
            }),
            lid: Lid(vector.dlid),
            service_level: vector.sl,
        }
    }

    pub(super) fn to_sys(self) -> sys::ibv_ah_attr {
        // SAFETY: all-zero is a valid value of this struct of integers.
        let mut vector: sys::ibv_ah_attr = unsafe { core::mem::zeroed() };
        vector.dlid = self.lid.0;
        vector.sl = self.service_level;
        vector.port_num = self.port;
        if let Some(global) = self.global {
            vector.is_global = 1;
            vector.grh = sys::ibv_global_route {
                dgid: global.gid.to_sys(),
                flow_label: global.flow_label,
                sgid_index: global.source_index,
                hop_limit: global.hop_limit,
                traffic_class: global.traffic_class,
            };
        }
        vector
    }
}

impl QueuePairAttr {
    pub(super) fn from_sys(
        qpn: Qpn,
        transport: TransportKind,
        attr: &sys::ibv_qp_attr,
        init: &sys::ibv_qp_init_attr,
    ) -> Self {
        let state = QpState::from_sys(attr.qp_state);
        let has_path = matches!(
            state,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err
        );
        let connected = transport != TransportKind::Ud;
        Self {
            qpn,
            transport,
            state,
            draining: state == QpState::Sqd && attr.sq_draining != 0,
            port: attr.port_num,
            pkey_index: attr.pkey_index,
            capacity: Capacity {
                send_depth: init.cap.max_send_wr,
                recv_depth: init.cap.max_recv_wr,
                max_send_sge: init.cap.max_send_sge,
                max_recv_sge: init.cap.max_recv_sge,
                max_inline: init.cap.max_inline_data,
            },
            signal_all: init.sq_sig_all != 0,
            rights: if connected {
                RemoteRights::from_sys(attr.qp_access_flags)
            } else {
                RemoteRights::default()
            },
            qkey: (!connected).then_some(QKey(attr.qkey)),
            connection: (connected && has_path).then(|| ConnectionAttr::from_sys(transport, attr)),
            send_psn: Psn::truncated(attr.sq_psn),
        }
    }
}

impl ConnectionAttr {
    fn from_sys(transport: TransportKind, attr: &sys::ibv_qp_attr) -> Self {
        Self {
            peer: Qpn::truncated(attr.dest_qp_num),
            path: PathAttr::from_sys(&attr.ah_attr),
            mtu: Mtu::from_code(attr.path_mtu),
            receive_psn: Psn::truncated(attr.rq_psn),
            migration: PathMigration::from_sys(attr.path_mig_state),
            reliable: (transport == TransportKind::Rc).then_some(ReliableAttr {
                timeout: attr.timeout,
                retry_count: attr.retry_cnt,
                rnr_retry: attr.rnr_retry,
                min_rnr_timer: attr.min_rnr_timer,
                initiator_depth: attr.max_rd_atomic,
                responder_resources: attr.max_dest_rd_atomic,
            }),
        }
    }
}

impl fmt::Display for QueuePairAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let draining = if self.draining { " (draining)" } else { "" };
        writeln!(
            f,
            "queue pair {}: {}, {}{draining}",
            self.qpn, self.transport, self.state
        )?;
        writeln!(f, "  port {}, P_Key index {}", self.port, self.pkey_index)?;
        let signal = if self.signal_all { ", every send signalled" } else { "" };
        writeln!(f, "  {}{signal}", self.capacity)?;
        match self.qkey {
            Some(qkey) => writeln!(f, "  Q_Key {qkey}")?,
            None => writeln!(f, "  peers may {}", self.rights)?,
        }
        if let Some(connection) = &self.connection {
            connection.fmt(f)?;
        }
        write!(f, "  send PSN {}", self.send_psn)
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "send queue {} of {} buffers, receive queue {} of {} buffers, {} bytes inline",
            self.send_depth, self.max_send_sge, self.recv_depth, self.max_recv_sge, self.max_inline
        )
    }
}

impl fmt::Display for RemoteRights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rights = [(self.read, "READ"), (self.write, "WRITE"), (self.atomic, "use atomics")];
        let granted: Vec<&str> = rights
            .iter()
            .filter(|(granted, _)| *granted)
            .map(|&(_, name)| name)
            .collect();
        match granted.as_slice() {
            [] => f.write_str("do nothing to memory"),
            granted => f.write_str(&granted.join(", ")),
        }
    }
}

/// Lines of a queue pair's description.
impl fmt::Display for ConnectionAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  peer {} {}", self.peer, self.path)?;
        match self.mtu {
            Some(mtu) => writeln!(f, ", path MTU {mtu}")?,
            None => writeln!(f)?,
        }
        if let Some(reliable) = &self.reliable {
            writeln!(
                f,
                "  timeout {} ({}), {} retries, {} when the receiver is not ready, RNR timer {}",
                reliable.timeout,
                Timeout(reliable.timeout),
                reliable.retry_count,
                reliable.rnr_retry,
                reliable.min_rnr_timer
            )?;
            writeln!(
                f,
                "  READs and atomics: {} outstanding, {} served",
                reliable.initiator_depth, reliable.responder_resources
            )?;
        }
        writeln!(
            f,
            "  path migration {:?}, receive PSN {}",
            self.migration, self.receive_psn
        )
    }
}

impl fmt::Display for PathAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.global {
            Some(global) => write!(
                f,
                "at {} from GID index {} of port {}, hop limit {}, traffic class {}, flow label {}",
                global.gid, global.source_index, self.port, global.hop_limit, global.traffic_class, global.flow_label
            )?,
            None => write!(f, "at LID {} from port {}", self.lid, self.port)?,
        }
        write!(f, ", service level {}", self.service_level)
    }
}

/// The local ACK timeout of a code (IBTA vol 1, 9.7.6.1.3).
struct Timeout(u8);

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 & 0x1f {
            0 => f.write_str("for ever"),
            code => write!(f, "{:.1?}", core::time::Duration::from_nanos(4096 << code)),
        }
    }
}

//! The result of ibv_query_qp(3) (IBTA vol 1, 11.2.5.3).

use core::fmt;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::transport::TransportKind;
use crate::types::{Gid, Lid, Mtu, Psn, QKey, Qpn};

/// A queue pair's attributes (ibv_query_qp(3)), [shown](fmt::Display) one group a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias("ibv_qp_attr", "ibv_query_qp"))]
pub struct QueuePairAttr {
    /// Its number.
    pub qpn: Qpn,
    /// Its transport.
    pub transport: TransportKind,
    /// Its state.
    pub state: QpState,
    /// In SQD: whether requests are still in progress.
    pub draining: bool,
    /// Its port, from 1; 0 in RESET.
    pub port: u8,
    /// The index of its P_Key.
    pub pkey_index: u16,
    /// The granted capacities: at least the requested ones.
    pub capacity: QueuePairCapacity,
    /// Whether every send generates a completion.
    #[doc(alias = "sq_sig_all")]
    pub signal_all: bool,
    /// The remote operations allowed, as far as keys grant them too. UD has none.
    pub rights: RemoteRights,
    /// The Q_Key that datagrams must carry; UD only.
    pub qkey: Option<QKey>,
    /// The connection, from RTR on; UD has none.
    pub connection: Option<ConnectionAttr>,
    /// The PSN of its next packet, or of its first: devices differ.
    #[doc(alias = "sq_psn")]
    pub send_psn: Psn,
}

/// The sizes of a queue pair's queues (ibv_create_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ibv_qp_cap")]
pub struct QueuePairCapacity {
    /// Send requests outstanding.
    pub max_send_wr: u32,
    /// Receives outstanding.
    pub max_recv_wr: u32,
    /// Scatter-gather elements of a send request.
    pub max_send_sge: u32,
    /// Scatter-gather elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

/// Remote operations that a queue pair allows its peer (IBTA vol 1, 11.2.5.2). None by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[doc(alias = "qp_access_flags")]
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
    #[doc(alias = "dest_qp_num")]
    pub peer: Qpn,
    /// The path to it.
    pub path: PathAttr,
    /// The path MTU; `None` for a value that the standard does not define.
    pub mtu: Option<Mtu>,
    /// The PSN of the packet expected next, or of the first: devices differ.
    #[doc(alias = "rq_psn")]
    pub receive_psn: Psn,
    /// The state of automatic path migration.
    pub migration: PathMigration,
    /// Attributes of RC; complete from RTS on.
    pub reliable: Option<ReliableAttr>,
}

/// Attributes of RC: acknowledgements, READs and atomics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReliableAttr {
    /// The local ACK timeout: 4.096 µs · 2^`timeout`, 0 is infinite.
    pub timeout: u8,
    /// The retry count.
    #[doc(alias = "retry_cnt")]
    pub retry_count: u8,
    /// The RNR retry count; 7 is infinite.
    pub rnr_retry: u8,
    /// The minimum RNR NAK timer: a code of IBTA vol 1, table 46.
    pub min_rnr_timer: u8,
    /// READs and atomics that it may have outstanding (`max_rd_atomic`).
    pub max_rd_atomic: u8,
    /// READs and atomics that it serves at once (`max_dest_rd_atomic`).
    pub max_dest_rd_atomic: u8,
}

/// The path to a peer: an address vector (IBTA vol 1, 11.2.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ibv_ah_attr")]
pub struct PathAttr {
    /// The local port, from 1.
    pub port: u8,
    /// The GRH fields, with the peer's GID; `None` where packets go by LID alone.
    pub global: Option<GlobalPath>,
    /// The peer's LID; 0 on RoCE.
    pub lid: Lid,
    /// The InfiniBand service level.
    pub service_level: u8,
}

/// The fields of a path's global route header (IBTA vol 1, 8.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ibv_global_route")]
pub struct GlobalPath {
    /// The peer's GID.
    pub gid: Gid,
    /// The local GID index (`sgid_index`).
    #[doc(alias = "sgid_index")]
    pub source_index: u8,
    /// The hop limit.
    pub hop_limit: u8,
    /// On RoCEv2 the IP header's DSCP and ECN.
    pub traffic_class: u8,
    /// The flow label, of 20 bits.
    pub flow_label: u32,
}

/// The state of automatic path migration (APM; IBTA vol 1, 17.2.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ibv_mig_state")]
pub enum PathMigration {
    /// It uses the primary path; the alternate path is not in use.
    #[doc(alias = "IBV_MIG_MIGRATED")]
    Migrated,
    /// An alternate path was set; both ends are to load it.
    #[doc(alias = "IBV_MIG_REARM")]
    Rearm,
    /// Both ends are ready to fail over to the alternate path.
    #[doc(alias = "IBV_MIG_ARMED")]
    Armed,
    /// A value that the standard does not define.
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
            capacity: QueuePairCapacity {
                max_send_wr: init.cap.max_send_wr,
                max_recv_wr: init.cap.max_recv_wr,
                max_send_sge: init.cap.max_send_sge,
                max_recv_sge: init.cap.max_recv_sge,
                max_inline_data: init.cap.max_inline_data,
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
                max_rd_atomic: attr.max_rd_atomic,
                max_dest_rd_atomic: attr.max_dest_rd_atomic,
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
        let signal = if self.signal_all { ", every send signaled" } else { "" };
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

impl fmt::Display for QueuePairCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "send queue {} of {} buffers, receive queue {} of {} buffers, {} bytes inline",
            self.max_send_wr, self.max_send_sge, self.max_recv_wr, self.max_recv_sge, self.max_inline_data
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
                reliable.max_rd_atomic, reliable.max_dest_rd_atomic
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

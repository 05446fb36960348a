//! Conversion of queue pair attributes between the C struct and the engine's.

use doorbell_roce_proto::memory::Placement;
use doorbell_roce_proto::qp::{Attributes, GidsUsed, Modify, Path, RemoteAccess, State};
use doorbell_roce_proto::{Gid, Mtu, Psn, Qpn};
use doorbell_softroce::{Device, DeviceInfo, capacity};
use doorbell_verbs_sys::*;

use crate::gids::gid_table;
use crate::placement::{IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT};
use crate::query::PORT;

/// Without IBV_QP_ALT_PATH, IBV_QP_CAP and IBV_QP_RATE_LIMIT, which a soft device lacks.
const SUPPORTED: u32 = IBV_QP_STATE
    | IBV_QP_CUR_STATE
    | IBV_QP_EN_SQD_ASYNC_NOTIFY
    | IBV_QP_ACCESS_FLAGS
    | IBV_QP_PKEY_INDEX
    | IBV_QP_PORT
    | IBV_QP_QKEY
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_QP_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER
    | IBV_QP_SQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_PATH_MIG_STATE
    | IBV_QP_DEST_QPN;

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum AttributeError {
    #[error("attributes {0:#x} are not supported on a soft device")]
    Unsupported(u32),
    #[error("{0} is not one of `enum ibv_qp_state`")]
    State(u32),
    #[error("the device has one port, 1")]
    Port,
    #[error("the device has one partition key, at index 0")]
    Pkey,
    #[error("path MTU {0} is not one of `enum ibv_mtu`, or more than the port's")]
    Mtu(u32),
    #[error("RoCE needs a global address: `is_global` and a destination GID")]
    NotGlobal,
    #[error("the device has one GID, at index 0")]
    SourceGid,
    #[error("the destination GID is no address of the device's own family, or the multicast GID of a connection")]
    DestinationGid,
    #[error("at most {max} READs and atomics may be outstanding", max = capacity::RD_ATOMIC)]
    RdAtomic,
    #[error("path migration is not supported")]
    Migration,
}

pub(crate) fn to_modify(attr: &ibv_qp_attr, mask: u32, device: &Device) -> Result<Modify, AttributeError> {
    let given = |bit: u32| mask & bit != 0;
    if given(!SUPPORTED) {
        return Err(AttributeError::Unsupported(mask & !SUPPORTED));
    }
    if given(IBV_QP_PATH_MIG_STATE) && attr.path_mig_state != IBV_MIG_MIGRATED {
        return Err(AttributeError::Migration);
    }
    if given(IBV_QP_PORT) && attr.port_num != PORT {
        return Err(AttributeError::Port);
    }
    if given(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0 {
        return Err(AttributeError::Pkey);
    }
    let over_limit = |bit, value| given(bit) && value > capacity::RD_ATOMIC;
    if over_limit(IBV_QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic)
        || over_limit(IBV_QP_MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic)
    {
        return Err(AttributeError::RdAtomic);
    }
    Ok(Modify {
        state: given(IBV_QP_STATE).then(|| to_state(attr.qp_state)).transpose()?,
        current_state: given(IBV_QP_CUR_STATE)
            .then(|| to_state(attr.cur_qp_state))
            .transpose()?,
        pkey_index: given(IBV_QP_PKEY_INDEX).then_some(attr.pkey_index),
        port: given(IBV_QP_PORT).then_some(attr.port_num),
        access: given(IBV_QP_ACCESS_FLAGS).then(|| to_access(attr.qp_access_flags)),
        path: given(IBV_QP_AV)
            .then(|| to_path(&attr.ah_attr, device.info()))
            .transpose()?,
        path_mtu: given(IBV_QP_PATH_MTU)
            .then(|| to_mtu(attr.path_mtu, device.mtu()))
            .transpose()?,
        qkey: given(IBV_QP_QKEY).then_some(attr.qkey),
        dest_qpn: given(IBV_QP_DEST_QPN).then(|| Qpn::new(attr.dest_qp_num)),
        rq_psn: given(IBV_QP_RQ_PSN).then(|| Psn::new(attr.rq_psn)),
        max_dest_rd_atomic: given(IBV_QP_MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic),
        min_rnr_timer: given(IBV_QP_MIN_RNR_TIMER).then_some(attr.min_rnr_timer),
        sq_psn: given(IBV_QP_SQ_PSN).then(|| Psn::new(attr.sq_psn)),
        timeout: given(IBV_QP_TIMEOUT).then_some(attr.timeout),
        retry_cnt: given(IBV_QP_RETRY_CNT).then_some(attr.retry_cnt),
        rnr_retry: given(IBV_QP_RNR_RETRY).then_some(attr.rnr_retry),
        max_rd_atomic: given(IBV_QP_MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic),
        sqd_async_notify: given(IBV_QP_EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify != 0),
    })
}

fn to_state(state: ibv_qp_state) -> Result<State, AttributeError> {
    Ok(match state {
        IBV_QPS_RESET => State::Reset,
        IBV_QPS_INIT => State::Init,
        IBV_QPS_RTR => State::Rtr,
        IBV_QPS_RTS => State::Rts,
        IBV_QPS_SQD => State::Sqd,
        IBV_QPS_SQE => State::Sqe,
        IBV_QPS_ERR => State::Err,
        other => return Err(AttributeError::State(other)),
    })
}

fn to_access(flags: u32) -> RemoteAccess {
    RemoteAccess {
        read: flags & IBV_ACCESS_REMOTE_READ != 0,
        write: flags & IBV_ACCESS_REMOTE_WRITE != 0,
        atomic: flags & IBV_ACCESS_REMOTE_ATOMIC != 0,
        flush: Placement {
            global: flags & IBV_ACCESS_FLUSH_GLOBAL != 0,
            persistent: flags & IBV_ACCESS_FLUSH_PERSISTENT != 0,
        },
    }
}

fn to_mtu(code: ibv_mtu, port: Mtu) -> Result<Mtu, AttributeError> {
    Mtu::from_code(code)
        .filter(|&mtu| mtu <= port)
        .ok_or(AttributeError::Mtu(code))
}

/// The path to a connected peer.
pub(crate) fn to_path(vector: &ibv_ah_attr, device: &DeviceInfo) -> Result<Path, AttributeError> {
    let path = to_destination(vector, device)?;
    match path.remote.is_multicast() {
        true => Err(AttributeError::DestinationGid),
        false => Ok(path),
    }
}

/// The path of datagrams, to a peer or to a multicast group.
pub(crate) fn to_destination(vector: &ibv_ah_attr, device: &DeviceInfo) -> Result<Path, AttributeError> {
    if vector.is_global == 0 {
        return Err(AttributeError::NotGlobal);
    }
    if vector.port_num != PORT {
        return Err(AttributeError::Port);
    }
    let local = device.address.ip();
    let source_index = vector.grh.sgid_index;
    if gid_table(local).nth(source_index.into()).is_none() {
        return Err(AttributeError::SourceGid);
    }
    // SAFETY: a GID is 16 bytes, whichever member of the union was written.
    let gid = Gid(unsafe { vector.grh.dgid.raw });
    let remote = gid.to_destination(local).ok_or(AttributeError::DestinationGid)?;
    let path = Path::new(local, remote);
    let link_local = gid != Gid::from(remote);
    Ok(Path {
        traffic_class: vector.grh.traffic_class,
        hop_limit: match vector.grh.hop_limit {
            0 => path.hop_limit,
            given => given,
        },
        flow_label: vector.grh.flow_label,
        gids: GidsUsed {
            source_index,
            link_local,
        },
        ..path
    })
}

/// Attributes never set are 0.
pub(crate) fn to_attr(found: &Attributes) -> ibv_qp_attr {
    let set = &found.set;
    let state = found.state as ibv_qp_state;
    ibv_qp_attr {
        qp_state: state,
        cur_qp_state: state,
        path_mtu: set.path_mtu.map_or(0, |mtu| mtu as ibv_mtu),
        path_mig_state: IBV_MIG_MIGRATED,
        qkey: set.qkey.unwrap_or(0),
        rq_psn: set.rq_psn.map_or(0, Psn::get),
        sq_psn: set.sq_psn.map_or(0, Psn::get),
        dest_qp_num: set.dest_qpn.map_or(0, Qpn::get),
        qp_access_flags: set.access.map_or(0, from_access),
        cap: ibv_qp_cap {
            max_send_wr: found.init.max_send_wr,
            max_recv_wr: found.init.max_recv_wr,
            max_send_sge: found.init.max_send_sge,
            max_recv_sge: found.init.max_recv_sge,
            max_inline_data: found.init.max_inline,
        },
        ah_attr: from_path(set.path.as_ref()),
        alt_ah_attr: from_path(None),
        pkey_index: set.pkey_index.unwrap_or(0),
        alt_pkey_index: 0,
        en_sqd_async_notify: u8::from(set.sqd_async_notify.unwrap_or(false)),
        sq_draining: u8::from(found.sq_draining),
        max_rd_atomic: set.max_rd_atomic.unwrap_or(0),
        max_dest_rd_atomic: set.max_dest_rd_atomic.unwrap_or(0),
        min_rnr_timer: set.min_rnr_timer.unwrap_or(0),
        port_num: set.port.unwrap_or(0),
        timeout: set.timeout.unwrap_or(0),
        retry_cnt: set.retry_cnt.unwrap_or(0),
        rnr_retry: set.rnr_retry.unwrap_or(0),
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: 0,
    }
}

fn from_access(access: RemoteAccess) -> u32 {
    let bit = |set, bit| if set { bit } else { 0 };
    bit(access.read, IBV_ACCESS_REMOTE_READ)
        | bit(access.write, IBV_ACCESS_REMOTE_WRITE)
        | bit(access.atomic, IBV_ACCESS_REMOTE_ATOMIC)
        | bit(access.flush.global, IBV_ACCESS_FLUSH_GLOBAL)
        | bit(access.flush.persistent, IBV_ACCESS_FLUSH_PERSISTENT)
}

fn from_path(path: Option<&Path>) -> ibv_ah_attr {
    let gid = |path: &Path| match path.gids.link_local {
        true => Gid::link_local(path.remote),
        false => Gid::from(path.remote),
    };
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid {
                raw: path.map_or([0; 16], |path| gid(path).0),
            },
            flow_label: path.map_or(0, |path| path.flow_label),
            sgid_index: path.map_or(0, |path| path.gids.source_index),
            hop_limit: path.map_or(0, |path| path.hop_limit),
            traffic_class: path.map_or(0, |path| path.traffic_class),
        },
        dlid: 0,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: u8::from(path.is_some()),
        port_num: if path.is_some() { PORT } else { 0 },
    }
}

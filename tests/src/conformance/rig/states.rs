//! The states of a queue pair, and the attributes of each transition: IBTA vol 1, 11.2.5.2, table
//! 91; ibv_modify_qp(3). Independent of the soft device's and the safe API's tables.

use doorbell_verbs_sys::*;

pub(in crate::conformance) const STATES: [ibv_qp_state; 7] = [
    IBV_QPS_RESET,
    IBV_QPS_INIT,
    IBV_QPS_RTR,
    IBV_QPS_RTS,
    IBV_QPS_SQD,
    IBV_QPS_SQE,
    IBV_QPS_ERR,
];

pub(in crate::conformance) fn state_name(state: ibv_qp_state) -> &'static str {
    ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"]
        .get(state as usize)
        .copied()
        .unwrap_or("no state")
}

pub(in crate::conformance) const TRANSPORTS: [ibv_qp_type; 3] = [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD];

pub(in crate::conformance) fn transport_name(transport: ibv_qp_type) -> &'static str {
    match transport {
        IBV_QPT_RC => "rc",
        IBV_QPT_UC => "uc",
        _ => "ud",
    }
}

/// Every attribute that can be set, with its name.
pub(in crate::conformance) const ATTRIBUTES: [(u32, &str); 21] = [
    (IBV_QP_CUR_STATE, "CUR_STATE"),
    (IBV_QP_EN_SQD_ASYNC_NOTIFY, "EN_SQD_ASYNC_NOTIFY"),
    (IBV_QP_ACCESS_FLAGS, "ACCESS_FLAGS"),
    (IBV_QP_PKEY_INDEX, "PKEY_INDEX"),
    (IBV_QP_PORT, "PORT"),
    (IBV_QP_QKEY, "QKEY"),
    (IBV_QP_AV, "AV"),
    (IBV_QP_PATH_MTU, "PATH_MTU"),
    (IBV_QP_TIMEOUT, "TIMEOUT"),
    (IBV_QP_RETRY_CNT, "RETRY_CNT"),
    (IBV_QP_RNR_RETRY, "RNR_RETRY"),
    (IBV_QP_RQ_PSN, "RQ_PSN"),
    (IBV_QP_MAX_QP_RD_ATOMIC, "MAX_QP_RD_ATOMIC"),
    (IBV_QP_ALT_PATH, "ALT_PATH"),
    (IBV_QP_MIN_RNR_TIMER, "MIN_RNR_TIMER"),
    (IBV_QP_SQ_PSN, "SQ_PSN"),
    (IBV_QP_MAX_DEST_RD_ATOMIC, "MAX_DEST_RD_ATOMIC"),
    (IBV_QP_PATH_MIG_STATE, "PATH_MIG_STATE"),
    (IBV_QP_CAP, "CAP"),
    (IBV_QP_DEST_QPN, "DEST_QPN"),
    (IBV_QP_RATE_LIMIT, "RATE_LIMIT"),
];

/// Attributes that need a capability flag, without which either is allowed (table 91, notes). Left
/// open in any case: path migration, as Linux refuses every alternate path on Ethernet, and the
/// rate limit, which is not in the standard.
pub(in crate::conformance) const CONDITIONAL: [(u32, u32); 5] = [
    (IBV_QP_ALT_PATH, 0),
    (IBV_QP_PATH_MIG_STATE, 0),
    (IBV_QP_CAP, IBV_DEVICE_RESIZE_MAX_WR),
    (IBV_QP_CUR_STATE, IBV_DEVICE_CURR_QP_STATE_MOD),
    (IBV_QP_RATE_LIMIT, 0),
];

#[derive(Clone, Copy, Debug)]
pub(in crate::conformance) struct Rule {
    pub(in crate::conformance) required: u32,
    pub(in crate::conformance) optional: u32,
}

/// The rule of a transition; `None` when there is no such transition.
pub(in crate::conformance) fn rule(transport: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state) -> Option<Rule> {
    let is_rc = transport == IBV_QPT_RC;
    // A queue pair's own attribute on every transport: remote access rights, or a Q_Key.
    let own = if transport == IBV_QPT_UD {
        IBV_QP_QKEY
    } else {
        IBV_QP_ACCESS_FLAGS
    };
    let of_rc = |bits| if is_rc { bits } else { 0 };
    let of_connected = |bits| if transport == IBV_QPT_UD { 0 } else { bits };
    let migration = of_connected(IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE);
    let in_use = IBV_QP_CUR_STATE | own | of_rc(IBV_QP_MIN_RNR_TIMER) | migration;
    let (required, optional) = match (from, to) {
        (IBV_QPS_RESET, IBV_QPS_INIT) => (IBV_QP_PKEY_INDEX | IBV_QP_PORT | own, 0),
        (IBV_QPS_INIT, IBV_QPS_INIT) => (0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | own),
        (IBV_QPS_INIT, IBV_QPS_RTR) => (
            of_connected(IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
                | of_rc(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
            IBV_QP_PKEY_INDEX | own | of_connected(IBV_QP_ALT_PATH),
        ),
        (IBV_QPS_RTR, IBV_QPS_RTS) => (
            IBV_QP_SQ_PSN | of_rc(IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC),
            in_use,
        ),
        (IBV_QPS_RTS, IBV_QPS_RTS) | (IBV_QPS_SQD, IBV_QPS_RTS) => (0, in_use),
        (IBV_QPS_RTS, IBV_QPS_SQD) => (0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (IBV_QPS_SQD, IBV_QPS_SQD) => (
            0,
            IBV_QP_PKEY_INDEX
                | own
                | migration
                | of_connected(IBV_QP_AV)
                | of_rc(
                    IBV_QP_PORT
                        | IBV_QP_TIMEOUT
                        | IBV_QP_RETRY_CNT
                        | IBV_QP_RNR_RETRY
                        | IBV_QP_MAX_QP_RD_ATOMIC
                        | IBV_QP_MAX_DEST_RD_ATOMIC
                        | IBV_QP_MIN_RNR_TIMER,
                ),
        ),
        // A send queue in error: RC has no such state.
        (IBV_QPS_SQE, IBV_QPS_RTS) if !is_rc => (0, IBV_QP_CUR_STATE | own),
        (IBV_QPS_SQE, _) if is_rc => return None,
        // From any state; RESET itself cannot fail.
        (_, IBV_QPS_RESET) => (0, 0),
        (from, IBV_QPS_ERR) if from != IBV_QPS_RESET => (0, 0),
        _ => return None,
    };
    Some(Rule { required, optional })
}

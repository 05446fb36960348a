//! State transitions and their attributes, per transport (IBTA table 91; ibv_modify_qp(3)).

use crate::qp::{Modify, ModifyError, QpInit, State};
use crate::wire::Transport;

/// The supported bits of `enum ibv_qp_attr_mask`.
pub(crate) mod mask {
    pub(crate) const STATE: u32 = 1 << 0;
    pub(crate) const CUR_STATE: u32 = 1 << 1;
    pub(crate) const EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
    pub(crate) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(crate) const PKEY_INDEX: u32 = 1 << 4;
    pub(crate) const PORT: u32 = 1 << 5;
    pub(crate) const QKEY: u32 = 1 << 6;
    pub(crate) const AV: u32 = 1 << 7;
    pub(crate) const PATH_MTU: u32 = 1 << 8;
    pub(crate) const TIMEOUT: u32 = 1 << 9;
    pub(crate) const RETRY_CNT: u32 = 1 << 10;
    pub(crate) const RNR_RETRY: u32 = 1 << 11;
    pub(crate) const RQ_PSN: u32 = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(crate) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(crate) const SQ_PSN: u32 = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(crate) const DEST_QPN: u32 = 1 << 20;
}

use mask::{
    ACCESS_FLAGS, AV, CUR_STATE, DEST_QPN, EN_SQD_ASYNC_NOTIFY, MAX_DEST_RD_ATOMIC, MAX_QP_RD_ATOMIC, MIN_RNR_TIMER,
    PATH_MTU, PKEY_INDEX, PORT, QKEY, RETRY_CNT, RNR_RETRY, RQ_PSN, SQ_PSN, STATE, TIMEOUT,
};

struct Row {
    from: State,
    to: State,
    required: u32,
    optional: u32,
}

const fn row(from: State, to: State, required: u32, optional: u32) -> Row {
    Row {
        from,
        to,
        required,
        optional,
    }
}

/// Transitions of an RC queue pair. [`STATE`] itself is always allowed.
const RC: &[Row] = &[
    row(State::Reset, State::Reset, 0, 0),
    row(State::Reset, State::Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
    row(State::Init, State::Reset, 0, 0),
    row(State::Init, State::Err, 0, 0),
    row(State::Init, State::Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
    row(
        State::Init,
        State::Rtr,
        AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
        PKEY_INDEX | ACCESS_FLAGS,
    ),
    row(State::Rtr, State::Reset, 0, 0),
    row(State::Rtr, State::Err, 0, 0),
    row(
        State::Rtr,
        State::Rts,
        TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC,
        CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER,
    ),
    row(State::Rts, State::Reset, 0, 0),
    row(State::Rts, State::Err, 0, 0),
    row(State::Rts, State::Rts, 0, CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER),
    row(State::Rts, State::Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    row(State::Sqd, State::Reset, 0, 0),
    row(State::Sqd, State::Err, 0, 0),
    row(State::Sqd, State::Rts, 0, CUR_STATE | ACCESS_FLAGS | MIN_RNR_TIMER),
    row(
        State::Sqd,
        State::Sqd,
        0,
        PORT | AV
            | TIMEOUT
            | RETRY_CNT
            | RNR_RETRY
            | MAX_QP_RD_ATOMIC
            | MAX_DEST_RD_ATOMIC
            | ACCESS_FLAGS
            | PKEY_INDEX
            | MIN_RNR_TIMER,
    ),
    row(State::Err, State::Reset, 0, 0),
    row(State::Err, State::Err, 0, 0),
];

/// Transitions of a UC queue pair: no attributes of ACKs, READs and atomics; and SQE.
const UC: &[Row] = &[
    row(State::Reset, State::Reset, 0, 0),
    row(State::Reset, State::Init, PKEY_INDEX | PORT | ACCESS_FLAGS, 0),
    row(State::Init, State::Reset, 0, 0),
    row(State::Init, State::Err, 0, 0),
    row(State::Init, State::Init, 0, PKEY_INDEX | PORT | ACCESS_FLAGS),
    row(
        State::Init,
        State::Rtr,
        AV | PATH_MTU | DEST_QPN | RQ_PSN,
        PKEY_INDEX | ACCESS_FLAGS,
    ),
    row(State::Rtr, State::Reset, 0, 0),
    row(State::Rtr, State::Err, 0, 0),
    row(State::Rtr, State::Rts, SQ_PSN, CUR_STATE | ACCESS_FLAGS),
    row(State::Rts, State::Reset, 0, 0),
    row(State::Rts, State::Err, 0, 0),
    row(State::Rts, State::Rts, 0, CUR_STATE | ACCESS_FLAGS),
    row(State::Rts, State::Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    row(State::Sqd, State::Reset, 0, 0),
    row(State::Sqd, State::Err, 0, 0),
    row(State::Sqd, State::Rts, 0, CUR_STATE | ACCESS_FLAGS),
    row(State::Sqd, State::Sqd, 0, AV | ACCESS_FLAGS | PKEY_INDEX),
    row(State::Sqe, State::Reset, 0, 0),
    row(State::Sqe, State::Err, 0, 0),
    row(State::Sqe, State::Rts, 0, CUR_STATE | ACCESS_FLAGS),
    row(State::Err, State::Reset, 0, 0),
    row(State::Err, State::Err, 0, 0),
];

/// Transitions of a UD queue pair: no peer, but a Q_Key.
const UD: &[Row] = &[
    row(State::Reset, State::Reset, 0, 0),
    row(State::Reset, State::Init, PKEY_INDEX | PORT | QKEY, 0),
    row(State::Init, State::Reset, 0, 0),
    row(State::Init, State::Err, 0, 0),
    row(State::Init, State::Init, 0, PKEY_INDEX | PORT | QKEY),
    row(State::Init, State::Rtr, 0, PKEY_INDEX | QKEY),
    row(State::Rtr, State::Reset, 0, 0),
    row(State::Rtr, State::Err, 0, 0),
    row(State::Rtr, State::Rts, SQ_PSN, CUR_STATE | QKEY),
    row(State::Rts, State::Reset, 0, 0),
    row(State::Rts, State::Err, 0, 0),
    row(State::Rts, State::Rts, 0, CUR_STATE | QKEY),
    row(State::Rts, State::Sqd, 0, EN_SQD_ASYNC_NOTIFY),
    row(State::Sqd, State::Reset, 0, 0),
    row(State::Sqd, State::Err, 0, 0),
    row(State::Sqd, State::Rts, 0, CUR_STATE | QKEY),
    row(State::Sqd, State::Sqd, 0, PKEY_INDEX | QKEY),
    row(State::Sqe, State::Reset, 0, 0),
    row(State::Sqe, State::Err, 0, 0),
    row(State::Sqe, State::Rts, 0, CUR_STATE | QKEY),
    row(State::Err, State::Reset, 0, 0),
    row(State::Err, State::Err, 0, 0),
];

const fn rows(transport: Transport) -> &'static [Row] {
    match transport {
        Transport::Rc | Transport::Xrc => RC,
        Transport::Uc => UC,
        Transport::Ud => UD,
    }
}

/// The attributes of RC that an end of XRC lacks: the other end's.
const fn lacks(init: &QpInit) -> u32 {
    match (init.transport, init.xrc_domain) {
        (Transport::Xrc, None) => MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER,
        (Transport::Xrc, Some(_)) => RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC,
        _ => 0,
    }
}

impl Modify {
    pub(crate) fn mask(&self) -> u32 {
        let bit = |given: bool, bit: u32| if given { bit } else { 0 };
        bit(self.state.is_some(), STATE)
            | bit(self.current_state.is_some(), CUR_STATE)
            | bit(self.sqd_async_notify.is_some(), EN_SQD_ASYNC_NOTIFY)
            | bit(self.access.is_some(), ACCESS_FLAGS)
            | bit(self.pkey_index.is_some(), PKEY_INDEX)
            | bit(self.port.is_some(), PORT)
            | bit(self.qkey.is_some(), QKEY)
            | bit(self.path.is_some(), AV)
            | bit(self.path_mtu.is_some(), PATH_MTU)
            | bit(self.timeout.is_some(), TIMEOUT)
            | bit(self.retry_cnt.is_some(), RETRY_CNT)
            | bit(self.rnr_retry.is_some(), RNR_RETRY)
            | bit(self.rq_psn.is_some(), RQ_PSN)
            | bit(self.max_rd_atomic.is_some(), MAX_QP_RD_ATOMIC)
            | bit(self.min_rnr_timer.is_some(), MIN_RNR_TIMER)
            | bit(self.sq_psn.is_some(), SQ_PSN)
            | bit(self.max_dest_rd_atomic.is_some(), MAX_DEST_RD_ATOMIC)
            | bit(self.dest_qpn.is_some(), DEST_QPN)
    }

    /// The bit of the first attribute whose value is out of range.
    fn bad_value(&self) -> Option<u32> {
        let over = |value: Option<u8>, most: u8| value.is_some_and(|value| value > most);
        let bad = [
            (self.port.is_some_and(|port| port != 1), PORT),
            (self.pkey_index.is_some_and(|index| index != 0), PKEY_INDEX),
            (
                self.path
                    .is_some_and(|path| path.local.is_ipv4() != path.remote.is_ipv4()),
                AV,
            ),
            (over(self.timeout, 31), TIMEOUT),
            (over(self.retry_cnt, 7), RETRY_CNT),
            (over(self.rnr_retry, 7), RNR_RETRY),
            (over(self.min_rnr_timer, 31), MIN_RNR_TIMER),
        ];
        bad.iter().find(|(bad, _)| *bad).map(|(_, bit)| *bit)
    }

    pub(crate) fn target(&self, init: &QpInit, from: State) -> Result<State, ModifyError> {
        let to = self.state.unwrap_or(from);
        let no_such = ModifyError::Transition { from, to };
        if self.current_state.is_some_and(|state| state != from) {
            return Err(no_such);
        }
        let row = rows(init.transport)
            .iter()
            .find(|row| row.from == from && row.to == to)
            .ok_or(no_such)?;
        let (given, lacks) = (self.mask() & !STATE, lacks(init));
        if let Some(bit) = lowest(row.required & !lacks & !given) {
            return Err(ModifyError::Missing(bit));
        }
        if let Some(bit) = lowest(given & (lacks | !row.required & !row.optional)) {
            return Err(ModifyError::NotAllowed(bit));
        }
        self.bad_value().map_or(Ok(to), |bit| Err(ModifyError::Value(bit)))
    }
}

const fn lowest(bits: u32) -> Option<u32> {
    if bits == 0 {
        None
    } else {
        Some(bits & bits.wrapping_neg())
    }
}

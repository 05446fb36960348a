//! The queue pair state machine as a table of attributes (IBTA vol 1, 11.2.5.2; ibv_modify_qp(3)).

use core::fmt;

use doorbell_verbs_sys as sys;
use sys::{
    IBV_QP_ACCESS_FLAGS, IBV_QP_ALT_PATH, IBV_QP_AV, IBV_QP_CUR_STATE, IBV_QP_DEST_QPN, IBV_QP_EN_SQD_ASYNC_NOTIFY,
    IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MIG_STATE, IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN,
    IBV_QP_STATE, IBV_QP_TIMEOUT, ibv_qp_attr_mask as Mask,
};

use super::transport::TransportKind;

/// The state of a queue pair (IBTA vol 1, 10.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[doc(alias = "ibv_qp_state")]
pub enum QpState {
    /// Just created: nothing can be posted.
    #[doc(alias = "IBV_QPS_RESET")]
    Reset,
    /// Receives can be posted, nothing is processed.
    #[doc(alias = "IBV_QPS_INIT")]
    Init,
    /// Ready to receive.
    #[doc(alias = "IBV_QPS_RTR")]
    Rtr,
    /// Ready to send: in use.
    #[doc(alias = "IBV_QPS_RTS")]
    Rts,
    /// Send queue drain: draining or drained.
    #[doc(alias = "IBV_QPS_SQD")]
    Sqd,
    /// Send queue error (never with RC).
    #[doc(alias = "IBV_QPS_SQE")]
    Sqe,
    /// Error: all requests complete as flushed.
    #[doc(alias = "IBV_QPS_ERR")]
    Err,
    /// A value that the standard does not define.
    Unknown(u32),
}

impl QpState {
    pub(crate) fn from_sys(state: sys::ibv_qp_state) -> Self {
        match state {
            sys::IBV_QPS_RESET => Self::Reset,
            sys::IBV_QPS_INIT => Self::Init,
            sys::IBV_QPS_RTR => Self::Rtr,
            sys::IBV_QPS_RTS => Self::Rts,
            sys::IBV_QPS_SQD => Self::Sqd,
            sys::IBV_QPS_SQE => Self::Sqe,
            sys::IBV_QPS_ERR => Self::Err,
            other => Self::Unknown(other),
        }
    }

    pub(crate) fn to_sys(self) -> sys::ibv_qp_state {
        match self {
            Self::Reset => sys::IBV_QPS_RESET,
            Self::Init => sys::IBV_QPS_INIT,
            Self::Rtr => sys::IBV_QPS_RTR,
            Self::Rts => sys::IBV_QPS_RTS,
            Self::Sqd => sys::IBV_QPS_SQD,
            Self::Sqe => sys::IBV_QPS_SQE,
            Self::Err => sys::IBV_QPS_ERR,
            Self::Unknown(state) => state,
        }
    }
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
            Self::Unknown(state) => return write!(f, "state {state}"),
        })
    }
}

/// Required attributes, and those allowed besides. `IBV_QP_STATE` is implied.
#[derive(Clone, Copy)]
struct AttrMasks {
    required: Mask,
    optional: Mask,
}

/// A transition, with its attributes per transport; `None` where a transport does not have it.
struct Transition {
    from: QpState,
    to: QpState,
    rc: Option<AttrMasks>,
    uc: Option<AttrMasks>,
    ud: Option<AttrMasks>,
}

const fn masks(required: Mask, optional: Mask) -> Option<AttrMasks> {
    Some(AttrMasks { required, optional })
}

const PORT_ATTRS: Mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT;
const PATH_ATTRS: Mask = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
/// Attributes that a connected queue pair may modify in, or on return to, RTS.
const RTS_ATTRS: Mask = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
const RTS_ATTRS_UD: Mask = IBV_QP_CUR_STATE | IBV_QP_QKEY;

/// All transitions, but for those to RESET and ERR, which take no attributes.
const TABLE: &[Transition] = &[
    Transition {
        from: QpState::Reset,
        to: QpState::Init,
        rc: masks(PORT_ATTRS | IBV_QP_ACCESS_FLAGS, 0),
        uc: masks(PORT_ATTRS | IBV_QP_ACCESS_FLAGS, 0),
        ud: masks(PORT_ATTRS | IBV_QP_QKEY, 0),
    },
    Transition {
        from: QpState::Init,
        to: QpState::Init,
        rc: masks(0, PORT_ATTRS | IBV_QP_ACCESS_FLAGS),
        uc: masks(0, PORT_ATTRS | IBV_QP_ACCESS_FLAGS),
        ud: masks(0, PORT_ATTRS | IBV_QP_QKEY),
    },
    Transition {
        from: QpState::Init,
        to: QpState::Rtr,
        rc: masks(
            PATH_ATTRS | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
            IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH,
        ),
        uc: masks(PATH_ATTRS, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH),
        ud: masks(0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
    },
    Transition {
        from: QpState::Rtr,
        to: QpState::Rts,
        rc: masks(
            IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
            RTS_ATTRS | IBV_QP_MIN_RNR_TIMER,
        ),
        uc: masks(IBV_QP_SQ_PSN, RTS_ATTRS),
        ud: masks(IBV_QP_SQ_PSN, RTS_ATTRS_UD),
    },
    Transition {
        from: QpState::Rts,
        to: QpState::Rts,
        rc: masks(0, RTS_ATTRS | IBV_QP_MIN_RNR_TIMER),
        uc: masks(0, RTS_ATTRS),
        ud: masks(0, RTS_ATTRS_UD),
    },
    Transition {
        from: QpState::Rts,
        to: QpState::Sqd,
        rc: masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        uc: masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        ud: masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
    },
    Transition {
        from: QpState::Sqd,
        to: QpState::Rts,
        rc: masks(0, RTS_ATTRS | IBV_QP_MIN_RNR_TIMER),
        uc: masks(0, RTS_ATTRS),
        ud: masks(0, RTS_ATTRS_UD),
    },
    Transition {
        from: QpState::Sqd,
        to: QpState::Sqd,
        rc: masks(
            0,
            PORT_ATTRS
                | IBV_QP_ACCESS_FLAGS
                | IBV_QP_AV
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER
                | IBV_QP_ALT_PATH
                | IBV_QP_PATH_MIG_STATE,
        ),
        uc: masks(
            0,
            IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE,
        ),
        ud: masks(0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
    },
    Transition {
        from: QpState::Sqe,
        to: QpState::Rts,
        rc: None,
        uc: masks(0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS),
        ud: masks(0, RTS_ATTRS_UD),
    },
];

fn masks_of(transport: TransportKind, from: QpState, to: QpState) -> Option<AttrMasks> {
    let anywhere = match to {
        QpState::Reset => masks(0, 0),
        QpState::Err if from != QpState::Reset => masks(0, 0),
        _ => None,
    };
    let row = TABLE.iter().find(|row| row.from == from && row.to == to);
    anywhere.or_else(|| {
        row.and_then(|row| match transport {
            TransportKind::Rc => row.rc,
            TransportKind::Uc => row.uc,
            TransportKind::Ud => row.ud,
        })
    })
}

const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Err,
];

const NAMES: &[(Mask, &str)] = &[
    (IBV_QP_CUR_STATE, "IBV_QP_CUR_STATE"),
    (IBV_QP_EN_SQD_ASYNC_NOTIFY, "IBV_QP_EN_SQD_ASYNC_NOTIFY"),
    (IBV_QP_ACCESS_FLAGS, "IBV_QP_ACCESS_FLAGS"),
    (IBV_QP_PKEY_INDEX, "IBV_QP_PKEY_INDEX"),
    (IBV_QP_PORT, "IBV_QP_PORT"),
    (IBV_QP_QKEY, "IBV_QP_QKEY"),
    (IBV_QP_AV, "IBV_QP_AV"),
    (IBV_QP_PATH_MTU, "IBV_QP_PATH_MTU"),
    (IBV_QP_TIMEOUT, "IBV_QP_TIMEOUT"),
    (IBV_QP_RETRY_CNT, "IBV_QP_RETRY_CNT"),
    (IBV_QP_RNR_RETRY, "IBV_QP_RNR_RETRY"),
    (IBV_QP_RQ_PSN, "IBV_QP_RQ_PSN"),
    (IBV_QP_MAX_QP_RD_ATOMIC, "IBV_QP_MAX_QP_RD_ATOMIC"),
    (IBV_QP_ALT_PATH, "IBV_QP_ALT_PATH"),
    (IBV_QP_MIN_RNR_TIMER, "IBV_QP_MIN_RNR_TIMER"),
    (IBV_QP_SQ_PSN, "IBV_QP_SQ_PSN"),
    (IBV_QP_MAX_DEST_RD_ATOMIC, "IBV_QP_MAX_DEST_RD_ATOMIC"),
    (IBV_QP_PATH_MIG_STATE, "IBV_QP_PATH_MIG_STATE"),
    (sys::IBV_QP_CAP, "IBV_QP_CAP"),
    (IBV_QP_DEST_QPN, "IBV_QP_DEST_QPN"),
    (sys::IBV_QP_RATE_LIMIT, "IBV_QP_RATE_LIMIT"),
];

fn names(mask: Mask) -> Vec<&'static str> {
    NAMES
        .iter()
        .filter(|(bit, _)| mask & bit != 0)
        .map(|&(_, name)| name)
        .collect()
}

/// What is wrong with a transition: `EINVAL` alone names no attribute (ibv_modify_qp(3)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias("EINVAL", "ibv_modify_qp"))]
pub struct Explanation {
    /// The queue pair's transport.
    pub transport: TransportKind,
    /// The current state.
    pub from: QpState,
    /// The requested state.
    pub to: QpState,
    /// Whether such a transition exists.
    pub possible: bool,
    /// Required attributes that were not given.
    pub missing: Vec<&'static str>,
    /// Attributes that were given and are not allowed.
    pub unwanted: Vec<&'static str>,
    /// Notes from the attributes' values or the errno.
    pub notes: Vec<String>,
}

impl Explanation {
    pub(crate) fn of(transport: TransportKind, from: QpState, to: QpState, given: Mask) -> Self {
        let given = given & !IBV_QP_STATE;
        let row = masks_of(transport, from, to);
        let AttrMasks { required, optional } = row.unwrap_or(AttrMasks {
            required: 0,
            optional: 0,
        });
        Self {
            transport,
            from,
            to,
            possible: row.is_some(),
            missing: names(required & !given),
            unwanted: names(given & !required & !optional),
            notes: Vec::new(),
        }
    }

    /// Whether attributes that RTS does not allow can be modified in SQD.
    fn allowed_when_drained(&self) -> bool {
        let drained = masks_of(self.transport, QpState::Sqd, QpState::Sqd).map_or(0, |row| row.optional);
        (self.from, self.to) == (QpState::Rts, QpState::Rts)
            && !self.unwanted.is_empty()
            && self.unwanted.iter().all(|name| names(drained).contains(name))
    }

    fn describe_impossible(&self) -> String {
        let Self {
            transport, from, to, ..
        } = self;
        let article = if *transport == TransportKind::Rc { "an" } else { "a" };
        if from == to {
            return format!("nothing of {article} {transport} queue pair can be changed in {from}");
        }
        let onward: Vec<String> = STATES
            .into_iter()
            .filter(|&next| next != *from && masks_of(*transport, *from, next).is_some())
            .map(|next| next.to_string())
            .collect();
        format!(
            "{article} {transport} queue pair cannot go from {from} to {to}, only to {}",
            onward.join(" or ")
        )
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.possible {
            return f.write_str(&self.describe_impossible());
        }
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            parts.push(format!(
                "{} to {} requires {}",
                self.from,
                self.to,
                self.missing.join(", ")
            ));
        }
        if !self.unwanted.is_empty() {
            parts.push(format!(
                "{} to {} does not allow {}",
                self.from,
                self.to,
                self.unwanted.join(", ")
            ));
        }
        if self.allowed_when_drained() {
            parts.push("SQD to SQD does: drain() first".to_owned());
        }
        parts.extend(self.notes.iter().cloned());
        if parts.is_empty() {
            parts.push("the attributes given are the right ones, so one of their values is not".to_owned());
        }
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
#[path = "attributes_tests.rs"]
mod tests;

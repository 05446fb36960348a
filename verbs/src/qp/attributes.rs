//! The states of a queue pair, and which attributes each transition requires and allows, as a table (IBTA vol 1, 11.2.5.2; ibv_modify_qp(3)); and with
//! it, what is wrong with a refused transition, in words.

use core::fmt;

use doorbell_verbs_sys as sys;
use sys::{
    IBV_QP_ACCESS_FLAGS, IBV_QP_ALT_PATH, IBV_QP_AV, IBV_QP_CUR_STATE, IBV_QP_DEST_QPN, IBV_QP_EN_SQD_ASYNC_NOTIFY,
    IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MIG_STATE, IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, ibv_qp_attr_mask as Mask,
};

/// The state of a queue pair (IBTA vol 1, 10.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpState {
    /// Just made: nothing can be posted.
    Reset,
    /// Receives can be posted, nothing is processed.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send: in use.
    Rts,
    /// The send queue is draining or drained.
    Sqd,
    /// The send queue is in error (never with RC).
    Sqe,
    /// In error: all requests complete as flushed.
    Err,
    /// A value the standard does not know.
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

/// A transition of an RC queue pair, with the attributes that it requires and those that it allows besides. `IBV_QP_STATE` goes without saying.
struct Transition {
    from: QpState,
    to: QpState,
    required: Mask,
    optional: Mask,
}

const fn row(from: QpState, to: QpState, required: Mask, optional: Mask) -> Transition {
    Transition {
        from,
        to,
        required,
        optional,
    }
}

/// The transitions of an RC queue pair, but for those from any state to RESET and ERR, which take nothing.
const RC: &[Transition] = &[
    row(
        QpState::Reset,
        QpState::Init,
        IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        0,
    ),
    row(
        QpState::Init,
        QpState::Init,
        0,
        IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    ),
    row(
        QpState::Init,
        QpState::Rtr,
        IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER,
        IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH,
    ),
    row(
        QpState::Rtr,
        QpState::Rts,
        IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
        IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE,
    ),
    row(QpState::Rts, QpState::Rts, 0, LIVE),
    row(QpState::Rts, QpState::Sqd, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
    row(QpState::Sqd, QpState::Rts, 0, LIVE),
    row(
        QpState::Sqd,
        QpState::Sqd,
        0,
        IBV_QP_PKEY_INDEX
            | IBV_QP_PORT
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
];

/// What a queue pair that is sending, or about to again, may have changed.
const LIVE: Mask =
    IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;

/// The attributes' names, as ibv_modify_qp(3) has them.
const NAMES: &[(Mask, &str)] = &[
    (IBV_QP_CUR_STATE, "IBV_QP_CUR_STATE"),
    (IBV_QP_EN_SQD_ASYNC_NOTIFY, "IBV_QP_EN_SQD_ASYNC_NOTIFY"),
    (IBV_QP_ACCESS_FLAGS, "IBV_QP_ACCESS_FLAGS"),
    (IBV_QP_PKEY_INDEX, "IBV_QP_PKEY_INDEX"),
    (IBV_QP_PORT, "IBV_QP_PORT"),
    (sys::IBV_QP_QKEY, "IBV_QP_QKEY"),
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

/// What is wrong with a refused transition, in words: an `EINVAL` says nothing by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The state the queue pair is in.
    pub from: QpState,
    /// The state asked for.
    pub to: QpState,
    /// Whether there is such a transition.
    pub possible: bool,
    /// Attributes that it requires and were not given.
    pub missing: Vec<&'static str>,
    /// Attributes that it does not allow and were given.
    pub unwanted: Vec<&'static str>,
    /// What the attributes' values, or the errno, say besides.
    pub notes: Vec<String>,
}

impl Explanation {
    /// Compares the attributes given for a transition of an RC queue pair with the table.
    pub(crate) fn of(from: QpState, to: QpState, given: Mask) -> Self {
        let given = given & !IBV_QP_STATE;
        let anywhere = matches!(to, QpState::Reset | QpState::Err).then_some((0, 0));
        let row = RC
            .iter()
            .find(|row| row.from == from && row.to == to)
            .map(|row| (row.required, row.optional));
        let (required, optional) = anywhere.or(row).unwrap_or((0, 0));
        Self {
            from,
            to,
            possible: anywhere.or(row).is_some(),
            missing: names(required & !given),
            unwanted: names(given & !required & !optional),
            notes: Vec::new(),
        }
    }

    /// Adds what the values themselves give away.
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.possible {
            return write!(f, "an RC queue pair cannot go from {} to {}", self.from, self.to);
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
        parts.extend(self.notes.iter().cloned());
        if parts.is_empty() {
            parts.push("the attributes given are the right ones, so one of their values is not".to_owned());
        }
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lists of required attributes for IBV_QPT_RC in ibv_modify_qp(3), less IBV_QP_STATE, written out by name.
    const MAN_PAGE: &[(QpState, QpState, &[&str])] = &[
        (
            QpState::Reset,
            QpState::Init,
            &["IBV_QP_PKEY_INDEX", "IBV_QP_PORT", "IBV_QP_ACCESS_FLAGS"],
        ),
        (
            QpState::Init,
            QpState::Rtr,
            &[
                "IBV_QP_AV",
                "IBV_QP_PATH_MTU",
                "IBV_QP_DEST_QPN",
                "IBV_QP_RQ_PSN",
                "IBV_QP_MAX_DEST_RD_ATOMIC",
                "IBV_QP_MIN_RNR_TIMER",
            ],
        ),
        (
            QpState::Rtr,
            QpState::Rts,
            &[
                "IBV_QP_SQ_PSN",
                "IBV_QP_MAX_QP_RD_ATOMIC",
                "IBV_QP_RETRY_CNT",
                "IBV_QP_RNR_RETRY",
                "IBV_QP_TIMEOUT",
            ],
        ),
    ];

    #[test]
    fn required_attributes_are_those_of_the_man_page() {
        for &(from, to, listed) in MAN_PAGE {
            let mut required = Explanation::of(from, to, IBV_QP_STATE).missing;
            let mut listed = listed.to_vec();
            required.sort_unstable();
            listed.sort_unstable();
            assert_eq!(required, listed, "{from} to {to}");
        }
        let others = RC
            .iter()
            .filter(|row| !MAN_PAGE.iter().any(|&(from, to, _)| (row.from, row.to) == (from, to)));
        for row in others {
            assert_eq!(
                row.required, 0,
                "{} to {} requires nothing by the man page",
                row.from, row.to
            );
        }
    }

    #[test]
    fn a_row_never_requires_what_it_calls_optional_and_names_all_it_has() {
        for row in RC {
            assert_eq!(row.required & row.optional, 0, "{} to {}", row.from, row.to);
            let named: Mask = NAMES.iter().map(|&(bit, _)| bit).sum();
            assert_eq!((row.required | row.optional) & !named, 0, "{} to {}", row.from, row.to);
        }
    }

    #[test]
    fn an_explanation_names_what_is_missing_and_what_is_too_much() {
        let given = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | sys::IBV_QP_QKEY;
        let text = Explanation::of(QpState::Reset, QpState::Init, given).to_string();
        assert_eq!(
            text,
            "RESET to INIT requires IBV_QP_PORT; RESET to INIT does not allow IBV_QP_QKEY"
        );
    }

    #[test]
    fn a_transition_that_there_is_not_is_called_so() {
        let text = Explanation::of(QpState::Reset, QpState::Rts, IBV_QP_STATE).to_string();
        assert_eq!(text, "an RC queue pair cannot go from RESET to RTS");
        assert!(Explanation::of(QpState::Rts, QpState::Err, IBV_QP_STATE).possible);
    }
}

//! The table of attributes, compared with the man page and with a snapshot.

use super::*;

const TRANSPORTS: [TransportKind; 3] = [TransportKind::Rc, TransportKind::Uc, TransportKind::Ud];

/// The lists of required attributes in ibv_modify_qp(3), less IBV_QP_STATE, written out by name.
const MAN_PAGE: &[(TransportKind, QpState, QpState, &[&str])] = &[
    (
        TransportKind::Rc,
        QpState::Reset,
        QpState::Init,
        &["IBV_QP_PKEY_INDEX", "IBV_QP_PORT", "IBV_QP_ACCESS_FLAGS"],
    ),
    (
        TransportKind::Rc,
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
        TransportKind::Rc,
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
    (
        TransportKind::Uc,
        QpState::Reset,
        QpState::Init,
        &["IBV_QP_PKEY_INDEX", "IBV_QP_PORT", "IBV_QP_ACCESS_FLAGS"],
    ),
    (
        TransportKind::Uc,
        QpState::Init,
        QpState::Rtr,
        &["IBV_QP_AV", "IBV_QP_PATH_MTU", "IBV_QP_DEST_QPN", "IBV_QP_RQ_PSN"],
    ),
    (TransportKind::Uc, QpState::Rtr, QpState::Rts, &["IBV_QP_SQ_PSN"]),
    (
        TransportKind::Ud,
        QpState::Reset,
        QpState::Init,
        &["IBV_QP_PKEY_INDEX", "IBV_QP_PORT", "IBV_QP_QKEY"],
    ),
    (TransportKind::Ud, QpState::Rtr, QpState::Rts, &["IBV_QP_SQ_PSN"]),
];

fn transitions() -> impl Iterator<Item = (TransportKind, QpState, QpState)> {
    TRANSPORTS.into_iter().flat_map(|transport| {
        STATES
            .into_iter()
            .flat_map(move |from| STATES.into_iter().map(move |to| (transport, from, to)))
    })
}

#[test]
fn required_attributes_are_those_of_the_man_page() {
    for (transport, from, to) in transitions() {
        let mut required = Explanation::of(transport, from, to, IBV_QP_STATE).missing;
        let listed = MAN_PAGE
            .iter()
            .find(|row| (row.0, row.1, row.2) == (transport, from, to));
        let mut listed = listed.map_or(Vec::new(), |row| row.3.to_vec());
        required.sort_unstable();
        listed.sort_unstable();
        assert_eq!(required, listed, "{transport} {from} to {to}");
    }
}

#[test]
fn a_transition_never_requires_what_it_calls_optional_and_names_all_it_has() {
    let named: Mask = NAMES.iter().map(|&(bit, _)| bit).sum();
    for (transport, from, to) in transitions() {
        let Some(AttrMasks { required, optional }) = masks_of(transport, from, to) else {
            continue;
        };
        assert_eq!(required & optional, 0, "{transport} {from} to {to}");
        assert_eq!((required | optional) & !named, 0, "{transport} {from} to {to}");
    }
}

fn line(transport: TransportKind, from: QpState, to: QpState) -> String {
    let text = match masks_of(transport, from, to) {
        None => "no such transition".to_owned(),
        Some(AttrMasks {
            required: 0,
            optional: 0,
        }) => "nothing else".to_owned(),
        Some(AttrMasks { required, optional }) => {
            let list = |mask| names(mask).join(" ").replace("IBV_QP_", "");
            let required = (required != 0).then(|| format!("requires {}", list(required)));
            let optional = (optional != 0).then(|| format!("allows {}", list(optional)));
            required.into_iter().chain(optional).collect::<Vec<_>>().join("; ")
        }
    };
    format!("{transport} {from} to {to}: {text}")
}

#[test]
fn the_whole_table_is_as_reviewed() {
    let table: Vec<String> = transitions()
        .map(|(transport, from, to)| line(transport, from, to))
        .collect();
    insta::assert_snapshot!("transitions", table.join("\n"));
}

#[test]
fn an_explanation_names_what_is_missing_and_what_is_too_much() {
    let given = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS | IBV_QP_QKEY;
    let text = |transport| Explanation::of(transport, QpState::Reset, QpState::Init, given).to_string();
    assert_eq!(
        text(TransportKind::Rc),
        "RESET to INIT requires IBV_QP_PORT; RESET to INIT does not allow IBV_QP_QKEY"
    );
    assert_eq!(
        text(TransportKind::Ud),
        "RESET to INIT requires IBV_QP_PORT; RESET to INIT does not allow IBV_QP_ACCESS_FLAGS"
    );
}

#[test]
fn what_can_be_changed_when_drained_is_said_to_be() {
    let text = |transport, given| Explanation::of(transport, QpState::Rts, QpState::Rts, given).to_string();
    assert_eq!(
        text(TransportKind::Rc, IBV_QP_TIMEOUT),
        "RTS to RTS does not allow IBV_QP_TIMEOUT; SQD to SQD does: drain() first"
    );
    assert_eq!(
        text(TransportKind::Uc, IBV_QP_TIMEOUT),
        "RTS to RTS does not allow IBV_QP_TIMEOUT"
    );
}

#[test]
fn a_transition_that_there_is_not_is_called_so() {
    let of = |transport, from, to| Explanation::of(transport, from, to, IBV_QP_STATE);
    assert_eq!(
        of(TransportKind::Rc, QpState::Reset, QpState::Rts).to_string(),
        "an RC queue pair cannot go from RESET to RTS, only to INIT"
    );
    assert_eq!(
        of(TransportKind::Ud, QpState::Err, QpState::Rts).to_string(),
        "a UD queue pair cannot go from ERR to RTS, only to RESET"
    );
    assert_eq!(
        of(TransportKind::Uc, QpState::Rtr, QpState::Rtr).to_string(),
        "nothing of a UC queue pair can be changed in RTR"
    );
    assert!(of(TransportKind::Rc, QpState::Rts, QpState::Err).possible);
    assert!(of(TransportKind::Uc, QpState::Sqe, QpState::Rts).possible);
    assert!(!of(TransportKind::Rc, QpState::Sqe, QpState::Rts).possible);
}

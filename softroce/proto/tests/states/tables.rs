//! The state transitions of each transport, copied from the standard independently of the engine.

use doorbell_roce_proto::qp::State;

pub(super) const STATES: [State; 7] = [
    State::Reset,
    State::Init,
    State::Rtr,
    State::Rts,
    State::Sqd,
    State::Sqe,
    State::Err,
];

/// IBTA table 91: (from, to, required, optional), bits of `enum ibv_qp_attr_mask`.
pub(super) type Row = (State, State, u32, u32);

pub(super) const RC: [Row; 19] = [
    (State::Reset, State::Reset, 0, 0),
    (State::Reset, State::Init, 0x38, 0),
    (State::Init, State::Reset, 0, 0),
    (State::Init, State::Init, 0, 0x38),
    (State::Init, State::Rtr, 0x12_9180, 0x18),
    (State::Init, State::Err, 0, 0),
    (State::Rtr, State::Reset, 0, 0),
    (State::Rtr, State::Rts, 0x1_2e00, 0x8008),
    (State::Rtr, State::Err, 0, 0),
    (State::Rts, State::Reset, 0, 0),
    (State::Rts, State::Rts, 0, 0x8008),
    (State::Rts, State::Sqd, 0, 0x4),
    (State::Rts, State::Err, 0, 0),
    (State::Sqd, State::Reset, 0, 0),
    (State::Sqd, State::Rts, 0, 0x8008),
    (State::Sqd, State::Sqd, 0, 0x2_aeb8),
    (State::Sqd, State::Err, 0, 0),
    (State::Err, State::Reset, 0, 0),
    (State::Err, State::Err, 0, 0),
];

pub(super) const UC: [Row; 22] = [
    (State::Reset, State::Reset, 0, 0),
    (State::Reset, State::Init, 0x38, 0),
    (State::Init, State::Reset, 0, 0),
    (State::Init, State::Init, 0, 0x38),
    (State::Init, State::Rtr, 0x10_1180, 0x18),
    (State::Init, State::Err, 0, 0),
    (State::Rtr, State::Reset, 0, 0),
    (State::Rtr, State::Rts, 0x1_0000, 0x8),
    (State::Rtr, State::Err, 0, 0),
    (State::Rts, State::Reset, 0, 0),
    (State::Rts, State::Rts, 0, 0x8),
    (State::Rts, State::Sqd, 0, 0x4),
    (State::Rts, State::Err, 0, 0),
    (State::Sqd, State::Reset, 0, 0),
    (State::Sqd, State::Rts, 0, 0x8),
    (State::Sqd, State::Sqd, 0, 0x98),
    (State::Sqd, State::Err, 0, 0),
    (State::Sqe, State::Reset, 0, 0),
    (State::Sqe, State::Rts, 0, 0x8),
    (State::Sqe, State::Err, 0, 0),
    (State::Err, State::Reset, 0, 0),
    (State::Err, State::Err, 0, 0),
];

pub(super) const UD: [Row; 22] = [
    (State::Reset, State::Reset, 0, 0),
    (State::Reset, State::Init, 0x70, 0),
    (State::Init, State::Reset, 0, 0),
    (State::Init, State::Init, 0, 0x70),
    (State::Init, State::Rtr, 0, 0x50),
    (State::Init, State::Err, 0, 0),
    (State::Rtr, State::Reset, 0, 0),
    (State::Rtr, State::Rts, 0x1_0000, 0x40),
    (State::Rtr, State::Err, 0, 0),
    (State::Rts, State::Reset, 0, 0),
    (State::Rts, State::Rts, 0, 0x40),
    (State::Rts, State::Sqd, 0, 0x4),
    (State::Rts, State::Err, 0, 0),
    (State::Sqd, State::Reset, 0, 0),
    (State::Sqd, State::Rts, 0, 0x40),
    (State::Sqd, State::Sqd, 0, 0x50),
    (State::Sqd, State::Err, 0, 0),
    (State::Sqe, State::Reset, 0, 0),
    (State::Sqe, State::Rts, 0, 0x40),
    (State::Sqe, State::Err, 0, 0),
    (State::Err, State::Reset, 0, 0),
    (State::Err, State::Err, 0, 0),
];

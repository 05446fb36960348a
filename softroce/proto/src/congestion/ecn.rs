//! The ECN field: the low two bits of IPv4 TOS and IPv6 traffic class (RFC 3168, 5).

const MASK: u8 = 0b11;
const ECT_0: u8 = 0b10;
const CE: u8 = 0b11;

/// The traffic class of an ECN-capable packet, with this DSCP: ECT(0).
pub(crate) const fn capable(traffic_class: u8) -> u8 {
    traffic_class & !MASK | ECT_0
}

/// The traffic class of a packet that is not ECN-capable, with this DSCP.
pub(crate) const fn not_capable(traffic_class: u8) -> u8 {
    traffic_class & !MASK
}

/// What a congested switch makes of a packet: CE if it is ECN-capable.
pub const fn mark(traffic_class: u8) -> u8 {
    match traffic_class & MASK {
        0 => traffic_class,
        _ => traffic_class | CE,
    }
}

/// Whether a switch has marked it: Congestion Experienced.
pub const fn is_marked(traffic_class: u8) -> bool {
    traffic_class & MASK == CE
}

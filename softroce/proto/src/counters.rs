//! What an endpoint counted: the only trace that a datagram leaves which is refused.

/// Numbers since the endpoint was made. They only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Datagrams taken from the wire.
    pub rx_packets: u64,
    /// Packets written for the wire.
    pub tx_packets: u64,
    /// Refused: bytes that are no packet, or one of another transport than its queue pair's.
    pub malformed: u64,
    /// Refused: no such queue pair, or one that does not receive.
    pub no_qp: u64,
    /// Refused: the queue pair is connected to another address.
    pub wrong_peer: u64,
    /// Refused: a datagram with another queue key than its queue pair's.
    pub qkey_violations: u64,
    /// Messages over UC and UD given up without a word: incomplete, too long, without a receive or a right, or (at the sender) longer than a datagram.
    pub dropped_messages: u64,
    /// Refused: the ICRC does not match.
    pub icrc_errors: u64,
    /// Requests and responses seen before, or too late to matter.
    pub duplicates: u64,
    /// Requests and responses past the next one expected.
    pub out_of_sequence: u64,
    /// Responses that fit no request: an acknowledgement of what was never sent, a READ response to a SEND.
    pub unexpected_responses: u64,
    /// NAKs sent because a request was missing.
    pub sequence_naks_sent: u64,
    /// NAKs sent because no receive was posted.
    pub rnr_naks_sent: u64,
    /// NAKs sent because a request was malformed.
    pub invalid_request_naks_sent: u64,
    /// NAKs sent because a request was refused access.
    pub remote_access_naks_sent: u64,
    /// NAKs sent because a request could not be carried out.
    pub remote_operational_naks_sent: u64,
    /// NAKs received because a request was missing.
    pub sequence_naks_received: u64,
    /// NAKs received because no receive was posted.
    pub rnr_naks_received: u64,
    /// NAKs received that end the connection.
    pub fatal_naks_received: u64,
    /// Requests sent again.
    pub retransmits: u64,
    /// Times that the local ACK timeout ran out.
    pub timeouts: u64,
}

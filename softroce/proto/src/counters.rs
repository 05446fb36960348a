//! Counters of an endpoint: the only trace of refused datagrams.

/// Counts since the endpoint was created; they never decrease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
// fields: one per counted cause
pub struct Counters {
    /// Packets received.
    pub rx_packets: u64,
    /// Packets written.
    pub tx_packets: u64,
    /// Their bytes, payload by reference included; and of direct requests those written.
    pub tx_bytes: u64,
    /// Bytes of the packets received; and of direct requests those read.
    pub rx_bytes: u64,
    /// Refused: not a valid packet, or of another transport than its queue pair.
    pub malformed: u64,
    /// Refused: no such queue pair, or not in a receiving state.
    pub no_qp: u64,
    /// Refused: from another address than the connected peer.
    pub wrong_peer: u64,
    /// Refused: wrong Q_Key (UD).
    pub qkey_violations: u64,
    /// UC and UD messages dropped: incomplete, too long (also at the sender), no receive or right.
    pub dropped_messages: u64,
    /// Refused: wrong ICRC.
    pub icrc_errors: u64,
    /// Duplicate requests and responses, or too late to matter.
    pub duplicates: u64,
    /// Requests and responses beyond the next expected PSN.
    pub out_of_sequence: u64,
    /// Responses that match no request: an ACK of a packet never sent, a READ response to a SEND.
    pub unexpected_responses: u64,
    /// PSN sequence error NAKs sent.
    pub sequence_naks_sent: u64,
    /// RNR NAKs sent.
    pub rnr_naks_sent: u64,
    /// Invalid request NAKs sent.
    pub invalid_request_naks_sent: u64,
    /// Remote access error NAKs sent.
    pub remote_access_naks_sent: u64,
    /// Remote operational error NAKs sent.
    pub remote_operational_naks_sent: u64,
    /// Selective ACKs sent.
    pub selective_acks_sent: u64,
    /// Selective ACKs received.
    pub selective_acks_received: u64,
    /// PSN sequence error NAKs received.
    pub sequence_naks_received: u64,
    /// RNR NAKs received.
    pub rnr_naks_received: u64,
    /// NAKs received that end the connection.
    pub fatal_naks_received: u64,
    /// CNPs sent (`np_cnp_sent`).
    pub cnps_sent: u64,
    /// Packets received with Congestion Experienced (`np_ecn_marked_roce_packets`).
    pub marked_packets: u64,
    /// CNPs received that a controller has handled (`rp_cnp_handled`).
    pub cnps_handled: u64,
    /// CNPs received to no effect: no controller, or too soon after another (`rp_cnp_ignored`).
    pub cnps_ignored: u64,
    /// Retransmitted request packets.
    pub retransmits: u64,
    /// Tail-loss probes: each of one or two of the retransmitted packets.
    pub tail_loss_probes: u64,
    /// Expired local ACK timeouts.
    pub timeouts: u64,
    /// Requests carried out in the peer's memory, without a packet.
    pub direct_requests: u64,
}

impl Counters {
    #[inline]
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.tx_packets += 1;
        self.tx_bytes += bytes as u64;
    }

    #[inline]
    pub(crate) fn received(&mut self, bytes: usize) {
        self.rx_packets += 1;
        self.rx_bytes += bytes as u64;
    }
}

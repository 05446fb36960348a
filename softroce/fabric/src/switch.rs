//! A switch: one buffer that all ports share, with dynamic thresholds (Choudhury and Hahne, 1998),
//! RED-like marking by the length of the egress queue, PFC by what each ingress has in the buffer.

use crate::packet::{Class, Ecn, Packet};
use crate::port::Port;

/// ECN marking: never up to `k_min`, with a probability that grows to `p_max` at `k_max`, always
/// beyond.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Red {
    /// Bytes.
    pub k_min: u64,
    /// Bytes, not less than `k_min`.
    pub k_max: u64,
    /// Probability.
    pub p_max: f64,
}

impl Red {
    /// As DCQCN's authors recommend (SIGCOMM 2015, section 5).
    pub const DCQCN: Self = Self {
        k_min: 5_000,
        k_max: 200_000,
        p_max: 0.01,
    };

    /// The probability of a mark for a packet that finds this queue.
    pub fn probability(&self, queue: u64) -> f64 {
        if queue <= self.k_min {
            0.0
        } else if queue <= self.k_max {
            self.p_max * (queue - self.k_min) as f64 / (self.k_max - self.k_min) as f64
        } else {
            1.0
        }
    }

    /// The queue that is marked with this probability; `None` beyond `p_max`.
    pub fn queue(&self, probability: f64) -> Option<f64> {
        (probability <= self.p_max)
            .then(|| self.k_min as f64 + probability / self.p_max * (self.k_max - self.k_min) as f64)
    }
}

/// PFC: a port whose packets occupy more than the threshold has its peer paused.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Pfc {
    /// The threshold as a fraction of the free buffer, without the headroom.
    pub alpha: f64,
    /// Buffer for what arrives of each port after its PAUSE was sent, in bytes.
    pub headroom: u64,
    /// The peer resumes when the occupancy is this much below the threshold, in bytes.
    pub hysteresis: u64,
}

impl Default for Pfc {
    /// The dynamic threshold and headroom of DCQCN's paper (section 4), with one lossless class.
    fn default() -> Self {
        Self {
            alpha: 1.0,
            headroom: 22_400,
            hysteresis: 2 * 1086,
        }
    }
}

/// Configuration of a switch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SwitchConfig {
    /// Buffer in bytes.
    pub buffer: u64,
    /// Without PFC: a queue may have this multiple of the free buffer; what exceeds it is dropped.
    pub alpha: f64,
    /// Marking.
    pub red: Option<Red>,
    /// PFC.
    pub pfc: Option<Pfc>,
    /// The probability with which a packet of data is lost without congestion.
    pub loss: f64,
}

impl Default for SwitchConfig {
    /// 12 MB, as the switches of DCQCN's paper have.
    fn default() -> Self {
        Self {
            buffer: 12_000_000,
            alpha: 1.0,
            red: Some(Red::DCQCN),
            pfc: None,
            loss: 0.0,
        }
    }
}

/// A switch.
#[derive(Debug)]
pub struct Switch {
    config: SwitchConfig,
    /// Its ports.
    pub ports: Vec<Port>,
    ingress: Vec<Ingress>,
    used: u64,
}

/// What the packets that a port received occupy.
#[derive(Clone, Copy, Debug, Default)]
struct Ingress {
    bytes: u64,
    paused: bool,
}

/// A PFC frame to the peer of a port: whether to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PauseFrame {
    pub(crate) port: usize,
    pub(crate) stop: bool,
}

impl Switch {
    pub(crate) fn new(config: SwitchConfig) -> Self {
        Self {
            config,
            ports: Vec::new(),
            ingress: Vec::new(),
            used: 0,
        }
    }

    pub(crate) fn add_port(&mut self, port: Port) {
        self.ports.push(port);
        self.ingress.push(Ingress::default());
    }

    /// Bytes in the buffer.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Queues a packet that arrived at `packet.ingress`, or drops it.
    pub(crate) fn admit(&mut self, egress: usize, packet: Packet, draw: f64) -> Option<PauseFrame> {
        let (len, ingress) = (packet.bytes(), packet.ingress);
        let free = self.config.buffer.saturating_sub(self.used);
        let port = &mut self.ports[egress];
        let limit = if self.config.pfc.is_some() || packet.class == Class::Control {
            u64::MAX
        } else {
            (self.config.alpha * free as f64) as u64
        };
        let lost = packet.class == Class::Data && draw < self.config.loss;
        if lost || len > free || port.queued() + len > limit {
            port.stats.dropped += 1;
            return None;
        }
        port.push(packet);
        self.used += len;
        self.ingress[ingress].bytes += len;
        self.pause_frame(ingress)
    }

    /// The next packet of a port, and the frame that its departure causes. It is marked by the
    /// queue that it leaves, so that the mark is as recent as can be.
    pub(crate) fn depart(&mut self, egress: usize, draw: f64) -> Option<(Packet, Option<PauseFrame>)> {
        let port = &mut self.ports[egress];
        let queue = port.queued();
        let mut packet = port.pop()?;
        if packet.ecn == Ecn::Capable {
            port.stats.capable += 1;
            if self.config.red.is_some_and(|red| draw < red.probability(queue)) {
                packet.ecn = Ecn::Marked;
                port.stats.marked += 1;
            }
        }
        self.used -= packet.bytes();
        let ingress = packet.ingress;
        self.ingress[ingress].bytes -= packet.bytes();
        let frame = self.pause_frame(ingress);
        Some((packet, frame))
    }

    /// The frame to the peer of a port whose occupancy or threshold has changed.
    fn pause_frame(&mut self, port: usize) -> Option<PauseFrame> {
        let pfc = self.config.pfc?;
        let reserved = pfc.headroom * self.ports.len() as u64;
        let free = self.config.buffer.saturating_sub(reserved + self.used);
        let threshold = (pfc.alpha * free as f64) as u64;
        let ingress = &mut self.ingress[port];
        let stop = if ingress.paused {
            ingress.bytes + pfc.hysteresis > threshold && ingress.bytes > 0
        } else {
            ingress.bytes > threshold
        };
        (stop != ingress.paused).then(|| {
            ingress.paused = stop;
            PauseFrame { port, stop }
        })
    }
}

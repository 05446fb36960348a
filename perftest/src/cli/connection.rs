//! The arguments of the connection between the ends of a test, and of the userspace device.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::units::{parse_bytes, parse_duration, parse_fraction, parse_seconds};

/// The transport of the queue pairs (transport service of IBTA vol 1, 9.2).
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Transport {
    /// Reliable connection
    #[default]
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagram
    Ud,
}

/// The limits of a client's test at a server.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Connection")]
pub(crate) struct LimitArgs {
    /// The most memory that a client's test may take here
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "1G", requires = "server")]
    pub(crate) client_memory: u64,
    /// The longest that a client's test may take here, with all its sizes and repeats
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "3600", requires = "server")]
    pub(crate) client_time: f64,
    /// The most queue pairs that a client's test may have here
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), default_value_t = 128, requires = "server")]
    pub(crate) client_qps: u32,
}

/// The control connection, and the attributes of the queue pairs.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Connection")]
pub(crate) struct ConnectionArgs {
    /// Device to use, from `doorbell devices` [default: soft0 when both ends run here, else the
    /// first active one]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// TCP port of the control connection
    #[arg(long, value_name = "PORT", default_value_t = 18515)]
    pub(crate) port: u16,
    /// Transport of the queue pairs: reliable connection, unreliable connection (write and send),
    /// or unreliable datagram (send, up to the MTU)
    #[arg(long, value_enum, value_name = "TRANSPORT", default_value_t = Transport::Rc)]
    pub(crate) transport: Transport,
    /// Have the connection manager (rdma_cm) connect the queue pairs of rc, or find those of ud
    #[arg(long)]
    pub(crate) rdma_cm: bool,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: the port's]
    #[arg(long, value_name = "BYTES", value_parser = parse_mtu)]
    pub(crate) mtu: Option<u32>,
    /// DSCP of the packets of both ends: the upper six bits of their traffic class (of a
    /// userspace device those over UDP)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..64))]
    pub(crate) dscp: u8,
    /// Index in the port's GID table [default: the first RoCEv2 entry]
    #[arg(long, value_name = "INDEX", value_parser = clap::value_parser!(u8))]
    pub(crate) gid_index: Option<u8>,
    /// Local ACK timeout code: 4.096 us * 2^CODE, 0 for never
    #[arg(long, value_name = "CODE", default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..=31))]
    pub(crate) timeout: u8,
    /// Retry count of the queue pairs
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u8).range(0..=7))]
    pub(crate) retry: u8,
}

/// The userspace device: its address, and fault injection.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Userspace device")]
pub(crate) struct SoftArgs {
    /// Address it binds to; each one after a comma is another device's, or with both ends here the
    /// server's [default: 127.0.0.1]
    #[arg(long, value_name = "IP[,IP]", value_delimiter = ',', num_args = 1)]
    pub(crate) address: Vec<IpAddr>,
    /// UDP port; both ends need the same
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) udp_port: Option<u16>,
    /// Link between processes of one host: udp or local only [default: local where possible]
    #[arg(long, value_name = "LINK")]
    pub(crate) link: Option<String>,
    /// Faults of the packets sent, as drop=0.01,delay=1ms; for one device, as
    /// 'seed=7;soft1:drop=0.01'
    #[arg(long, value_name = "FAULTS", conflicts_with_all = ["drop", "duplicate", "reorder", "corrupt", "mark", "delay"])]
    pub(crate) faults: Option<String>,
    /// Fraction of the packets sent that are dropped
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) drop: Option<f64>,
    /// Fraction of the packets sent that are duplicated
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) duplicate: Option<f64>,
    /// Fraction of the packets sent that are reordered
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) reorder: Option<f64>,
    /// Fraction of the packets sent in which a bit flips
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) corrupt: Option<f64>,
    /// Fraction of the ECN-capable packets sent that are marked, Congestion Experienced
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) mark: Option<f64>,
    /// Delay of the packets sent, as 100us
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) delay: Option<Duration>,
    /// Congestion control over UDP: none, dcqcn or delay, with options as dcqcn,line=25Gb,cnp=50us
    #[arg(long, value_name = "ALGORITHM")]
    pub(crate) congestion: Option<String>,
    /// Capture the packets of this end, for wireshark
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}

fn parse_mtu(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(mtu @ (256 | 512 | 1024 | 2048 | 4096)) => Ok(mtu),
        _ => Err(format!("'{text}' is not a path MTU: give 256, 512, 1024, 2048 or 4096")),
    }
}

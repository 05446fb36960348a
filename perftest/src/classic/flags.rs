//! The options of the classic tools as data: which tools have each, what it does, and how
//! Doorbell's differs.
//! The parser ([`super::getopt`]), `--help` and the table in docs/book/src/classic.md are generated
//! from [`FLAGS`]. Unsupported options of the C tools are listed with the reason for the error
//! message.

use super::tool::{Kind, Tool, Verb};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ToolSet {
    All,
    Bw,
    Lat,
    NotAtomic,
    NotWrite,
    /// READ and atomics.
    Fetching,
    /// WRITE and SEND.
    Carrying,
    Send,
    Atomic,
    /// None: the C tools accept it, but it is for the raw Ethernet tools.
    NoTool,
}

impl ToolSet {
    pub(crate) fn has(self, tool: Tool) -> bool {
        match self {
            ToolSet::All => true,
            ToolSet::Bw => tool.kind == Kind::Bw,
            ToolSet::Lat => tool.kind == Kind::Lat,
            ToolSet::NotAtomic => tool.verb != Verb::Atomic,
            ToolSet::NotWrite => tool.verb != Verb::Write,
            ToolSet::Fetching => matches!(tool.verb, Verb::Read | Verb::Atomic),
            ToolSet::Carrying => matches!(tool.verb, Verb::Write | Verb::Send),
            ToolSet::Send => tool.verb == Verb::Send,
            ToolSet::Atomic => tool.verb == Verb::Atomic,
            ToolSet::NoTool => false,
        }
    }
}

/// Whether an option is supported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Support {
    /// Yes, with the meaning of the C tools.
    Full,
    /// Yes, with this difference.
    Differs(&'static str),
    /// No, for this reason.
    Refused(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flag {
    pub(crate) short: Option<char>,
    /// `--size`, without the dashes; identifies the option in the code.
    pub(crate) long: &'static str,
    pub(crate) alias: Option<&'static str>,
    /// The name of its value in the help; none where it takes none.
    pub(crate) value: Option<&'static str>,
    pub(crate) tools: ToolSet,
    pub(crate) what: &'static str,
    pub(crate) support: Support,
}

impl Flag {
    const fn alias(mut self, name: &'static str) -> Flag {
        self.alias = Some(name);
        self
    }

    const fn differs(mut self, how: &'static str) -> Flag {
        self.support = Support::Differs(how);
        self
    }

    const fn refused(mut self, why: &'static str) -> Flag {
        self.support = Support::Refused(why);
        self
    }

    pub(crate) fn name(&self) -> String {
        match self.short {
            Some(short) => format!("-{short}"),
            None => format!("--{}", self.long),
        }
    }
}

/// A supported option with a value.
const fn valued(
    short: Option<char>,
    long: &'static str,
    value: &'static str,
    tools: ToolSet,
    what: &'static str,
) -> Flag {
    Flag {
        short,
        long,
        alias: None,
        value: Some(value),
        tools,
        what,
        support: Support::Full,
    }
}

/// A supported option without a value.
const fn switch(short: Option<char>, long: &'static str, tools: ToolSet, what: &'static str) -> Flag {
    Flag {
        short,
        long,
        alias: None,
        value: None,
        tools,
        what,
        support: Support::Full,
    }
}

const DC: &str = "dynamically connected queue pairs are an extension of one vendor's library, which is not used here";
const AES: &str = "encrypted memory regions are an extension of one vendor's library, which is not used here";
const DUAL: &str = "one port is measured at a time: run one test on each";
const MMAP: &str = "memory of a file is not mapped here: it could shrink under the device";
const SERVICE: &str = "connections get the default type of service: leave it out on both";
const GPU: &str = "for WRITEs, READs and SENDs; refused where the processor would have to read that memory: ib_write_lat, atomics and -I. Each message in flight has memory of its own; without --use_cuda_dmabuf the best path that works is taken, as doorbell gpu lists them";
const SOFT: &str =
    "a userspace device's packets have it over UDP; the link between processes of one host has no IP packets";
const RAW: &str = "raw Ethernet is for raw_ethernet_bw and its like";

/// All options, in the order of the help.
pub(crate) const FLAGS: &[Flag] = &[
    switch(Some('a'), "all", ToolSet::NotAtomic, "measure every power of two from 2 B to 8 MiB (of datagrams: to the MTU)"),
    valued(
        Some('A'),
        "atomic_type",
        "TYPE",
        ToolSet::Atomic,
        "FETCH_AND_ADD (default) or CMP_AND_SWAP",
    ),
    switch(Some('b'), "bidirectional", ToolSet::Bw, "send both ways at once"),
    valued(Some('c'), "connection", "TYPE", ToolSet::All, "how queue pairs are connected: RC (default), UC (write, send), UD (send)")
        .differs("XRC, DC and SRD are refused: the first is not set up here, the others are extensions of one vendor's library each"),
    valued(None, "log_dci_streams", "COUNT", ToolSet::All, "streams of a DC initiator").refused(DC),
    valued(None, "log_active_dci_streams", "COUNT", ToolSet::All, "streams in use of a DC initiator").refused(DC),
    switch(None, "aes_xts", ToolSet::All, "encrypt what is sent").refused(AES),
    switch(None, "encrypt_on_tx", ToolSet::All, "encrypt when sending instead of decrypting").refused(AES),
    switch(None, "sig_before", ToolSet::All, "sign before encrypting").refused(AES),
    valued(None, "aes_block_size", "BYTES", ToolSet::All, "block size of the encryption").refused(AES),
    valued(None, "data_enc_keys_number", "COUNT", ToolSet::All, "keys of the encryption").refused(AES),
    valued(None, "kek_path", "FILE", ToolSet::All, "key that encrypts the keys").refused(AES),
    valued(None, "credentials_path", "FILE", ToolSet::All, "credentials of the encryption").refused(AES),
    valued(None, "data_enc_key_app_path", "FILE", ToolSet::All, "program that makes keys").refused(AES),
    switch(Some('C'), "report-cycles", ToolSet::Lat, "print times in CPU cycles instead of microseconds")
        .differs("cycles of the clock whose rate was checked against the system's clock; refused where there is none"),
    valued(Some('d'), "ib-dev", "DEVICE", ToolSet::All, "use this RDMA device")
        .differs("without it the first device whose port is up; where there is none, the userspace device soft0"),
    valued(Some('D'), "duration", "SECONDS", ToolSet::All, "measure so long instead of so many messages")
        .differs("a peak or percentiles are printed where the C tool prints 0 or nothing"),
    switch(Some('e'), "events", ToolSet::NotWrite, "sleep until a completion comes instead of polling"),
    valued(Some('X'), "vector", "VECTOR", ToolSet::NotWrite, "completion vector of -e (default 0)").differs("goes with -e; a vector that the device does not have is refused"),
    valued(Some('f'), "margin", "SECONDS", ToolSet::All, "with -D: time at the start and at the end that does not count (default: a quarter of -D, in whole seconds)"),
    switch(Some('F'), "CPU-freq", ToolSet::All, "no warning when the CPU does not run at full speed"),
    switch(Some('g'), "mcg", ToolSet::Send, "send to a multicast group (implies -c UD)")
        .differs("on InfiniBand it is refused: no group is joined at the subnet administrator"),
    switch(Some('h'), "help", ToolSet::All, "print this and exit").differs("exits 0 instead of 1, and prints to stdout"),
    switch(Some('H'), "report-histogram", ToolSet::Lat, "print every sample, from the shortest to the longest")
        .alias("report-histogrm")
        .differs("all of them: the C tool leaves the last three out. Its table misspells the name; both spellings are taken"),
    valued(Some('i'), "ib-port", "PORT", ToolSet::All, "use this port of the device (default 1)"),
    valued(Some('I'), "inline_size", "BYTES", ToolSet::Carrying, "messages of up to so many bytes are sent inline (at most 912)")
        .differs("honoured where the queue pair has room for it; the C tool turns it off for devices it does not know"),
    valued(Some('l'), "post_list", "COUNT", ToolSet::Bw, "post so many requests together"),
    valued(None, "recv_post_list", "COUNT", ToolSet::Bw, "post so many receives together"),
    valued(Some('L'), "hop_limit", "HOPS", ToolSet::All, "hop limit of packets, 0 to 255 (default 64)").differs(SOFT),
    valued(Some('m'), "mtu", "BYTES", ToolSet::All, "path MTU: 256, 512, 1024, 2048 or 4096 (default: the port's, or the peer's where that is less)")
        .differs("anything else is refused; the C tool continues with the port's"),
    valued(Some('M'), "MGID", "GID", ToolSet::Send, "the multicast group of -g: sixteen bytes, separated by colons (default: 255:1:0:0:0:2:201:133:0:0:0:0:0:0:0:0, and the next one of the client)"),
    valued(Some('n'), "iters", "COUNT", ToolSet::All, "messages on each queue pair, at least 5 (default 1000, of ib_write_bw 5000)"),
    switch(Some('N'), "noPeak", ToolSet::Bw, "no peak bandwidth"),
    switch(Some('O'), "dualport", ToolSet::Bw, "measure two ports at once").refused(DUAL),
    valued(Some('o'), "outs", "COUNT", ToolSet::Fetching, "READs or atomics in flight on each queue pair (default: as many as the device has)"),
    valued(Some('p'), "port", "PORT", ToolSet::All, "TCP port (default 18515)"),
    valued(Some('q'), "qp", "COUNT", ToolSet::Bw, "queue pairs (default 1)"),
    valued(Some('Q'), "cq-mod", "COUNT", ToolSet::Bw, "a completion for so many requests (default 100; 1 for messages of more than 8 KiB)"),
    switch(Some('R'), "rdma_cm", ToolSet::All, "let the connection manager connect the queue pairs")
        .differs("the device is that of -d, or the default one: it must be the one that leads to the other end"),
    valued(Some('r'), "rx-depth", "COUNT", ToolSet::Send, "receives posted on each queue pair, or in the shared receive queue (default 512; of UD as many as -n)")
        .differs("in ib_send_lat there are eight in any case, as no more than one message is in flight"),
    valued(Some('s'), "size", "BYTES", ToolSet::NotAtomic, "message size (default 65536, of latency tests 2)")
        .differs("K, M and G in either case multiply by powers of 1024, and anything else is refused; the C tool supports K and M and ignores any other suffix, so that its 1G is one byte"),
    valued(Some('S'), "sl", "LEVEL", ToolSet::All, "service level, 0 to 15 (default 0)"),
    valued(Some('t'), "tx-depth", "COUNT", ToolSet::Bw, "requests in flight on each queue pair (default 128)"),
    valued(Some('T'), "tos", "VALUE", ToolSet::All, "type of service of connections of the connection manager (only with -R)")
        .refused(SERVICE),
    valued(Some('u'), "qp-timeout", "CODE", ToolSet::All, "local ACK timeout: 4.096 us times 2 to this power (default 14)"),
    switch(Some('U'), "report-unsorted", ToolSet::Lat, "print every sample as they came (implies -H)"),
    switch(Some('V'), "version", ToolSet::All, "print the version and exit").differs("exits 0 instead of 1; prints the version of the C tools that it is compatible with, and its own"),
    valued(Some('w'), "limit_bw", "VALUE", ToolSet::Bw, "fail when the average bandwidth is below this, in the unit that is printed")
        .differs("each size of -a is checked, not the last alone"),
    valued(Some('W'), "report-counters", "LIST", ToolSet::All, "print what counters of the port gained")
        .refused("read them before and after under /sys/class/infiniband/DEVICE/ports/PORT"),
    valued(Some('x'), "gid-index", "INDEX", ToolSet::All, "use this GID of the port"),
    valued(Some('y'), "limit_msgrate", "MPPS", ToolSet::Bw, "fail when the message rate is below this, in millions per second")
        .differs("works without -w too"),
    switch(Some('z'), "com_rdma_cm", ToolSet::All, "exchange addresses over a queue pair of the connection manager instead of TCP").alias("comm_rdma_cm"),
    switch(None, "out_json", ToolSet::All, "write a report as JSON").differs("it parses, and keeps every size of -a"),
    valued(None, "out_json_file", "FILE", ToolSet::All, "its name (default perftest_out.json in the working directory)")
        .differs("implies --out_json; the C tool requires both"),
    switch(None, "cpu_util", ToolSet::All, "print the CPU use of this end (only with -D)")
        .differs("of this process, user and system time; the C tool's counts the idle time of the whole machine, and prints 0 with --run_infinitely. Without -D it is refused instead of left out"),
    valued(None, "dlid", "LID", ToolSet::All, "destination LID instead of the peer's").refused("the peer's own LID is used"),
    switch(None, "dont_xchg_versions", ToolSet::All, "exchange neither version nor MTU")
        .refused("the C tools end with an error with it too: the version decides what else is exchanged"),
    valued(None, "force-link", "TYPE", ToolSet::All, "IB or Ethernet")
        .differs("the test is refused on a port of another type; the C tool continues"),
    switch(None, "ipv6", ToolSet::All, "choose a GID of IPv6 instead of IPv4"),
    valued(None, "source_ip", "ADDRESS", ToolSet::All, "address that this end connects from or listens on").alias("bind_source_ip"),
    valued(None, "flow_label", "LABEL", ToolSet::All, "flow label of packets, 0 to 1048575 (default 0): adapters derive the UDP source port from it")
        .differs("Debian's build of the C tools has no such option. A userspace device keeps the label, and its packets do not depend on it: they come from the one UDP socket that it has"),
    valued(None, "inline_recv", "BYTES", ToolSet::NotWrite, "receive short messages inline").refused("receiving inline is an extension of one vendor's library, which is not used here"),
    valued(None, "latency_gap", "US", ToolSet::Lat, "wait so many microseconds before each message"),
    valued(None, "mmap", "FILE", ToolSet::All, "messages lie in this file").refused(MMAP),
    valued(None, "mmap-offset", "BYTES", ToolSet::All, "where in the file of --mmap").refused(MMAP),
    switch(None, "mr_per_qp", ToolSet::Bw, "a memory region for each queue pair"),
    switch(None, "odp", ToolSet::All, "let the device fetch pages on demand").refused("memory is registered before the clock starts, so that paging is in no figure"),
    valued(None, "output", "FIGURE", ToolSet::All, "print one value and nothing else: bandwidth or message_rate; of latency tests latency (the average)"),
    switch(None, "use_old_post_send", ToolSet::All, "post by ibv_post_send").differs("changes nothing: requests go that way anyway"),
    switch(None, "perform_warm_up", ToolSet::All, "send a warm-up round before measuring")
        .differs("the end that READs, WRITEs or does atomics; of SENDs and in ib_write_lat it changes nothing, as the other end counts messages"),
    valued(None, "pkey_index", "INDEX", ToolSet::All, "index of the partition key (default 0)"),
    switch(None, "report-both", ToolSet::Bw, "with -b: print both directions by themselves as well")
        .differs("without -b it is refused instead of ignored"),
    switch(None, "report_gbits", ToolSet::Bw, "print bandwidth in Gb/s (10^9 bits) instead of MiB/s (2^20 bytes; the columns are headed MB/sec)"),
    switch(None, "report-per-port", ToolSet::Bw, "print both ports of -O by themselves").refused("it is for -O: one port is measured at a time"),
    switch(None, "reversed", ToolSet::Bw, "the server sends to the client"),
    switch(None, "run_infinitely", ToolSet::Bw, "measure until Ctrl-C, and print a line each duration (default 5 s)"),
    switch(None, "use-srq", ToolSet::Send, "one receive queue for all queue pairs, of -r receives"),
    valued(None, "retry_count", "COUNT", ToolSet::All, "how often a packet is sent again before the queue pair fails, 0 to 7 (default 7)"),
    valued(None, "tclass", "CLASS", ToolSet::All, "traffic class of packets, 0 to 255 (default 0)").differs(SOFT),
    switch(None, "use_hugepages", ToolSet::All, "messages lie in huge pages"),
    valued(None, "wait_destroy", "SECONDS", ToolSet::Bw, "wait so long at the end before anything is freed"),
    switch(None, "disable_pcie_relaxed", ToolSet::Bw, "register memory without PCIe relaxed ordering"),
    valued(None, "burst_size", "COUNT", ToolSet::Bw, "messages per burst of --rate_limit"),
    valued(None, "typical_pkt_size", "BYTES", ToolSet::Bw, "packet size of packet pacing").refused("packets are paced by software: see --burst_size"),
    valued(None, "rate_limit", "RATE", ToolSet::Bw, "send no faster than this")
        .differs("without --rate_limit_type it is paced by software; the C tool uses the adapter's rate limiter, which few have"),
    valued(None, "rate_units", "UNIT", ToolSet::Bw, "unit of --rate_limit: M (MiB/s), g (Gb/s, default) or p (messages/s)"),
    valued(None, "rate_limit_type", "TYPE", ToolSet::Bw, "rate limiter: SW").differs("HW and PP are refused: adapters' own limiters are not set up here"),
    valued(None, "use_cuda", "GPU", ToolSet::All, "messages lie in memory of this GPU, by number").differs(GPU),
    valued(None, "use_cuda_bus_id", "ID", ToolSet::All, "the same, by PCI address").differs(GPU),
    switch(None, "use_cuda_dmabuf", ToolSet::All, "register memory of the GPU by dma-buf, or not at all").differs("the test ends where the device or the GPU cannot"),
    valued(Some('B'), "source_mac", "MAC", ToolSet::NoTool, "source address").refused(RAW),
    valued(Some('E'), "dest_mac", "MAC", ToolSet::NoTool, "destination address").refused(RAW),
    switch(Some('G'), "use_rss", ToolSet::NoTool, "spread what is received").refused(RAW),
    valued(Some('J'), "dest_ip", "ADDRESS", ToolSet::NoTool, "destination").refused(RAW),
    valued(Some('K'), "dest_port", "PORT", ToolSet::NoTool, "destination").refused(RAW),
    valued(Some('k'), "source_port", "PORT", ToolSet::NoTool, "source").refused(RAW),
    valued(Some('Y'), "ethertype", "TYPE", ToolSet::NoTool, "type of packets").refused(RAW),
    switch(Some('Z'), "server", ToolSet::NoTool, "be the server").refused(RAW),
    switch(Some('P'), "client", ToolSet::NoTool, "be the client").refused(RAW),
    switch(Some('v'), "mac_fwd", ToolSet::NoTool, "forward").refused(RAW),
];

pub(crate) fn by_long(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.long == name || flag.alias == Some(name))
}

pub(crate) fn by_short(letter: char) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.short == Some(letter))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_name_is_unique() {
        let mut names = HashSet::new();
        for flag in FLAGS {
            assert!(names.insert(flag.long), "{}", flag.long);
            assert!(flag.alias.is_none_or(|alias| names.insert(alias)), "{:?}", flag.alias);
        }
        let mut letters = HashSet::new();
        for letter in FLAGS.iter().filter_map(|flag| flag.short) {
            assert!(letters.insert(letter), "{letter}");
        }
    }

    #[test]
    fn differences_and_refusals_are_explained() {
        for flag in FLAGS {
            assert!(flag.what.len() > 5, "{}", flag.long);
            if let Support::Differs(text) | Support::Refused(text) = flag.support {
                assert!(text.len() > 10 && !text.ends_with('.'), "{}", flag.long);
            }
        }
    }
}

//! What is run: tools with options, and where.

/// Where the two ends are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// On this host, on the userspace device.
    Host,
    /// The same, told to go over UDP.
    Udp,
    /// On this host, on an address of loopback of their own: the connection manager connects them.
    Managed,
    /// In the guest, both on the kernel's rxe.
    Rxe,
    /// In the guest: the server on rxe, the client on the userspace device in the namespace `peer`.
    Wire,
}

impl Place {
    /// All, by the names of their sections.
    pub(crate) const ALL: [(&'static str, Place); 5] = [
        ("host", Place::Host),
        ("udp", Place::Udp),
        ("managed", Place::Managed),
        ("rxe", Place::Rxe),
        ("wire", Place::Wire),
    ];

    /// Rounds of a run whose figure is that of all of them, and of one size of many. Above 20,000 the C tools look for no peak, which takes them longer than the test. An emulated processor does few, of which the first hundreds are slower, as they have to be translated; what UDP loses nobody repeats for datagrams, so few are there at once.
    pub(crate) fn rounds(self) -> (u32, u32) {
        match self {
            Place::Host | Place::Managed => (30_000, 1_000),
            Place::Udp => (2_000, 50),
            Place::Rxe => (2_000, 10),
            Place::Wire => (300, 20),
        }
    }
}

/// A tool with options that both ends are given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Case {
    /// The tool.
    pub(crate) tool: &'static str,
    /// Its options.
    pub(crate) options: String,
}

impl Case {
    /// What it is called in reports.
    pub(crate) fn describe(&self) -> String {
        format!("{} {}", self.tool, self.options)
    }

    /// Whether it measures latency.
    pub(crate) fn is_latency(&self) -> bool {
        self.tool.ends_with("_lat")
    }
}

/// Everything at a place, in the order of the report: each tool alone, both ways, on four queue pairs, of all sizes and for a time; and those that send by datagrams.
///
/// `quick` is with a tenth of the rounds and half of the time, without what is slow.
pub(crate) fn all(place: Place, quick: bool) -> Vec<Case> {
    let (one, many) = place.rounds();
    let (one, many, seconds) = if quick {
        (one / 10, (many / 10).max(5), 1)
    } else {
        (one, many, 2)
    };
    // A trip, an atomic and a datagram are shorter than a message of 64 KiB by far, and a run of milliseconds shows where a scheduler put it, or how fast the processor happened to be.
    let (trips, atomics) = match place {
        Place::Host => (10 * one, one),
        Place::Rxe => (15 * one, 10 * one),
        Place::Udp | Place::Managed | Place::Wire => (one, one),
    };
    // Where both ends are quick, one that has no receive left loses datagrams, and the C tools wait for them for ever; they post no more receives than this.
    let (datagrams, datagrams_of_a_size) = match place {
        Place::Host => (one.min(8_000), many),
        Place::Rxe => (4 * one, 50 * many),
        Place::Udp | Place::Managed | Place::Wire => (one, many),
    };
    let mut cases = Vec::new();
    for verb in ["write", "read", "send", "atomic"] {
        for (tool, is_bw) in [(bw(verb), true), (lat(verb), false)] {
            for transport in ["", "-c UD "] {
                if verb != "send" && !transport.is_empty() {
                    continue;
                }
                if place == Place::Managed && transport.is_empty() {
                    let ways = ["-R", "-z", "-R -q 4"];
                    cases.extend(ways[..2 + usize::from(is_bw)].iter().map(|way| Case {
                        tool,
                        options: format!("{way} -n {one}"),
                    }));
                }
                if place == Place::Managed {
                    continue;
                }
                let (one, many) = match (verb, transport) {
                    ("atomic", _) => (atomics, many),
                    (_, "") => (one, many),
                    _ => (datagrams, datagrams_of_a_size),
                };
                let mut add = |options: String| {
                    cases.push(Case {
                        tool,
                        options: format!("{transport}{options}"),
                    });
                };
                add(format!("-n {}", if is_bw { one } else { trips }));
                if is_bw {
                    add(format!("-b -n {one}"));
                    add(format!("-q 4 -n {one}"));
                }
                // An atomic has one size; and 8 MiB to and fro by an emulated processor take a minute.
                let is_slow = quick && !is_bw && matches!(place, Place::Rxe | Place::Wire);
                if verb != "atomic" && !is_slow {
                    // One way to and fro are 16 MiB for each round.
                    let many = if is_bw || !transport.is_empty() {
                        many
                    } else {
                        many.min(200)
                    };
                    add(format!("-a -n {many}"));
                }
                add(format!("-D {seconds} -f 0"));
            }
        }
    }
    cases
}

fn bw(verb: &str) -> &'static str {
    match verb {
        "write" => "ib_write_bw",
        "read" => "ib_read_bw",
        "send" => "ib_send_bw",
        _ => "ib_atomic_bw",
    }
}

fn lat(verb: &str) -> &'static str {
    match verb {
        "write" => "ib_write_lat",
        "read" => "ib_read_lat",
        "send" => "ib_send_lat",
        _ => "ib_atomic_lat",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_is_there_with_what_it_has() {
        let cases = all(Place::Rxe, false);
        let of = |tool: &str| cases.iter().filter(|case| case.tool == tool).count();
        let tools = ["write", "read", "send", "atomic"].map(|verb| (of(bw(verb)), of(lat(verb))));
        assert_eq!(tools, [(5, 3), (5, 3), (10, 6), (4, 2)]);
        assert!(
            cases
                .iter()
                .any(|case| case.describe() == "ib_send_lat -c UD -a -n 500")
        );
        assert!(
            !cases
                .iter()
                .any(|case| case.tool.contains("atomic") && case.options.contains("-a"))
        );
    }
}

//! The cases: tools with options, and environments.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Environment {
    /// On this host, on the userspace device.
    Host,
    /// The same, forced to UDP.
    Udp,
    /// On this host, on a loopback address of their own, connected by the connection manager.
    Managed,
    /// In the guest, both on the kernel's rxe.
    Rxe,
    /// In the guest: the server on rxe, the client on the userspace device in the namespace `peer`.
    Wire,
}

impl Environment {
    pub(crate) const ALL: [(&'static str, Environment); 5] = [
        ("host", Environment::Host),
        ("udp", Environment::Udp),
        ("managed", Environment::Managed),
        ("rxe", Environment::Rxe),
        ("wire", Environment::Wire),
    ];

    /// Iterations of one size, and of each size of a sweep: above 20,000 the C tools skip the peak,
    /// which takes longer than the test. Few where the processor is emulated, or where UDP loses
    /// datagrams for good.
    pub(crate) fn rounds(self) -> (u32, u32) {
        match self {
            Environment::Host | Environment::Managed => (30_000, 1_000),
            Environment::Udp => (2_000, 50),
            Environment::Rxe => (2_000, 10),
            Environment::Wire => (300, 20),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Case {
    pub(crate) tool: &'static str,
    pub(crate) options: String,
}

impl Case {
    pub(crate) fn describe(&self) -> String {
        format!("{} {}", self.tool, self.options)
    }

    pub(crate) fn is_latency(&self) -> bool {
        self.tool.ends_with("_lat")
    }
}

/// The cases of `--quick`: a tenth of the iterations, half of the time. Unless `whole`, every
/// second case on this host, and the others in the guest, without latencies of all sizes.
pub(crate) fn quick(environment: Environment, whole: bool) -> Vec<Case> {
    let (first, step) = match environment {
        Environment::Host if !whole => (0, 2),
        Environment::Rxe if !whole => (1, 2),
        _ => (0, 1),
    };
    // Ping-pongs of 8 MiB take a minute on an emulated processor, and the C tools measure the clock
    // rate for 0.2 s before they print the latency of a size.
    let slow_here = !whole || matches!(environment, Environment::Rxe | Environment::Wire);
    let is_slow = |case: &Case| slow_here && case.is_latency() && case.options.contains("-a ");
    let cases = cases(environment, true, whole).into_iter().skip(first).step_by(step);
    cases.filter(|case| !is_slow(case)).collect()
}

/// All cases of an environment in the report's order.
pub(crate) fn all(environment: Environment) -> Vec<Case> {
    cases(environment, false, true)
}

fn cases(environment: Environment, quick: bool, whole: bool) -> Vec<Case> {
    let (one, many) = environment.rounds();
    let (one, many, seconds) = if quick {
        (one / 10, (many / if whole { 10 } else { 20 }).max(5), 1)
    } else {
        (one, many, 2)
    };
    // A ping-pong, an atomic and a datagram are much shorter than a message of 64 KiB, and a run of
    // milliseconds measures the scheduler and the clock rate.
    let (trips, atomics) = match environment {
        Environment::Host => (10 * one, one),
        Environment::Rxe => (15 * one, 10 * one),
        Environment::Udp | Environment::Managed | Environment::Wire => (one, one),
    };
    // The C tools post no more receives than this, and wait forever for lost datagrams.
    let (datagrams, datagrams_of_a_size) = match environment {
        Environment::Host => (one.min(8_000), many),
        Environment::Rxe => (4 * one, 50 * many),
        Environment::Udp | Environment::Managed | Environment::Wire => (one, many),
    };
    let mut cases = Vec::new();
    for verb in ["write", "read", "send", "atomic"] {
        for (tool, is_bw) in [(bw(verb), true), (lat(verb), false)] {
            for transport in ["", "-c UD "] {
                if verb != "send" && !transport.is_empty() {
                    continue;
                }
                if environment == Environment::Managed {
                    let ways = if transport.is_empty() {
                        ["-R", "-z", "-R -q 4"]
                    } else {
                        ["-R", "-R -b", "-R -q 4"]
                    };
                    let ways = ways.into_iter().filter(|way| is_bw || !way.contains("-R -"));
                    cases.extend(ways.map(|way| Case {
                        tool,
                        options: format!("{transport}{way} -n {one}"),
                    }));
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
                // Atomics have one size. Ping-pongs of 8 MiB take long.
                let is_slow = !whole && !is_bw && verb != "write";
                if verb != "atomic" && !is_slow {
                    // A bidirectional sweep moves 16 MiB per iteration.
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
    fn every_tool_has_its_cases() {
        let cases = all(Environment::Rxe);
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

    #[test]
    fn every_case_of_the_short_form_is_run_in_one_of_two_environments() {
        let without_counts = |environment| {
            let cases = quick(environment, false).into_iter();
            cases.map(|case| {
                let (options, _) = case.options.split_once("-n").unwrap_or((&case.options, ""));
                format!("{} {options}", case.tool)
            })
        };
        let mut run: Vec<_> = [Environment::Host, Environment::Rxe]
            .into_iter()
            .flat_map(without_counts)
            .collect();
        let count = run.len();
        run.sort_unstable();
        run.dedup();
        let all = cases(Environment::Host, true, false);
        let all = all
            .iter()
            .filter(|case| !(case.is_latency() && case.options.contains("-a ")))
            .count();
        assert_eq!((run.len(), count), (all, all));
    }
}

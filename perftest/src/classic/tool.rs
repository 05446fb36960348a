//! The names of the tools.

use std::path::Path;

/// The operation that a tool measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    Write,
    Read,
    Send,
    /// Fetch-and-add, or compare-and-swap.
    Atomic,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Bw,
    Lat,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tool {
    pub(crate) verb: Verb,
    pub(crate) kind: Kind,
}

impl Tool {
    pub(crate) const ALL: [Tool; 8] = {
        const fn tool(verb: Verb, kind: Kind) -> Tool {
            Tool { verb, kind }
        }
        [
            tool(Verb::Write, Kind::Bw),
            tool(Verb::Write, Kind::Lat),
            tool(Verb::Read, Kind::Bw),
            tool(Verb::Read, Kind::Lat),
            tool(Verb::Send, Kind::Bw),
            tool(Verb::Send, Kind::Lat),
            tool(Verb::Atomic, Kind::Bw),
            tool(Verb::Atomic, Kind::Lat),
        ]
    };

    pub(crate) fn name(self) -> &'static str {
        match (self.verb, self.kind) {
            (Verb::Write, Kind::Bw) => "ib_write_bw",
            (Verb::Write, Kind::Lat) => "ib_write_lat",
            (Verb::Read, Kind::Bw) => "ib_read_bw",
            (Verb::Read, Kind::Lat) => "ib_read_lat",
            (Verb::Send, Kind::Bw) => "ib_send_bw",
            (Verb::Send, Kind::Lat) => "ib_send_lat",
            (Verb::Atomic, Kind::Bw) => "ib_atomic_bw",
            (Verb::Atomic, Kind::Lat) => "ib_atomic_lat",
        }
    }

    pub(crate) fn from_program_name(program: &Path) -> Option<Tool> {
        let name = program.file_name()?.to_str()?;
        Tool::ALL.into_iter().find(|tool| tool.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_is_known_by_the_last_part_of_its_path() {
        for tool in Tool::ALL {
            assert_eq!(Tool::from_program_name(Path::new(tool.name())), Some(tool));
            assert_eq!(
                Tool::from_program_name(&Path::new("/usr/local/bin").join(tool.name())),
                Some(tool)
            );
        }
        for other in ["doorbell", "ib_write_bw.old", "ib_write", "", "/"] {
            assert_eq!(Tool::from_program_name(Path::new(other)), None, "{other}");
        }
    }
}

//! The names of the tools.

use std::path::Path;

pub(crate) use crate::cli::Operation as Verb;
pub(crate) use crate::plan::Kind;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Tool {
    pub(crate) verb: Verb,
    pub(crate) kind: Kind,
    name: &'static str,
}

impl Tool {
    pub(crate) const ALL: [Tool; 8] = [
        Tool::new("ib_write_bw", Verb::Write, Kind::Bw),
        Tool::new("ib_write_lat", Verb::Write, Kind::Lat),
        Tool::new("ib_read_bw", Verb::Read, Kind::Bw),
        Tool::new("ib_read_lat", Verb::Read, Kind::Lat),
        Tool::new("ib_send_bw", Verb::Send, Kind::Bw),
        Tool::new("ib_send_lat", Verb::Send, Kind::Lat),
        Tool::new("ib_atomic_bw", Verb::Atomic, Kind::Bw),
        Tool::new("ib_atomic_lat", Verb::Atomic, Kind::Lat),
    ];

    const fn new(name: &'static str, verb: Verb, kind: Kind) -> Tool {
        Tool { verb, kind, name }
    }

    pub(crate) fn name(self) -> &'static str {
        self.name
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

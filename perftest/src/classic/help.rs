//! `--help` and `--version` of the classic tools.

use super::flags::{FLAGS, Flag, Support};
use super::tool::{Kind, Tool, Verb};

/// The version of the C tools whose protocol and layout are implemented.
pub(crate) const SPEAKS: &str = "6.06";

const WIDTH: usize = 100;
/// Column where explanations begin.
const INDENT: usize = 34;

pub(crate) fn version() -> String {
    format!("Version: {SPEAKS} (doorbell {})", env!("CARGO_PKG_VERSION"))
}

/// `--help`: the options of the tool, and those of the C tools that are not supported.
pub(crate) fn text(tool: Tool) -> String {
    let name = tool.name();
    let does = match tool.verb {
        Verb::Write => "RDMA WRITE",
        Verb::Read => "RDMA READ",
        Verb::Send => "SEND",
        Verb::Atomic => "atomic operations",
    };
    let measures = match tool.kind {
        Kind::Bw => "bandwidth",
        Kind::Lat => "latency",
    };
    let mut text = format!(
        "Measures the {measures} of {does} with another {name}:\nthis one, or the C one (perftest).\n\nUsage:\n  {name} [OPTIONS]         wait for a client and serve its test\n  \
         {name} [OPTIONS] HOST    run a test with the server on HOST\n\nBoth ends need the same options.\n\nOptions:\n"
    );
    let (refused, taken): (Vec<&Flag>, Vec<&Flag>) = FLAGS
        .iter()
        .filter(|flag| flag.tools.has(tool))
        .partition(|flag| matches!(flag.support, Support::Refused(_)));
    for flag in taken {
        text += &row(flag);
    }
    text += "\nNot supported:\n";
    for flag in refused {
        text += &row(flag);
    }
    text + "\nExit status: 0 done, 1 the test failed or a limit was not kept, 2 bad usage, 130 Ctrl-C.\n"
}

fn row(flag: &Flag) -> String {
    let short = flag.short.map_or("    ".to_owned(), |short| format!("-{short}, "));
    let value = flag.value.map(|value| format!("={value}")).unwrap_or_default();
    let mut text = format!("  {short}--{}{value}", flag.long);
    let mut column = text.chars().count();
    if column >= INDENT {
        text.push('\n');
        column = 0;
    }
    for word in flag.what.split(' ') {
        if column + 1 + word.chars().count() > WIDTH {
            text.push('\n');
            column = 0;
        }
        if column < INDENT {
            text += &" ".repeat(INDENT - column);
            column = INDENT;
        } else {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += word.chars().count();
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tool_lists_its_own_options() {
        for tool in Tool::ALL {
            let text = text(tool);
            for flag in FLAGS {
                let listed = text.lines().any(|row| {
                    row.split(|c: char| c == '=' || c.is_whitespace())
                        .any(|word| word == format!("--{}", flag.long))
                });
                assert_eq!(listed, flag.tools.has(tool), "{} of {}", flag.long, tool.name());
            }
            assert!(
                text.lines()
                    .all(|row| row.chars().count() <= WIDTH && row.trim_end() == row),
                "{text}"
            );
        }
    }
}

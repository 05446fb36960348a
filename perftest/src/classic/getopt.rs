//! Command line parsing as in getopt_long(3): short options bundled and with their value attached
//! or not, long ones with `=` or a blank and abbreviated where that is unambiguous, operands
//! anywhere, `--` before what are only operands.

use super::flags::{self, FLAGS, Flag};
use super::tool::Tool;
use crate::failure::{Failure, one_line};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GivenOption {
    pub(crate) flag: &'static Flag,
    /// Its value; empty where it takes none.
    pub(crate) value: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ParsedArgs {
    pub(crate) options: Vec<GivenOption>,
    pub(crate) operands: Vec<String>,
}

/// # Errors
/// [`Failure::Usage`] names the first option that the tool does not have, or that has a value too
/// many or too few.
pub(crate) fn parse(tool: Tool, arguments: impl IntoIterator<Item = String>) -> Result<ParsedArgs, Failure> {
    let mut line = ParsedArgs::default();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            line.operands.extend(arguments.by_ref());
        } else if let Some(long) = argument.strip_prefix("--") {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            let flag = by_name(tool, name)?;
            let value = match (flag.value, value) {
                (None, None) => String::new(),
                (None, Some(_)) => {
                    return Err(Failure::usage(format!(
                        "--{} takes no value: leave '={}' out",
                        flag.long,
                        one_line(long.split_once('=').map_or("", |it| it.1))
                    )));
                }
                (Some(_), Some(value)) => value,
                (Some(kind), None) => arguments
                    .next()
                    .ok_or_else(|| no_value(&format!("--{}", flag.long), kind))?,
            };
            line.options.push(GivenOption { flag, value });
        } else if argument.len() > 1 && argument.starts_with('-') {
            bundle(tool, &argument[1..], &mut arguments, &mut line)?;
        } else {
            line.operands.push(argument);
        }
    }
    Ok(line)
}

fn bundle(
    tool: Tool,
    letters: &str,
    arguments: &mut impl Iterator<Item = String>,
    line: &mut ParsedArgs,
) -> Result<(), Failure> {
    for (at, letter) in letters.char_indices() {
        let flag = flags::by_short(letter).ok_or_else(|| unknown(tool, &format!("-{letter}")))?;
        check(tool, flag, &format!("-{letter}"))?;
        let Some(kind) = flag.value else {
            line.options.push(GivenOption {
                flag,
                value: String::new(),
            });
            continue;
        };
        let rest = &letters[at + letter.len_utf8()..];
        let value = match rest {
            "" => arguments.next().ok_or_else(|| no_value(&format!("-{letter}"), kind))?,
            rest => rest.to_owned(),
        };
        line.options.push(GivenOption { flag, value });
        return Ok(());
    }
    Ok(())
}

fn by_name(tool: Tool, name: &str) -> Result<&'static Flag, Failure> {
    let flag = match flags::by_long(name) {
        Some(flag) => flag,
        None => {
            let begins = |long: &str| !name.is_empty() && long.starts_with(name);
            let candidates: Vec<&Flag> = FLAGS
                .iter()
                .filter(|flag| begins(flag.long) || flag.alias.is_some_and(begins))
                .collect();
            match candidates[..] {
                [] => return Err(unknown(tool, &format!("--{name}"))),
                [flag] => flag,
                _ => {
                    let names: Vec<String> = candidates.iter().map(|flag| format!("--{}", flag.long)).collect();
                    return Err(Failure::usage(format!(
                        "--{} could be {}: write more of it",
                        one_line(name),
                        names.join(", ")
                    )));
                }
            }
        }
    };
    check(tool, flag, &format!("--{}", flag.long)).map(|()| flag)
}

/// Refuses an option that this tool does not have or that is not supported.
fn check(tool: Tool, flag: &Flag, written: &str) -> Result<(), Failure> {
    if let flags::Support::Refused(why) = flag.support {
        return Err(Failure::usage(format!(
            "{written} ({}) is not supported: {why}",
            flag.what
        )));
    }
    if flag.tools.has(tool) {
        return Ok(());
    }
    let tools: Vec<&str> = Tool::ALL
        .into_iter()
        .filter(|tool| flag.tools.has(*tool))
        .map(Tool::name)
        .collect();
    Err(Failure::usage(format!(
        "{} has no {written} ({}): that is for {}",
        tool.name(),
        flag.what,
        tools.join(", ")
    )))
}

fn unknown(tool: Tool, written: &str) -> Failure {
    Failure::usage(format!(
        "there is no option {}: {} --help lists those there are",
        one_line(written),
        tool.name()
    ))
}

fn no_value(written: &str, kind: &str) -> Failure {
    Failure::usage(format!("{written} needs a value: {written} {kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BW: Tool = Tool::ALL[4];
    const LAT: Tool = Tool::ALL[1];

    fn line(tool: Tool, line: &str) -> Result<ParsedArgs, String> {
        parse(tool, line.split_whitespace().map(str::to_owned)).map_err(|e| {
            assert_eq!(e.status(), 2);
            e.to_string()
        })
    }

    fn options(tool: Tool, text: &str) -> Vec<(&'static str, String)> {
        let line = line(tool, text).unwrap_or_else(|e| panic!("{text}: {e}"));
        line.options
            .into_iter()
            .map(|given| (given.flag.long, given.value))
            .collect()
    }

    #[test]
    fn values_are_found_as_in_getopt() {
        for text in [
            "-s64",
            "-s 64",
            "--size=64",
            "--size 64",
            "--siz 64",
            "--siz=64",
            "-s64 --",
        ] {
            assert_eq!(options(BW, text), [("size", "64".to_owned())], "{text}");
        }
        assert_eq!(
            options(BW, "-ab"),
            [("all", String::new()), ("bidirectional", String::new())]
        );
        assert_eq!(
            options(BW, "-Fn 50 -abs64"),
            [
                ("CPU-freq", String::new()),
                ("iters", "50".to_owned()),
                ("all", String::new()),
                ("bidirectional", String::new()),
                ("size", "64".to_owned())
            ]
        );
        assert_eq!(options(BW, "-s -1"), [("size", "-1".to_owned())]);
    }

    #[test]
    fn operands_may_be_anywhere() {
        for text in ["host -s 64 -F", "-s 64 host -F", "-s64 -F -- host"] {
            let line = line(BW, text).unwrap();
            assert_eq!(
                (line.operands, line.options.len()),
                (vec!["host".to_owned()], 2),
                "{text}"
            );
        }
        assert_eq!(line(BW, "-- -s 64").unwrap().operands, ["-s", "64"]);
        assert_eq!(line(BW, "-").unwrap().operands, ["-"]);
    }

    #[test]
    fn an_unambiguous_prefix_is_enough() {
        assert_eq!(options(BW, "--bidi"), [("bidirectional", String::new())]);
        // An exact name wins over longer ones that start with it.
        assert_eq!(options(BW, "--out_json"), [("out_json", String::new())]);
        assert_eq!(options(BW, "--port 7"), [("port", "7".to_owned())]);
        let ambiguous = line(BW, "--report").unwrap_err();
        assert!(
            ambiguous.contains("--report-both, --report_gbits") && ambiguous.contains("write more"),
            "{ambiguous}"
        );
    }

    #[test]
    fn unknown_options_are_named() {
        for (tool, text, says) in [
            (BW, "--frobnicate", "there is no option --frobnicate: ib_send_bw --help"),
            (BW, "--", ""),
            (BW, "-Fé", "there is no option -é"),
            (BW, "--\u{1b}[2J", "there is no option -- [2J"),
            (
                LAT,
                "-q 4",
                "ib_write_lat has no -q (queue pairs (default 1)): that is for ib_write_bw, ib_read_bw",
            ),
            (BW, "-H", "ib_send_bw has no -H"),
            (LAT, "-e", "that is for ib_read_bw, ib_read_lat, ib_send_bw"),
            (BW, "-O", "-O (measure two ports at once) is not supported: one port"),
            (BW, "--aes_xts", "not supported: encrypted"),
            (BW, "-Z", "not supported: raw Ethernet"),
            (BW, "--all=3", "--all takes no value"),
            (BW, "-s", "-s needs a value: -s BYTES"),
            (BW, "--size", "--size needs a value"),
            (BW, "--=3", "there is no option --"),
        ] {
            match line(tool, text) {
                Ok(_) => assert_eq!(says, "", "{text}"),
                Err(error) => assert!(
                    !says.is_empty() && error.contains(says) && !error.contains('\n'),
                    "{text}: {error}"
                ),
            }
        }
    }
}

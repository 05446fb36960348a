//! The table of options in docs/book/src/classic.md, and whether the C tools document any that it
//! lacks.
//!
//! `DOORBELL_WRITE_DOCS=1 cargo test -p doorbell-perftest documented` writes the table.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::flags::{self, FLAGS, Flag, Support, ToolSet};
use super::tool::Tool;

const BEGIN: &str = "<!-- begin options -->\n";
const END: &str = "<!-- end options -->";

/// Options that Debian's build of the C tools does not document; other builds do.
const OTHER_BUILDS: [&str; 4] = ["flow_label", "use_cuda", "use_cuda_bus_id", "use_cuda_dmabuf"];

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/classic.md")
}

fn row(flag: &Flag) -> String {
    let mut names: Vec<String> = flag.short.iter().map(|short| format!("`-{short}`")).collect();
    let value = flag.value.map(|value| format!("={value}")).unwrap_or_default();
    names.push(format!("`--{}{value}`", flag.long));
    names.extend(flag.alias.map(|alias| format!("`--{alias}{value}`")));
    let ours = match flag.support {
        Support::Full => "yes".to_owned(),
        Support::Differs(how) => format!("yes: {how}"),
        Support::Refused(why) => format!("**no**: {why}"),
    };
    format!(
        "| {} | {} | {} | {} |\n",
        names.join(" "),
        tools(flag.tools),
        flag.what,
        ours.replace('|', "\\|")
    )
}

fn table() -> String {
    let mut text = "\n| option | tools | what it does | taken |\n|---|---|---|---|\n".to_owned();
    FLAGS.iter().for_each(|flag| text += &row(flag));
    text + "\n"
}

#[test]
fn the_page_has_the_table() {
    let path = page();
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the page says where the table begins");
    let (now, after) = rest.split_once(END).expect("the page says where the table ends");
    if std::env::var_os("DOORBELL_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{}{END}{after}", table())).unwrap();
    } else {
        assert_eq!(
            now,
            table(),
            "docs/book/src/classic.md has another table: DOORBELL_WRITE_DOCS=1 cargo test -p doorbell-perftest documented writes it"
        );
    }
}

/// The options at the start of the lines of a help text: (`-s`, `--size`).
fn options(help: &str) -> Vec<(Option<char>, Option<String>)> {
    let long = |word: &str| {
        let name = word.strip_prefix("--")?;
        Some(name.split(['=', '<']).next()?.trim_end_matches(',').to_owned()).filter(|name| !name.is_empty())
    };
    let mut found = Vec::new();
    for row in help.lines().map(str::trim_start) {
        let mut words = row.split_whitespace();
        let Some(first) = words.next() else { continue };
        let bare = first.trim_end_matches(',');
        if let Some(name) = long(bare) {
            found.push((None, Some(name)));
        } else if bare.len() == 2 && bare.starts_with('-') && first.ends_with(',') {
            found.push((bare.chars().nth(1), words.next().and_then(long)));
        }
    }
    found
}

#[test]
fn every_option_of_the_c_tools_is_in_the_table() {
    for tool in Tool::ALL {
        let name = tool.name();
        let Ok(output) = Command::new(name).arg("--help").output() else {
            assert!(
                std::env::var("CI").as_deref() != Ok("true"),
                "missing under CI: {name} of the package perftest"
            );
            eprintln!("skipped: there is no {name} (package perftest)");
            continue;
        };
        let documented = options(&String::from_utf8_lossy(&output.stdout));
        assert!(documented.len() > 40, "{name} --help is read: {documented:?}");
        let mut seen = BTreeSet::new();
        for (short, long) in &documented {
            let by_short = short.and_then(flags::by_short);
            let by_long = long.as_deref().and_then(flags::by_long);
            let flag = by_long
                .or(by_short)
                .unwrap_or_else(|| panic!("{name} has {short:?} {long:?}"));
            assert_eq!(flag.short, *short, "{name} {long:?}");
            if short.is_some() && long.is_some() {
                assert!(
                    std::ptr::eq(by_short.unwrap(), by_long.unwrap()),
                    "{name} {short:?} {long:?}"
                );
            }
            assert!(flag.tools.has(tool), "{name} has {}", flag.long);
            seen.insert(flag.long);
        }
        for flag in FLAGS
            .iter()
            .filter(|flag| flag.tools.has(tool) && !OTHER_BUILDS.contains(&flag.long))
        {
            assert!(seen.contains(flag.long), "{name} does not document {}", flag.long);
        }
    }
}

#[test]
fn what_no_tool_documents_is_refused() {
    for flag in FLAGS.iter().filter(|flag| flag.tools == ToolSet::NoTool) {
        assert!(matches!(flag.support, Support::Refused(_)), "{}", flag.long);
    }
}

fn tools(tools: ToolSet) -> &'static str {
    match tools {
        ToolSet::All => "all",
        ToolSet::Bw => "bandwidth",
        ToolSet::Lat => "latency",
        ToolSet::NotAtomic => "write, read, send",
        ToolSet::NotWrite => "read, send, atomic",
        ToolSet::Fetching => "read, atomic",
        ToolSet::Carrying => "write, send",
        ToolSet::Send => "send",
        ToolSet::Atomic => "atomic",
        ToolSet::NoTool => "none (its help names it nowhere)",
    }
}

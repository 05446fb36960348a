//! The report: tables in Markdown, each section between two marks in the committed file.

use crate::{cases::Grid, rig::Outcome};
use anyhow::Result;
use doorbell_tests::{retry::RetryBudget, section::span};
use std::fmt::Write;

pub(crate) struct Line {
    /// The command, or the action.
    pub(crate) what: String,
    /// What it must show.
    pub(crate) about: &'static str,
    pub(crate) outcome: Outcome,
}

impl Line {
    /// Makes a row of `run`'s outcome; a failure is retried while the budget lasts.
    pub(crate) fn tried(
        what: String,
        about: &'static str,
        retries: &mut RetryBudget,
        mut run: impl FnMut() -> Result<(Outcome, String)>,
    ) -> Result<Self> {
        loop {
            let (outcome, output) = run()?;
            outcome.show(&what, &output);
            if !outcome.fails() || !retries.take() {
                return Ok(Self { what, about, outcome });
            }
        }
    }
}

/// A grid with the outcome of each cell, row by row.
pub(crate) fn grid(grid: &Grid, outcomes: &[Outcome]) -> String {
    let mut text = format!("### {}\n\n", grid.title);
    if !grid.about.is_empty() {
        let _ = writeln!(text, "{}\n", grid.about);
    }
    let _ = write!(text, "| options |");
    for tool in grid.tools {
        let _ = write!(text, " {} |", short(tool));
    }
    let _ = write!(text, "\n|---|{}\n", "---|".repeat(grid.tools.len()));
    let mut notes: Vec<&str> = Vec::new();
    for (row, options) in grid.lines.iter().enumerate() {
        let _ = match options.trim() {
            "" => write!(text, "| (none) |"),
            options => write!(text, "| `{options}` |"),
        };
        for outcome in &outcomes[row * grid.tools.len()..][..grid.tools.len()] {
            let mut noted = |mark: &str, why| {
                let index = notes.iter().position(|&note| note == why).unwrap_or_else(|| {
                    notes.push(why);
                    notes.len() - 1
                });
                format!("{mark} ({})", index + 1)
            };
            let cell = match outcome {
                Outcome::Runs => "yes".to_owned(),
                Outcome::NotOffered(why) => noted("–", why),
                Outcome::Lacking(why) => noted("no", why),
                Outcome::Fails(why) => noted("**fails**", why),
            };
            let _ = write!(text, " {cell} |");
        }
        text.push('\n');
    }
    if !notes.is_empty() {
        text.push('\n');
    }
    for (index, note) in notes.iter().enumerate() {
        let _ = writeln!(text, "{}. {note}", index + 1);
    }
    text
}

/// The outcomes in a text that contains what [`grid`] returned for them; `None` if it does not.
pub(crate) fn read(grid: &Grid, text: &str) -> Option<Vec<Outcome>> {
    let (_, text) = text.split_once(&format!("### {}\n", grid.title))?;
    let text = text.split("\n### ").next()?;
    let notes: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once(". "))
        .filter(|(number, _)| number.parse::<usize>().is_ok())
        .map(|(_, note)| note)
        .collect();
    let noted = |number: &str| notes.get(number.strip_suffix(')')?.parse::<usize>().ok()? - 1);
    let outcome = |cell: &str| match cell.split_once(" (") {
        None if cell == "yes" => Some(Outcome::Runs),
        Some(("–", number)) => Some(Outcome::NotOffered((*noted(number)?).to_owned())),
        Some(("no", number)) => Some(Outcome::Lacking((*noted(number)?).to_owned())),
        _ => None,
    };
    let mut outcomes = Vec::new();
    for line in grid.lines {
        let start = match line.trim() {
            "" => "| (none) |".to_owned(),
            options => format!("| `{options}` |"),
        };
        let row = text
            .lines()
            .find_map(|row| row.strip_prefix(&start)?.strip_suffix('|'))?;
        let cells: Option<Vec<_>> = row.split('|').map(|cell| outcome(cell.trim())).collect();
        outcomes.extend(cells.filter(|cells| cells.len() == grid.tools.len())?);
    }
    Some(outcomes)
}

pub(crate) fn lines(title: &str, lines: &[Line]) -> String {
    let mut text = format!("### {title}\n\n| what | result |\n|---|---|\n");
    for Line { what, about, outcome } in lines {
        let result = match outcome {
            Outcome::Runs => format!("yes: {about}"),
            Outcome::NotOffered(why) => format!("– {why}"),
            Outcome::Lacking(why) => format!("no: {why}"),
            Outcome::Fails(why) => format!("**fails**: {why}"),
        };
        let _ = writeln!(text, "| {what} | {result} |");
    }
    text
}

/// A tool's name in the table's header: without its family's prefix.
fn short(tool: &str) -> &str {
    tool.strip_prefix("ibv_")
        .or_else(|| tool.strip_prefix("ib_"))
        .unwrap_or(tool)
}

/// The lines in which the file's section and `body` differ: the file's with `-`, ours with `+`.
pub(crate) fn differences(file: &str, section: &str, body: &str) -> Result<Vec<String>> {
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().map(str::to_owned);
        lines.filter(|line| !line.is_empty()).collect()
    };
    let (old, new) = (lines(&file[span(file, section)?]), lines(body));
    let gone = old
        .iter()
        .filter(|line| !new.contains(line))
        .map(|line| format!("-{line}"));
    let come = new
        .iter()
        .filter(|line| !old.contains(line))
        .map(|line| format!("+{line}"));
    let mut all: Vec<String> = gone.chain(come).collect();
    if all.is_empty() && old != new {
        all.push("the same lines in another order".to_owned());
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Environment, HOST, WIRE};
    use doorbell_tests::section::replaced;

    const FILE: &str = "# Report\n<!-- begin host -->\n\nold\nkept\n\n<!-- end host -->\nmore\n";

    #[test]
    fn a_section_is_replaced_and_compared_alone() {
        let new = replaced(FILE, "host", "new\nkept").unwrap();
        assert_eq!(
            new,
            "# Report\n<!-- begin host -->\n\nnew\nkept\n<!-- end host -->\nmore\n"
        );
        assert_eq!(differences(FILE, "host", "new\nkept\n").unwrap(), ["-old", "+new"]);
        assert!(differences(&new, "host", "new\n\nkept\n").unwrap().is_empty());
        assert_eq!(differences(&new, "host", "kept\nnew\n").unwrap().len(), 1);
        assert!(replaced(FILE, "wire", "").is_err());
    }

    #[test]
    fn committed_tables_are_read_back() {
        let text = include_str!("../../docs/STOCK.md");
        for (section, grids) in [("host", HOST), ("wire", WIRE)] {
            let own = &text[span(text, section).unwrap()];
            for one in grids {
                let outcomes = read(one, own).expect(one.title);
                assert!(own.contains(&grid(one, &outcomes)), "{}", one.title);
            }
        }
        assert_eq!(read(&HOST[0], "### Pingpongs of ibverbs-utils\n"), None);
    }

    #[test]
    fn a_reason_appears_once_in_each_table() {
        let shape = Grid {
            title: "T",
            about: "",
            tools: &["ib_a", "ib_b"],
            environment: Environment::Host,
            lines: &["", "-e"],
        };
        let refused = || Outcome::NotOffered("not here".to_owned());
        let text = grid(
            &shape,
            &[Outcome::Runs, refused(), refused(), Outcome::Fails("odd".to_owned())],
        );
        assert_eq!(
            text,
            "### T\n\n| options | a | b |\n|---|---|---|\n| (none) | yes | – (1) |\n| `-e` | – (1) | **fails** (2) |\n\n1. not here\n2. odd\n"
        );
    }
}

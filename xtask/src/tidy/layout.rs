//! Sizes: the width of comments, the length of files, the number of a struct's fields.

use super::{
    Finding,
    source::{Kind, Source, Token},
};

const WIDTH: usize = 100;
const LINES: usize = 600;
const FIELDS: usize = 12;
/// Begins the comment that states why a struct has more fields.
const REASON: &str = "// fields: ";

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let mut findings = wide_comments(source);
    let finding = |rule, line, what| Finding {
        rule,
        path: source.path.clone(),
        line,
        what,
    };
    let lines = source.text.lines().count();
    if lines > LINES {
        findings.push(finding("length", lines, format!("{lines} lines, {LINES} are allowed")));
    }
    for (line, name, fields) in large_structs(source) {
        findings.push(finding(
            "fields",
            line,
            format!("{name} has {fields} fields, {FIELDS} are allowed without '{REASON}…' above it"),
        ));
    }
    findings
}

/// Comment lines that could be broken: one word, a table's row or a code block cannot.
fn wide_comments(source: &Source) -> Vec<Finding> {
    let starts: Vec<_> = source.comments().map(|token| token.start).collect();
    let (mut at, mut fenced, mut findings) = (0, false, Vec::new());
    for (number, line) in source.text.split_inclusive('\n').enumerate() {
        let start = at + line.len() - line.trim_start().len();
        at += line.len();
        if starts.binary_search(&start).is_err() {
            fenced = false;
            continue;
        }
        let text = line.trim().trim_start_matches(['/', '!']).trim_start();
        if text.starts_with("```") {
            fenced = !fenced;
        }
        let columns = line.trim_end().chars().count();
        let breakable = text.contains(' ') && !text.starts_with('|') && !text.starts_with('[') && !fenced;
        if columns > WIDTH && breakable {
            findings.push(Finding {
                rule: "width",
                path: source.path.clone(),
                line: number + 1,
                what: format!("the comment ends at column {columns}"),
            });
        }
    }
    findings
}

/// Line, name and fields of structs without a reason; an ABI sets the fields of `repr(C)`.
fn large_structs(source: &Source) -> Vec<(usize, &str, usize)> {
    let code: Vec<_> = source.code().collect();
    let is = |at: usize, text: &str| code.get(at).is_some_and(|token| source.text(*token) == text);
    let mut found = Vec::new();
    for at in 0..code.len() {
        let named = code.get(at + 1).filter(|token| token.kind == Kind::Ident);
        let (true, Some(name)) = (is(at, "struct"), named) else {
            continue;
        };
        let open = (at..code.len()).find(|at| is(*at, "{") || is(*at, ";") || is(*at, "("));
        let Some(open) = open.filter(|open| is(*open, "{")) else {
            continue;
        };
        let fields = fields(source, &code[open + 1..]);
        if fields > FIELDS && !excused(source, code[at]) {
            found.push((code[at].line, source.text(*name), fields));
        }
    }
    found
}

/// Counts names before a single colon at the outermost level of a struct's body.
fn fields(source: &Source, body: &[Token]) -> usize {
    let (mut depth, mut fields) = (0, 0);
    for (at, token) in body.iter().enumerate() {
        let next = |ahead: usize| body.get(at + ahead).map_or("", |token| source.text(*token));
        match source.text(*token) {
            "{" | "(" | "[" | "<" => depth += 1,
            "}" if depth == 0 => break,
            // The arrow of a function's type closes nothing.
            ">" if at > 0 && source.text(body[at - 1]) == "-" => {}
            "}" | ")" | "]" | ">" => depth -= 1,
            _ if depth == 0 && token.kind == Kind::Ident && next(1) == ":" && next(2) != ":" => {
                fields += usize::from(at == 0 || source.text(body[at - 1]) != ":");
            }
            _ => {}
        }
    }
    fields
}

/// Whether the comments and attributes above a struct state the reason, or that C sets its layout.
fn excused(source: &Source, keyword: Token) -> bool {
    let mut above = source.above(keyword.start);
    above.any(|line| line.starts_with(REASON) || line.contains("repr(C"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Vec<(&'static str, usize)> {
        let findings = check(&Source::of("a.rs", text.to_owned()));
        findings.iter().map(|finding| (finding.rule, finding.line)).collect()
    }

    #[test]
    fn wide_comments_are_found_where_they_can_be_broken() {
        let wide = "word ".repeat(20);
        assert_eq!(rules(&format!("fn f() {{}}\n    /// {wide}x\n")), [("width", 2)]);
        let one = "x".repeat(120);
        assert_eq!(
            rules(&format!("/// {one}\n//! | {wide} |\n// ```\n// {wide}x\n// ```\n")),
            []
        );
        // Code is rustfmt's, and what is in a string is no comment.
        assert_eq!(rules(&format!("const A: &str = \"\n// {wide}x\";\n")), []);
    }

    #[test]
    fn long_files_are_found() {
        assert_eq!(rules(&"\n".repeat(600)), []);
        assert_eq!(rules(&"\n".repeat(601)), [("length", 601)]);
    }

    #[test]
    fn large_structs_are_found_unless_they_state_why() {
        let body: String = (0..13)
            .map(|n| format!("    pub a{n}: Vec<fn(x: u8) -> std::io::Result<u8>>,\n"))
            .collect();
        let large = format!("struct Large<T: Copy> {{\n{body}}}\n");
        assert_eq!(rules(&large), [("fields", 1)]);
        for reason in [
            "// fields: the header's\n#[derive(Debug)]\npub ",
            "#[repr(C)]\n#[allow(a)]\n",
        ] {
            assert_eq!(rules(&format!("{reason}{large}")), []);
        }
        assert_eq!(
            rules(&large.replace("    pub a0: Vec<fn(x: u8) -> std::io::Result<u8>>,\n", "")),
            []
        );
        assert_eq!(rules("struct A(u8);\nstruct B;\n"), []);
    }
}

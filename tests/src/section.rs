//! Sections of Markdown files that tests write, each between two marks.

use anyhow::{Context, Result};

/// The byte range of a section in the file's text; an error when there is none.
pub fn span(file: &str, section: &str) -> Result<std::ops::Range<usize>> {
    let (begin, end) = (format!("<!-- begin {section} -->\n"), format!("<!-- end {section} -->"));
    let lacking = || format!("the report has no section {section:?}");
    let start = file.find(&begin).with_context(lacking)? + begin.len();
    let length = file[start..].find(&end).with_context(lacking)?;
    Ok(start..start + length)
}

/// The file's text with a section replaced; an error when there is none.
pub fn replaced(file: &str, section: &str, body: &str) -> Result<String> {
    let span = span(file, section)?;
    Ok(format!("{}\n{body}\n{}", &file[..span.start], &file[span.end..]))
}

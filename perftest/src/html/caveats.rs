//! What to know about the figures of a page, below them.

use crate::chart::escape;
use crate::document::Document;

/// The caveats of all results, one item for each code.
pub(super) fn section(out: &mut String, documents: &[Document]) {
    let mut kinds: Vec<(&str, Vec<(&str, &str)>)> = Vec::new();
    for document in documents {
        for warning in &document.warnings {
            let one = (document.file.as_str(), warning.message.as_str());
            match kinds.iter_mut().find(|(code, _)| *code == warning.code) {
                Some((_, all)) => all.push(one),
                None => kinds.push((&warning.code, vec![one])),
            }
        }
    }
    let skipped: usize = documents.iter().map(|document| document.skipped.len()).sum();
    if kinds.is_empty() && skipped == 0 {
        return;
    }
    out.push_str("<section class=\"warnings\" aria-label=\"Warnings\">\n<h2>Before you believe a figure</h2>\n<ul>\n");
    for (code, all) in kinds {
        caveat(out, code, &all, documents.len());
    }
    out.push_str("</ul>\n");
    if skipped > 0 {
        *out += &format!("<details><summary>{skipped} points could not be measured</summary>\n<ul>\n");
        for point in documents.iter().flat_map(|document| &document.skipped) {
            *out += &format!("<li>{}</li>\n", escape(point));
        }
        out.push_str("</ul>\n</details>\n");
    }
    out.push_str("</section>\n");
}

/// A caveat by its first message; those of other results, where they differ, in a list that opens.
fn caveat(out: &mut String, code: &str, all: &[(&str, &str)], of: usize) {
    let Some((_, first)) = all.first() else { return };
    let which = if of > 1 {
        format!(" ({} of {of} results)", all.len())
    } else {
        String::new()
    };
    *out += &format!("<li><code>{}</code>{which}: {}", escape(code), escape(first));
    if all.iter().any(|(_, message)| message != first) {
        out.push_str("<details><summary>by result</summary>\n<ul>\n");
        for (file, message) in all {
            *out += &format!("<li>{}: {}</li>\n", escape(file), escape(message));
        }
        out.push_str("</ul>\n</details>");
    }
    out.push_str("</li>\n");
}

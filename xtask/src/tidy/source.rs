//! A Rust file as tokens.

use anyhow::{Context, Result};
use ra_ap_rustc_lexer::{FrontmatterAllowed, TokenKind, tokenize};
use std::fs;

use crate::workspace;

pub(super) struct Source {
    /// Relative to the workspace.
    pub(super) path: String,
    pub(super) text: String,
    pub(super) tokens: Vec<Token>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) start: usize,
    pub(super) end: usize,
    /// Line number, from 1.
    pub(super) line: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Comment,
    Ident,
    Literal,
    /// Any other character.
    Mark,
}

impl Source {
    pub(super) fn read(path: &str) -> Result<Self> {
        let text = fs::read_to_string(workspace().join(path)).with_context(|| format!("cannot read {path}"))?;
        Ok(Self::of(path, text))
    }

    pub(super) fn of(path: &str, text: String) -> Self {
        let (mut tokens, mut start, mut line) = (Vec::new(), 0, 1);
        for token in tokenize(&text, FrontmatterAllowed::No) {
            let end = start + token.len as usize;
            let kind = match token.kind {
                TokenKind::Whitespace => None,
                TokenKind::LineComment { .. } | TokenKind::BlockComment { .. } => Some(Kind::Comment),
                TokenKind::Ident | TokenKind::RawIdent => Some(Kind::Ident),
                TokenKind::Literal { .. } => Some(Kind::Literal),
                _ => Some(Kind::Mark),
            };
            tokens.extend(kind.map(|kind| Token { kind, start, end, line }));
            line += text[start..end].matches('\n').count();
            start = end;
        }
        let path = path.to_owned();
        Self { path, text, tokens }
    }

    pub(super) fn text(&self, token: Token) -> &str {
        &self.text[token.start..token.end]
    }

    pub(super) fn code(&self) -> impl Iterator<Item = Token> + '_ {
        self.tokens.iter().copied().filter(|token| token.kind != Kind::Comment)
    }

    pub(super) fn comments(&self) -> impl Iterator<Item = Token> + '_ {
        self.tokens.iter().copied().filter(|token| token.kind == Kind::Comment)
    }

    /// The comments and attributes directly above the line that `at` is in, the nearest first.
    pub(super) fn above(&self, at: usize) -> impl Iterator<Item = &str> {
        let line = self.text[..at].rfind('\n').map_or(0, |end| end + 1);
        let lines = self.text[..line].lines().rev().map(str::trim);
        lines.take_while(|line| line.starts_with("//") || line.starts_with('#') || line.ends_with(")]"))
    }

    /// Whether a tool wrote it: the rules are for what people write.
    pub(super) fn is_generated(&self) -> bool {
        self.text.lines().take(10).any(|line| line.contains("@generated"))
    }
}

//! The text form of plans: `Display` writes it, `FromStr` parses it.
//!
//! ```text
//! allreduce in place        the collective, and whether input and output may share memory
//! order 0 1                 the members
//! root 0
//! blocks 2                  Shape::blocks
//!
//! rank 0                    for each rank: its memory, if any, and its strands
//! scratch 0 1               data blocks whose lengths its blocks have
//! partial 1
//! strand 0
//!   send input[0..2] to 1
//!   recv output[1] from 1
//!   recv-reduce element from 1 with input[0] into output[0]
//!   reduce input[0] scratch[0] into output[0]
//!   copy input[0] into output[0]
//! ```
//!
//! A span is `place[first]` or `place[first..end]`, or `nothing`. `#` begins a comment; empty lines
//! and indentation are ignored.

use core::fmt;
use core::str::{FromStr, SplitWhitespace};

use super::{BlockForm, Collective, Plan, PlanMemory, Program, Shape, Span, Step};
use crate::types::Rank;

impl fmt::Display for BlockForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Element => "element",
            Self::Partial => "partial",
        })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, first, blocks } = self;
        match blocks {
            0 => write!(f, "nothing"),
            1 => write!(f, "{place}[{first}]"),
            _ => write!(f, "{place}[{first}..{}]", u64::from(*first) + u64::from(*blocks)),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send { to, span } => write!(f, "send {span} to {to}"),
            Self::Recv { from, into } => write!(f, "recv {into} from {from}"),
            Self::RecvReduce { from, form, with, into } => {
                write!(f, "recv-reduce {form} from {from} with {with} into {into}")
            }
            Self::Reduce { sources, into } => {
                write!(f, "reduce")?;
                sources.iter().try_for_each(|source| write!(f, " {source}"))?;
                write!(f, " into {into}")
            }
            Self::Copy { from, into } => write!(f, "copy {from} into {into}"),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape {
            collective,
            order,
            root,
            blocks,
        } = &self.shape;
        writeln!(f, "{collective}{}", if self.in_place { " in place" } else { "" })?;
        write!(f, "order")?;
        order.iter().try_for_each(|rank| write!(f, " {rank}"))?;
        writeln!(f, "\nroot {root}\nblocks {blocks}")?;
        for (rank, program) in self.programs.iter().enumerate() {
            writeln!(f, "\nrank {rank}")?;
            for (place, like) in [
                (PlanMemory::Scratch, &program.scratch),
                (PlanMemory::Partial, &program.partial),
            ] {
                if !like.is_empty() {
                    write!(f, "{place}")?;
                    like.iter().try_for_each(|block| write!(f, " {block}"))?;
                    writeln!(f)?;
                }
            }
            for (strand, steps) in program.strands.iter().enumerate() {
                writeln!(f, "strand {strand}")?;
                steps.iter().try_for_each(|step| writeln!(f, "  {step}"))?;
            }
        }
        Ok(())
    }
}

/// A parse error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the plan: {what}")]
pub struct TextError {
    /// The line, counted from 1.
    pub line: usize,
    /// The error.
    pub what: String,
}

type Wrong = String;

fn span(text: &str) -> Result<Span, Wrong> {
    if text == "nothing" {
        return Ok(Span::empty());
    }
    let wrong = || format!("{text:?} is no span: place[first], place[first..end] or nothing");
    let (place, blocks) = text
        .strip_suffix(']')
        .and_then(|text| text.split_once('['))
        .ok_or_else(wrong)?;
    let place = place.parse::<PlanMemory>().map_err(|error| error.to_string())?;
    let (first, end) = match blocks.split_once("..") {
        Some((first, end)) => (first.parse().ok(), end.parse().ok()),
        None => {
            let first = blocks.parse::<u32>().ok();
            (first, first.and_then(|first| first.checked_add(1)))
        }
    };
    match (first, end) {
        (Some(first), Some(end)) if first < end => Ok(Span::new(place, first, end - first)),
        _ => Err(wrong()),
    }
}

fn step(text: &str) -> Result<Step, Wrong> {
    let mut words = Words(text.split_whitespace());
    let step = match words.next("a step")? {
        "send" => {
            let span = words.span()?;
            words.expect("to")?;
            Step::Send {
                to: words.rank()?,
                span,
            }
        }
        "recv" => {
            let into = words.span()?;
            words.expect("from")?;
            Step::Recv {
                from: words.rank()?,
                into,
            }
        }
        "recv-reduce" => {
            let form = match words.next("a form")? {
                "element" => BlockForm::Element,
                "partial" => BlockForm::Partial,
                other => return Err(format!("there is no form {other:?}: element or partial")),
            };
            words.expect("from")?;
            let from = words.rank()?;
            words.expect("with")?;
            let with = words.span()?;
            words.expect("into")?;
            let into = words.span()?;
            Step::RecvReduce { from, form, with, into }
        }
        "reduce" => {
            let mut sources = Vec::new();
            loop {
                match words.next("into")? {
                    "into" => break,
                    source => sources.push(span(source)?),
                }
            }
            let (sources, into) = (sources.into(), words.span()?);
            Step::Reduce { sources, into }
        }
        "copy" => {
            let from = words.span()?;
            words.expect("into")?;
            Step::Copy {
                from,
                into: words.span()?,
            }
        }
        other => {
            return Err(format!(
                "there is no step {other:?}: send, recv, recv-reduce, reduce or copy"
            ));
        }
    };
    words.end()?;
    Ok(step)
}

impl FromStr for Plan {
    type Err = TextError;

    fn from_str(text: &str) -> Result<Self, TextError> {
        let mut reader = Reader::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                reader.line(line).map_err(|what| TextError { line: index + 1, what })?;
            }
        }
        let line = text.lines().count().max(1);
        reader.finish().map_err(|what| TextError { line, what })
    }
}

#[derive(Default)]
struct Reader {
    collective: Option<Collective>,
    in_place: bool,
    order: Option<Vec<Rank>>,
    root: Option<Rank>,
    blocks: Option<u32>,
    programs: Vec<Program>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), Wrong> {
        let Some(_) = self.collective else {
            let (name, in_place) = match line.split_once(char::is_whitespace) {
                None => (line, false),
                Some((name, rest)) if rest.split_whitespace().eq(["in", "place"]) => (name, true),
                Some((_, rest)) => return Err(format!("{rest:?} follows the collective, and not \"in place\"")),
            };
            self.collective = Some(name.parse().map_err(|error: crate::UnknownName| error.to_string())?);
            self.in_place = in_place;
            return Ok(());
        };
        let mut words = Words(line.split_whitespace());
        let word = words.next("a line")?;
        match (word, self.programs.last_mut()) {
            ("order", None) if self.order.is_none() => {
                self.order = Some(words.numbers()?.into_iter().map(Rank).collect())
            }
            ("root", None) if self.root.is_none() => self.root = Some(words.rank()?),
            ("blocks", None) if self.blocks.is_none() => self.blocks = Some(words.parse("how many")?),
            ("rank", _) => {
                let expected = self.programs.len();
                if words.rank()?.index() != expected {
                    return Err(format!("rank {expected} is next"));
                }
                self.programs.push(Program::default());
            }
            ("scratch", Some(program)) if program.scratch.is_empty() => program.scratch = words.numbers()?,
            ("partial", Some(program)) if program.partial.is_empty() => program.partial = words.numbers()?,
            ("strand", Some(program)) => {
                let expected = program.strands.len();
                if words.parse::<usize>("a number")? != expected {
                    return Err(format!("strand {expected} is next"));
                }
                program.strands.push(Vec::new());
            }
            (_, Some(program)) => {
                let strand = program.strands.last_mut().ok_or("steps belong to a strand")?;
                strand.push(step(line)?);
                return Ok(());
            }
            (_, None) => return Err(format!("{word:?} does not belong here")),
        }
        words.end()
    }

    fn finish(self) -> Result<Plan, Wrong> {
        let collective = self.collective.ok_or("there is nothing")?;
        let order: Box<[Rank]> = self.order.ok_or("the order is missing")?.into();
        if self.programs.len() != order.len() {
            return Err(format!(
                "there are {} ranks in the order, and {} programs",
                order.len(),
                self.programs.len()
            ));
        }
        let shape = Shape {
            collective,
            order,
            root: self.root.ok_or("the root is missing")?,
            blocks: self.blocks.ok_or("the number of blocks is missing")?,
        };
        Ok(Plan {
            shape,
            in_place: self.in_place,
            programs: self.programs,
        })
    }
}

struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn next(&mut self, what: &str) -> Result<&'a str, Wrong> {
        self.0.next().ok_or_else(|| format!("{what} is missing at the end"))
    }

    fn parse<T: FromStr>(&mut self, what: &str) -> Result<T, Wrong> {
        let word = self.next(what)?;
        word.parse().map_err(|_| format!("{word:?} is not {what}"))
    }

    fn span(&mut self) -> Result<Span, Wrong> {
        span(self.next("a span")?)
    }

    fn rank(&mut self) -> Result<Rank, Wrong> {
        self.parse("a rank").map(Rank)
    }

    fn numbers(&mut self) -> Result<Vec<u32>, Wrong> {
        let number = |word: &str| word.parse().map_err(|_| format!("{word:?} is not a number"));
        self.0.by_ref().map(number).collect()
    }

    fn expect(&mut self, expected: &str) -> Result<(), Wrong> {
        let word = self.next(expected)?;
        if word == expected {
            Ok(())
        } else {
            Err(format!("{word:?} stands where {expected:?} belongs"))
        }
    }

    fn end(&mut self) -> Result<(), Wrong> {
        self.0
            .next()
            .map_or(Ok(()), |word| Err(format!("{word:?} is too much")))
    }
}

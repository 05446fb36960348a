//! Drawings of plans: a table of steps for a terminal, and messages over time as SVG. The time axis
//! has one unit per step and at least one per message: it shows dependencies, not durations.

use core::fmt::Write;

use super::census::PlanStatistics;
use super::walk::{StepVisitor, StrandId, visit_steps};
use super::{PlanMemory, Schedule, Span, Step};
use crate::algorithm::Algorithm;
use crate::types::Rank;

const WIDTH: usize = 160;

struct Event {
    who: StrandId,
    step: Step,
    time: u32,
    /// Of a receiving step: when the message was sent.
    sent: Option<u32>,
}

struct Timeline {
    ranks: u32,
    events: Vec<Event>,
    now: Vec<u32>,
}

impl Timeline {
    fn of(schedule: &dyn Schedule) -> Self {
        let ranks = schedule.shape().ranks();
        let mut timeline = Self {
            ranks,
            events: Vec::new(),
            now: vec![0; (ranks * schedule.strands()) as usize],
        };
        visit_steps(schedule, &mut timeline);
        timeline
    }

    fn length(&self) -> u32 {
        self.now.iter().copied().max().unwrap_or(0)
    }

    fn add(&mut self, who: StrandId, step: &Step, sent: Option<u32>) -> u32 {
        let now = &mut self.now[(who.strand * self.ranks + who.rank.0) as usize];
        let time = sent.map_or(*now, |sent| (*now).max(sent + 1));
        *now = time + 1;
        let step = step.clone();
        self.events.push(Event { who, step, time, sent });
        time
    }
}

impl StepVisitor for Timeline {
    type Message = u32;

    fn send(&mut self, who: StrandId, step: &Step) -> u32 {
        self.add(who, step, None)
    }

    fn receive(&mut self, who: StrandId, step: &Step, sent: u32) {
        self.add(who, step, Some(sent));
    }

    fn local(&mut self, who: StrandId, step: &Step) {
        self.add(who, step, None);
    }
}

/// A table of `schedule`'s steps for each strand: a column per rank, time downwards, split to fit a
/// terminal. The last line is its [`PlanStatistics`].
#[must_use]
pub fn table(schedule: &dyn Schedule, algorithm: Option<Algorithm>) -> String {
    let timeline = Timeline::of(schedule);
    let mut text = String::new();
    text.push_str(&heading(schedule, algorithm));
    if schedule.in_place() {
        text.push_str(", also in place");
    }
    text.push_str("\nI input, O output, S scratch, P partial results; →3 is sent to rank 3, ←3 comes from rank 3\n");
    let mut cells = vec![vec![String::new(); timeline.length() as usize]; timeline.now.len()];
    for event in &timeline.events {
        cells[(event.who.strand * timeline.ranks + event.who.rank.0) as usize][event.time as usize] =
            short(&event.step);
    }
    for (strand, columns) in cells.chunks(timeline.ranks as usize).enumerate() {
        if schedule.strands() > 1 {
            let _ = write!(text, "\nstrand {strand}");
        }
        text.push('\n');
        columns_of(&mut text, columns);
    }
    let _ = writeln!(text, "\n{}", PlanStatistics::of(schedule));
    text
}

fn heading(schedule: &dyn Schedule, algorithm: Option<Algorithm>) -> String {
    let shape = schedule.shape();
    let mut text = String::new();
    if let Some(algorithm) = algorithm {
        let _ = write!(text, "{algorithm} ");
    }
    let plural = if shape.blocks == 1 { "" } else { "s" };
    let _ = write!(
        text,
        "{} of {} ranks in {} block{plural}",
        shape.collective,
        shape.ranks(),
        shape.blocks
    );
    if shape.collective.has_root() {
        let _ = write!(text, ", root {}", shape.root);
    }
    text
}

fn columns_of(text: &mut String, columns: &[Vec<String>]) {
    let width = |cell: &String| cell.chars().count();
    let widest = columns
        .iter()
        .flatten()
        .map(width)
        .max()
        .unwrap_or(0)
        .max("rank 00000".len());
    let beside = ((WIDTH - 5) / (widest + 2)).max(1);
    for (group, ranks) in columns.chunks(beside).enumerate() {
        let mut line = "time ".to_owned();
        for rank in 0..ranks.len() {
            let _ = write!(line, "  {:widest$}", format!("rank {}", group * beside + rank));
        }
        let _ = writeln!(text, "{}", line.trim_end());
        let rows = ranks
            .iter()
            .filter_map(|cells| cells.iter().rposition(|cell| !cell.is_empty()))
            .max();
        for time in 0..rows.map_or(0, |last| last + 1) {
            let mut line = format!("{time:>5}");
            for cells in ranks {
                let _ = write!(line, "  {:widest$}", cells[time]);
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
    }
}

fn short(step: &Step) -> String {
    match step {
        Step::Send { to, span } => format!("{} →{to}", blocks(*span)),
        Step::Recv { from, into } => format!("{} ←{from}", blocks(*into)),
        Step::RecvReduce { from, with, into, .. } => format!("{}={}+←{from}", blocks(*into), blocks(*with)),
        Step::Copy { from, into } => format!("{}={}", blocks(*into), blocks(*from)),
        Step::Reduce { sources, into } => {
            let mut text = format!("{}=", blocks(*into));
            let follow =
                |a: &Span, b: &Span| a.place == b.place && a.blocks == b.blocks && a.first.wrapping_add(1) == b.first;
            for (index, run) in sources.chunk_by(follow).enumerate() {
                let plus = if index > 0 { "+" } else { "" };
                let _ = match run {
                    [first, _, .., last] => write!(text, "{plus}{}+…+{}", blocks(*first), blocks(*last)),
                    _ => write!(
                        text,
                        "{plus}{}",
                        run.iter().map(|span| blocks(*span)).collect::<Vec<_>>().join("+")
                    ),
                };
            }
            text
        }
    }
}

fn blocks(span: Span) -> String {
    let Span { place, first, blocks } = span;
    let place = match place {
        PlanMemory::Input => 'I',
        PlanMemory::Output => 'O',
        PlanMemory::Scratch => 'S',
        PlanMemory::Partial => 'P',
    };
    match blocks {
        0 => "·".to_owned(),
        1 => format!("{place}{first}"),
        _ => format!("{place}{first}..{}", u64::from(first) + u64::from(blocks)),
    }
}

/// Dimensions in SVG units: width of a unit of time, height of a strand; margins.
const STEP: u32 = 88;
const STRAND: u32 = 28;
const LEFT: u32 = 72;
const TOP: u32 = 56;

/// Colours of strands, legible on white and for colour-blind readers.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// The messages of `schedule` over time, as a self-contained SVG image: a row per rank, an arrow
/// per message, a mark per step (filled where it reduces) with its text as tooltip.
#[must_use]
pub fn svg(schedule: &dyn Schedule, algorithm: Option<Algorithm>) -> String {
    let timeline = Timeline::of(schedule);
    let strands = schedule.strands();
    let place = Placing {
        lane: STRAND * (strands + 1),
    };
    let (width, height) = (LEFT + timeline.length() * STEP, TOP + timeline.ranks * place.lane + 12);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<defs>\n"
    );
    for (index, colour) in COLOURS.iter().enumerate().take(strands as usize) {
        let _ = writeln!(
            svg,
            "<marker id=\"arrow{index}\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0 8 4 0 8z\" fill=\"{colour}\"/></marker>"
        );
    }
    let _ = writeln!(
        svg,
        "</defs>\n<text x=\"12\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{}</text>",
        heading(schedule, algorithm)
    );
    let _ = writeln!(
        svg,
        "<text x=\"12\" y=\"36\" fill=\"#555\">Time goes to the right. I input, O output, S scratch, P partial results; a filled mark reduces.{}</text>",
        if strands > 1 { " Each strand has a colour." } else { "" }
    );
    for rank in 0..timeline.ranks {
        let y = TOP + rank * place.lane + place.lane / 2;
        let _ = writeln!(
            svg,
            "<text x=\"12\" y=\"{}\">rank {rank}</text><path d=\"M{LEFT} {y}H{width}\" stroke=\"#ddd\"/>",
            y + 4
        );
    }
    for event in &timeline.events {
        message(&mut svg, place, event);
    }
    for event in &timeline.events {
        mark(&mut svg, place, event);
    }
    svg.push_str("</svg>\n");
    svg
}

#[derive(Clone, Copy)]
struct Placing {
    lane: u32,
}

impl Placing {
    fn x(self, time: u32) -> u32 {
        LEFT + time * STEP + STEP / 2
    }

    fn y(self, strand: u32, rank: Rank) -> u32 {
        TOP + rank.0 * self.lane + STRAND * (strand + 1)
    }

    fn colour(self, strand: u32) -> usize {
        strand as usize % COLOURS.len()
    }
}

fn message(svg: &mut String, place: Placing, event: &Event) {
    let StrandId { strand, rank } = event.who;
    let (Step::Recv { from, .. } | Step::RecvReduce { from, .. }, Some(sent)) = (&event.step, event.sent) else {
        return;
    };
    let (x1, y1) = (f64::from(place.x(sent)), f64::from(place.y(strand, *from)));
    let (x2, y2) = (f64::from(place.x(event.time)), f64::from(place.y(strand, rank)));
    let short = 1.0 - 6.0 / (x2 - x1).hypot(y2 - y1);
    let (x, y) = (x1 + (x2 - x1) * short, y1 + (y2 - y1) * short);
    let index = place.colour(strand);
    let colour = COLOURS[index];
    let _ = writeln!(
        svg,
        "<path d=\"M{x1} {y1}L{x:.1} {y:.1}\" stroke=\"{colour}\" marker-end=\"url(#arrow{index})\"><title>rank {from} to rank {rank}</title></path>"
    );
}

fn mark(svg: &mut String, place: Placing, event: &Event) {
    let StrandId { strand, rank } = event.who;
    let (x, y) = (place.x(event.time), place.y(strand, rank));
    let colour = COLOURS[place.colour(strand)];
    let fill = if matches!(event.step, Step::RecvReduce { .. } | Step::Reduce { .. }) {
        colour
    } else {
        "#fff"
    };
    // Arrows leave to the right: labels of sends are before the mark, others behind it.
    let (label, anchor, at) = match &event.step {
        Step::Send { span, .. } => (blocks(*span), "end", x - 8),
        Step::Recv { into, .. }
        | Step::RecvReduce { into, .. }
        | Step::Reduce { into, .. }
        | Step::Copy { into, .. } => (blocks(*into), "start", x + 8),
    };
    let _ = writeln!(
        svg,
        "<g><title>rank {rank}: {}</title><circle cx=\"{x}\" cy=\"{y}\" r=\"4.5\" fill=\"{fill}\" stroke=\"{colour}\"/>\
         <text x=\"{at}\" y=\"{}\" font-size=\"9\" text-anchor=\"{anchor}\" paint-order=\"stroke\" stroke=\"#fff\" stroke-width=\"2\">{label}</text></g>",
        event.step,
        y + 3
    );
}

#[cfg(test)]
mod tests {
    use super::{svg, table};
    use crate::algorithm::Algorithm;
    use crate::plan::{Collective, Schedule};
    use crate::types::Rank;

    fn schedule(algorithm: Algorithm, collective: Collective, ranks: u32) -> Box<dyn Schedule> {
        let order: Vec<_> = (0..ranks).map(Rank).collect();
        algorithm.schedule(collective, &order, Rank(0)).expect("a schedule")
    }

    #[test]
    fn tables() {
        let drawn = [
            (Algorithm::Ring, Collective::AllReduce, 4),
            (Algorithm::DoubleBinaryTree, Collective::AllReduce, 8),
            (Algorithm::HalvingDoubling, Collective::ReduceScatter, 6),
            (Algorithm::FullMesh, Collective::ReduceScatter, 5),
            (Algorithm::Tree, Collective::Barrier, 4),
        ]
        .map(|(algorithm, collective, ranks)| table(&*schedule(algorithm, collective, ranks), Some(algorithm)));
        insta::assert_snapshot!(drawn.join("\n"));
    }

    #[test]
    fn tables_are_not_wider_than_a_terminal() {
        let text = table(&*schedule(Algorithm::FullMesh, Collective::AllReduce, 32), None);
        assert!(text.lines().all(|line| line.chars().count() <= super::WIDTH), "{text}");
        let heads: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("time ")).collect();
        let ranks: Vec<u32> = heads
            .iter()
            .flat_map(|head| head.split_whitespace())
            .filter_map(|word| word.parse().ok())
            .collect();
        assert!(heads.len() > 1 && ranks.into_iter().eq(0..32), "{text}");
    }

    #[test]
    fn images() {
        let schedule = schedule(Algorithm::DoubleBinaryTree, Collective::Broadcast, 4);
        insta::assert_snapshot!(svg(&*schedule, Some(Algorithm::DoubleBinaryTree)));
    }

    #[test]
    fn images_have_all_there_is() {
        for &collective in Collective::ALL {
            for algorithm in Algorithm::of(collective) {
                for ranks in [1, 2, 5, 8] {
                    let schedule = schedule(algorithm, collective, ranks);
                    let census = crate::plan::census::PlanStatistics::of(&*schedule);
                    let sum =
                        |of: fn(&crate::plan::census::Count) -> u64| census.ranks.iter().map(of).sum::<u64>() as usize;
                    let image = svg(&*schedule, Some(algorithm));
                    assert_eq!(image.matches("marker-end").count(), sum(|count| count.sends), "{image}");
                    assert_eq!(image.matches("<circle").count(), sum(|count| count.steps), "{image}");
                    let size = |what: &str| {
                        image
                            .split(what)
                            .nth(1)
                            .and_then(|rest| rest.split('"').next()?.parse::<f64>().ok())
                    };
                    let (width, height) = (
                        size(" width=\"").expect("a width"),
                        size(" height=\"").expect("a height"),
                    );
                    for (name, limit) in [(" cx=\"", width), (" cy=\"", height)] {
                        let inside = |text: &str| {
                            text.split('"')
                                .next()
                                .and_then(|n| n.parse().ok())
                                .is_some_and(|at: f64| at > 0.0 && at < limit)
                        };
                        assert!(image.split(name).skip(1).all(inside), "{image}");
                    }
                }
            }
        }
    }
}

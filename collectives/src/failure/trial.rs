//! How the members of a group come to one verdict, without clock or sockets.
//!
//! An engine that is stuck has its rank *ask* all members what they are doing; those who do not answer in time are silent, and [`judge`] makes a *finding* of it. A finding is an opinion. A *verdict* ends the group: it comes of a death, of
//! a member that gives up, or of another member's verdict. Whoever learns of one tells all, and whoever learns of a weightier one tells that: so all end with the weightiest that anybody knew. A verdict is *settled* when all who can have
//! said it, or [`SETTLE`] after the first was known; then it stays.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::judge::{Testimony, judge};
use super::message::{MAX_REASON, Message};
use super::verdict::{Cause, Verdict};
use super::watch::{Report, Watch};
use crate::types::Rank;

/// How long members may take to agree on a verdict. It is a matter of a round trip, where all who should answer do.
pub const SETTLE: Duration = Duration::from_millis(200);
/// How long an engine has to report, when it is asked, at most. One that is driven does at once, or when its thread gets a processor; one that does not is said to be idle.
const PAUSE: Duration = Duration::from_secs(1);

/// How long links are tried, at most: a link that works takes a round trip, and its other end may have to wait for a processor.
const TRIAL: Duration = Duration::from_millis(100);

/// A message, and to whom: none is to all others.
pub(crate) type Post = (Option<Rank>, Message);

/// As it will be when it has travelled, so that all know it alike.
fn one_line(text: &str) -> String {
    let text = &text[..text.floor_char_boundary(MAX_REASON)];
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What is known of a member.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
enum Standing {
    #[default]
    Here,
    Left,
    Dead(String),
}

#[derive(Clone, Debug, Default)]
struct Mark {
    standing: Standing,
    /// The verdict it has said last.
    said: Option<Verdict>,
}

/// This rank's questions to all.
#[derive(Debug)]
struct Hearing {
    number: u32,
    /// When who has not answered is silent.
    until: Instant,
    /// When this rank's own engine has had its time, if it has not reported.
    own: Instant,
    answers: Vec<Option<Report>>,
}

/// A group's failure, as one member knows it.
#[derive(Debug)]
pub(crate) struct Trial {
    me: Rank,
    members: Vec<Mark>,
    watch: Arc<Watch>,
    hearing: Option<Hearing>,
    questions: u32,
    /// Whom this rank owes an answer, to which question, and when.
    asked: Vec<(Rank, u32, Instant)>,
    finding: Option<Verdict>,
    verdict: Option<Verdict>,
    /// Until when the verdict may change.
    until: Option<Instant>,
    settled: bool,
}

impl Trial {
    pub(crate) fn new(me: Rank, ranks: usize, watch: Watch) -> Self {
        Self {
            me,
            members: vec![Mark::default(); ranks],
            watch: Arc::new(watch),
            hearing: None,
            questions: 0,
            asked: Vec::new(),
            finding: None,
            verdict: None,
            until: None,
            settled: false,
        }
    }

    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// The verdict, when it is settled.
    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref().filter(|_| self.settled)
    }

    /// Whether there is a verdict, settled or not.
    pub(crate) fn failed(&self) -> bool {
        self.verdict.is_some()
    }

    /// Whether a member has left.
    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.members[rank.index()].standing == Standing::Left
    }

    /// Whether an investigation is under way.
    pub(crate) fn hears(&self) -> bool {
        self.hearing.is_some()
    }

    /// What the last investigation found.
    pub(crate) fn finding(&self) -> Option<&Verdict> {
        self.finding.as_ref()
    }

    /// Members that cannot be in a group made of what is left: the dead, and whom the verdict excludes.
    pub(crate) fn excluded(&self) -> Vec<Rank> {
        let dead = |(rank, mark): (usize, &Mark)| match mark.standing {
            Standing::Dead(_) => Some(Rank(rank as u32)),
            _ => None,
        };
        let judged = self.verdict().and_then(|verdict| verdict.cause.excluded());
        self.members.iter().enumerate().filter_map(dead).chain(judged).collect()
    }

    /// A member's process has ended.
    pub(crate) fn died(&mut self, rank: Rank, how: &str, now: Instant, out: &mut Vec<Post>) {
        let how = one_line(how);
        self.members[rank.index()].standing = Standing::Dead(how.clone());
        let cause = Cause::Died { rank, how };
        self.convict(Verdict { cause, stuck: None }, now, out);
        self.tick(now, out);
    }

    /// A member has left the group.
    pub(crate) fn left(&mut self, rank: Rank, now: Instant, out: &mut Vec<Post>) {
        let standing = &mut self.members[rank.index()].standing;
        if *standing == Standing::Here {
            *standing = Standing::Left;
        }
        self.tick(now, out);
    }

    /// Asks all what they are doing, and which of their links work if that is the question, and makes a finding of what they have said within `window`.
    pub(crate) fn investigate(&mut self, window: Duration, links: bool, now: Instant, out: &mut Vec<Post>) {
        if self.hearing.is_some() || self.failed() {
            return;
        }
        self.finding = None;
        let pause = PAUSE.min(window / 2);
        self.want_links(links, pause);
        self.call();
        self.questions = self.questions.wrapping_add(1);
        self.hearing = Some(Hearing {
            number: self.questions,
            until: now + window,
            own: now + pause,
            answers: vec![None; self.members.len()],
        });
        let ask = Message::Ask {
            number: self.questions,
            pause_ms: pause.as_millis() as u32,
            links,
        };
        out.push((None, ask));
    }

    /// Ends the group: with what the last investigation found, or with `reason`. If it has ended already, it was for another reason.
    pub(crate) fn give_up(&mut self, reason: &str, now: Instant, out: &mut Vec<Post>) {
        if self.failed() {
            return;
        }
        let verdict = self.finding.clone().unwrap_or_else(|| Verdict {
            cause: Cause::Aborted {
                rank: self.me,
                reason: one_line(reason),
            },
            stuck: None,
        });
        self.convict(verdict, now, out);
        self.tick(now, out);
    }

    /// A member has said something. What makes no sense in a group of this size is ignored.
    pub(crate) fn receive(&mut self, from: Rank, message: Message, now: Instant, out: &mut Vec<Post>) {
        match message {
            Message::Ask {
                number,
                pause_ms,
                links,
            } => {
                let known = self.watch.look();
                if known.begun == known.finished && !self.watch.exchanges() {
                    // It waits for nothing, whoever drives it.
                    let report = Report {
                        waits: Some(Vec::new()),
                        ..known
                    };
                    out.push((Some(from), Message::Answer { number, report }));
                    return;
                }
                let pause = Duration::from_millis(pause_ms.into()).min(PAUSE);
                self.want_links(links, pause);
                self.call();
                // One question of each is enough: a later one takes the place of an earlier.
                self.asked.retain(|(who, ..)| *who != from);
                self.asked.push((from, number, now + pause));
            }
            Message::Answer { number, report } => {
                if let Some(hearing) = self.hearing.as_mut().filter(|hearing| hearing.number == number) {
                    hearing.answers[from.index()] = Some(report);
                }
            }
            Message::Verdict(verdict) => {
                let ranks = self.members.len();
                if verdict.cause.culprit().index() < ranks && !self.settled {
                    self.members[from.index()].said = Some(verdict.clone());
                    self.convict(verdict, now, out);
                }
            }
        }
        self.tick(now, out);
    }

    /// When [`tick`](Self::tick) is due, unless the engine reports before.
    pub(crate) fn due(&self) -> Option<Instant> {
        let hearing = self.hearing.as_ref().map(|hearing| {
            let answered = self.answered(hearing);
            if answered { hearing.own } else { hearing.until }
        });
        let asked = self.asked.iter().map(|(.., due)| *due);
        let settling = self.until.filter(|_| !self.settled);
        asked.chain(hearing).chain(settling).min()
    }

    /// Does what is due.
    pub(crate) fn tick(&mut self, now: Instant, out: &mut Vec<Post>) {
        let watch = &self.watch;
        let reported = !watch.asked();
        self.asked.retain(|(who, number, due)| {
            let answers = reported || now >= *due;
            if answers {
                let (number, report) = (*number, watch.look());
                out.push((Some(*who), Message::Answer { number, report }));
            }
            !answers
        });
        let over =
            |hearing: &Hearing| now >= hearing.until || (self.answered(hearing) && (reported || now >= hearing.own));
        if self.hearing.as_ref().is_some_and(over)
            && let Some(hearing) = self.hearing.take()
        {
            self.finding = self.judge(hearing);
        }
        if let Some(verdict) = &self.verdict
            && !self.settled
        {
            let excluded = verdict.cause.excluded();
            let agreed = |(rank, mark): (usize, &Mark)| {
                let rank = Rank(rank as u32);
                rank == self.me
                    || mark.standing != Standing::Here
                    || excluded == Some(rank)
                    || mark.said.as_ref() == Some(verdict)
            };
            self.settled = self.members.iter().enumerate().all(agreed) || self.until.is_some_and(|until| now >= until);
        }
    }

    /// Has the engine try its links before it reports, if that is wanted.
    fn want_links(&self, wanted: bool, pause: Duration) {
        if wanted {
            self.watch.want_links(TRIAL.min(pause / 2));
        }
    }

    /// Has the engine report, if it has not been called and not answered yet.
    fn call(&self) {
        let called = self.hearing.is_some() || !self.asked.is_empty();
        if !called {
            self.watch.ask();
        }
    }

    /// Whether everybody who can has answered.
    fn answered(&self, hearing: &Hearing) -> bool {
        let answers = self.members.iter().zip(&hearing.answers).enumerate();
        let mut open = answers.filter(|(rank, (mark, answer))| {
            *rank != self.me.index() && mark.standing == Standing::Here && answer.is_none()
        });
        open.next().is_none()
    }

    fn judge(&self, hearing: Hearing) -> Option<Verdict> {
        let testimony = |(rank, answer): (usize, Option<Report>)| match (&self.members[rank].standing, answer) {
            (Standing::Dead(how), _) => Testimony::Dead(how.clone()),
            _ if rank == self.me.index() => Testimony::Says(self.watch.look()),
            (Standing::Left, _) => Testimony::Left,
            (Standing::Here, Some(report)) => Testimony::Says(report),
            (Standing::Here, None) => Testimony::Silent,
        };
        let testimonies: Vec<_> = hearing.answers.into_iter().enumerate().map(testimony).collect();
        judge(&testimonies)
    }

    /// Takes a verdict, and tells all if it is news.
    fn convict(&mut self, verdict: Verdict, now: Instant, out: &mut Vec<Post>) {
        if self.settled {
            return;
        }
        let before = self.verdict.take();
        let after = match &before {
            Some(before) => before.clone().weightier(verdict),
            None => verdict,
        };
        if before.as_ref() != Some(&after) {
            out.push((None, Message::Verdict(after.clone())));
        }
        self.verdict = Some(after);
        self.until.get_or_insert(now + SETTLE);
        self.watch.fail();
    }
}

#[cfg(test)]
#[path = "trial_tests.rs"]
mod tests;

//! The state of a long measurement, on one line of a terminal that the next state replaces.

use std::cell::RefCell;
use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// The line on stderr. It is shown on a terminal only, and cleared when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: bool,
    total: usize,
    noun: &'static str,
    began: Instant,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    done: usize,
    current: String,
    /// The figure of the last part that has one.
    figure: String,
}

impl Progress {
    /// Of `total` parts, each a `noun`; with `none`, nothing is shown on a terminal either.
    pub(crate) fn begin(total: usize, noun: &'static str, none: bool) -> Progress {
        Progress {
            shown: !none && stderr().is_terminal(),
            total,
            noun,
            began: Instant::now(),
            state: RefCell::default(),
        }
    }

    /// The part being measured now.
    pub(crate) fn set_current(&self, current: String) {
        self.state.borrow_mut().current = current;
        self.draw();
    }

    /// A part is done, with this figure.
    pub(crate) fn done_one(&self, figure: Option<String>) {
        let mut state = self.state.borrow_mut();
        state.done += 1;
        state.figure = figure.unwrap_or_else(|| std::mem::take(&mut state.figure));
    }

    /// Runs `print` with the line cleared, as it may print to the same terminal.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.clear();
        let result = print();
        self.draw();
        result
    }

    fn draw(&self) {
        let state = &*self.state.borrow();
        if self.shown && !state.current.is_empty() {
            // Without automatic wrap: what wrapped could not be cleared. The terminal may be gone.
            let line = state.line(self.total, self.noun, self.began.elapsed());
            let _ = write!(stderr(), "\r\x1b[K\x1b[?7l{line}\x1b[?7h");
        }
    }

    fn clear(&self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

impl State {
    fn line(&self, total: usize, noun: &str, elapsed: Duration) -> String {
        let State { done, current, figure } = self;
        let mut line = format!("{done}/{total} {noun}: {current}");
        if !figure.is_empty() {
            line.push_str(&format!(", last {figure}"));
        }
        if *done > 0 {
            // Parts take about as long as each other.
            let left = elapsed.as_secs_f64() / *done as f64 * total.saturating_sub(*done) as f64;
            line.push_str(&format!(", about {left:.0} s left"));
        }
        line
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_the_last_figure_and_the_time_left() {
        let progress = Progress::begin(4, "sizes", true);
        progress.set_current("64 B".into());
        let line = |elapsed| progress.state.borrow().line(4, "sizes", Duration::from_secs(elapsed));
        assert_eq!(line(9), "0/4 sizes: 64 B");
        progress.done_one(Some("2.5 GB/s".into()));
        progress.done_one(None);
        assert_eq!(line(6), "2/4 sizes: 64 B, last 2.5 GB/s, about 6 s left");
    }
}

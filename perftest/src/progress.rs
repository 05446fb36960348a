//! The state of a long measurement, on one line of a terminal that the next state replaces.

use std::cell::RefCell;
use std::io::{IsTerminal, Write, stderr};

/// The line on stderr. It is shown on a terminal only, and cleared when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: bool,
    total: usize,
    noun: &'static str,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    done: usize,
    current: String,
}

impl Progress {
    /// Of `total` parts, each a `noun`; with `none`, nothing is shown on a terminal either.
    pub(crate) fn begin(total: usize, noun: &'static str, none: bool) -> Progress {
        Progress {
            shown: !none && stderr().is_terminal(),
            total,
            noun,
            state: RefCell::default(),
        }
    }

    /// The part being measured now.
    pub(crate) fn set_current(&self, current: String) {
        self.state.borrow_mut().current = current;
        self.draw();
    }

    pub(crate) fn done_one(&self) {
        self.state.borrow_mut().done += 1;
    }

    /// Runs `print` with the line cleared, as it may print to the same terminal.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.clear();
        let result = print();
        self.draw();
        result
    }

    fn draw(&self) {
        let State { done, current } = &*self.state.borrow();
        if self.shown && !current.is_empty() {
            // Without automatic wrap: what wrapped could not be cleared. The terminal may be gone.
            let (total, noun) = (self.total, self.noun);
            let _ = write!(stderr(), "\r\x1b[K\x1b[?7l{done}/{total} {noun}: {current}\x1b[?7h");
        }
    }

    fn clear(&self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

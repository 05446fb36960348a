//! Second tries of rows of programs that run under time-outs.
//!
//! A machine that does not schedule a program for longer than all its retries fails a row that finds nothing wrong. A row that fails is told, and tried once more; more than a few failures are no
//! accident, and stay.

/// As many rows of a run are tried again.
const MOST: usize = 3;

/// The second tries that a run has left.
#[derive(Debug)]
pub struct SecondTries {
    left: usize,
}

impl Default for SecondTries {
    fn default() -> Self {
        Self { left: MOST }
    }
}

impl SecondTries {
    /// Takes one. Whether there was one left.
    pub fn take(&mut self) -> bool {
        let taken = self.left.checked_sub(1);
        self.left = taken.unwrap_or(0);
        taken.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_a_few_and_then_none() {
        let mut tries = SecondTries::default();
        assert_eq!((0..MOST + 3).filter(|_| tries.take()).count(), MOST);
    }
}

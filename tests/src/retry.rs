//! Retries of rows that run under timeouts: a busy machine may not schedule a program for longer
//! than all its retransmissions. A failed row is reported and retried once; more than `MAX_RETRIES`
//! failures are not chance, and stay.

/// Rows of a run that may be retried.
const MAX_RETRIES: usize = 3;

/// The retries that a run has left.
#[derive(Debug)]
pub struct RetryBudget {
    left: usize,
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self { left: MAX_RETRIES }
    }
}

impl RetryBudget {
    /// Takes a retry; false when none is left.
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
    fn the_budget_is_limited() {
        let mut tries = RetryBudget::default();
        assert_eq!((0..MAX_RETRIES + 3).filter(|_| tries.take()).count(), MAX_RETRIES);
    }
}

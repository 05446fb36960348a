//! Running a test on its devices: what the attribute expands to.

use std::array;

use doorbell::Context;

use crate::{Devices, Error};

/// What a test returns.
pub trait Outcome {
    /// Whether the test failed, as [`std::process::Termination`] reports it.
    fn is_failure(&self) -> bool;
}

impl Outcome for () {
    fn is_failure(&self) -> bool {
        false
    }
}

impl<T: Outcome, E> Outcome for Result<T, E> {
    fn is_failure(&self) -> bool {
        self.as_ref().map_or(true, T::is_failure)
    }
}

impl Devices {
    /// Runs a test on as many devices as it takes, and returns what it returns.
    ///
    /// ```
    /// doorbell_test::Devices::new().drop(0.01).run(|[a, b]| {
    ///     assert_ne!(a.default_gid(1).unwrap().gid, b.default_gid(1).unwrap().gid);
    /// });
    /// ```
    ///
    /// # Panics
    /// When the devices cannot be opened, and when the test does.
    pub fn run<const N: usize, R: Outcome>(self, test: impl FnOnce([Context; N]) -> R) -> R {
        let mut devices = ready(self.build());
        let contexts = array::from_fn(|_| ready(devices.open()));
        let returned = test(contexts);
        if returned.is_failure() {
            devices.fail();
        }
        returned
    }
}

fn ready<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("doorbell-test: {error}"))
}

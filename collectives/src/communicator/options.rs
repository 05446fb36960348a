//! Options of a communicator.

use std::path::PathBuf;
use std::time::Duration;

use super::CollectiveError;
use crate::executor::Config;
use crate::topology;
use crate::tune::{Overrides, calibrate};

/// Options of a communicator. [`config`](Self::config) is the same on all ranks; for choices of
/// algorithms all ranks follow rank 0.
#[derive(Clone, Debug)]
pub struct Options {
    /// Channels, strands and message lengths.
    pub config: Config,
    /// Default timeout of operations (default 30 s).
    pub deadline: Duration,
    /// Whether reduction orders do not depend on how an operation is cut (default: no).
    pub deterministic: bool,
    /// Whether a thread drives started operations (default: no; a thread that waits or tests does).
    pub progress_thread: bool,
    /// Whether connections, copies and reductions are measured at creation, for the cost model
    /// (default: yes): [`Communicator::calibrate`](super::Communicator::calibrate). Otherwise costs
    /// are those of the tuning file, or of the soft device between processes of one host.
    pub calibrate: bool,
    /// Forced choices.
    pub overrides: Overrides,
    /// A tuning file.
    pub tuning_file: Option<PathBuf>,
    /// The location of this rank on its host and the links of its GPU, from
    /// [`Host::member`](crate::topology::Host::member) (default: unknown): rings connect near
    /// ranks. The host name is the [`Group`](crate::bootstrap::Group)'s.
    pub location: Option<topology::Member>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            config: Config::default(),
            deadline: Duration::from_secs(30),
            deterministic: false,
            progress_thread: false,
            calibrate: true,
            overrides: Overrides::default(),
            tuning_file: None,
            location: None,
        }
    }
}

impl Options {
    /// The defaults with the environment's overrides: see [`Overrides::from_environment`]
    /// and [`calibrate`].
    ///
    /// # Errors
    /// A variable has an invalid value.
    pub fn from_env() -> Result<Self, CollectiveError> {
        let (overrides, tuning_file) = Overrides::from_environment()?;
        Ok(Self {
            calibrate: calibrate(doorbell_trust::variable)?,
            overrides,
            tuning_file,
            ..Self::default()
        })
    }
}

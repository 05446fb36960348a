//! How a communicator is made.

use std::path::PathBuf;
use std::time::Duration;

use super::CollectiveError;
use crate::executor::Config;
use crate::topology;
use crate::tune::{Overrides, mapped};

/// How a communicator is made. All ranks say the same of [`config`](Self::config); of what decides how operations are done, all follow rank 0.
#[derive(Clone, Debug)]
pub struct Options {
    /// Channels, strands, how long messages are, and whether ranks of one host store short ones into each other's memory.
    pub config: Config,
    /// How long an operation may take, if it says nothing else (default 30 s).
    pub deadline: Duration,
    /// Whether all operations keep to an order of reduction that does not depend on how they are cut (default: no).
    pub deterministic: bool,
    /// Whether a thread of its own drives operations that were started (default: no; they are driven while somebody waits or tests).
    pub progress_thread: bool,
    /// Whether connections, copies and reductions are measured at the start, for the costs that choices are made by (default: yes): [`Communicator::calibrate`](super::Communicator::calibrate). Else they are those of the tuning file, or of a userspace device between processes of one host.
    pub calibrate: bool,
    /// What is not to be chosen.
    pub overrides: Overrides,
    /// A tuning file.
    pub tuning_file: Option<PathBuf>,
    /// Where this rank is on its host, and what its GPU is joined to, such as [`Host::member`](crate::topology::Host::member) says of a GPU (default: nothing is known). All ranks hear of it, and rings go through near ones; the
    /// host's name in it is that of the [`Group`](crate::bootstrap::Group).
    pub place: Option<topology::Member>,
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
            place: None,
        }
    }
}

impl Options {
    /// The defaults, and what the environment forces: see [`Overrides::from_environment`] and [`mapped`].
    ///
    /// # Errors
    /// A variable that says nothing that can be done.
    pub fn from_env() -> Result<Self, CollectiveError> {
        let (overrides, tuning_file) = Overrides::from_environment()?;
        let mapped = mapped(|name| std::env::var_os(name))?;
        Ok(Self {
            config: Config {
                mapped,
                ..Config::default()
            },
            overrides,
            tuning_file,
            ..Self::default()
        })
    }
}

//! Operations on segments, for GPU collectives staged through host memory.

use std::sync::Arc;

use super::call::Reduction;
use super::collectives::misuse;
use super::data::BufferRef;
use super::{CollectiveError, Communicator};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::reference::Case;
use crate::types::{DataType, Rank};

impl Communicator {
    pub(crate) fn segment(&self, bytes: usize) -> Result<Arc<Segment>, CollectiveError> {
        Ok(self.shared.with(|state| state.engine.allocate(bytes.max(1)))?)
    }

    pub(crate) fn failure_error(&self) -> CollectiveError {
        self.shared.why()
    }

    /// Runs an operation on segments of this communicator, from their beginnings.
    ///
    /// # Errors
    /// As of any operation; [`CollectiveError::Misuse`] where a segment is too short.
    pub(crate) fn run_staged(
        &self,
        collective: Collective,
        root: Rank,
        reduction: Reduction,
        (data, count): (DataType, u64),
        input: Option<&Arc<Segment>>,
        output: Option<&Arc<Segment>>,
    ) -> Result<(), CollectiveError> {
        let case = Case {
            collective,
            ranks: self.ranks,
            root,
            count,
        };
        let fits = |segment: Option<&Arc<Segment>>, elements: u64| {
            let bytes = elements.saturating_mul(data.bytes() as u64);
            segment.map_or(0, |segment| segment.len() as u64) >= bytes
        };
        if !fits(input, case.input(self.rank)) || !fits(output, case.output(self.rank)) {
            return misuse(collective, "memory of the host is shorter than the operation");
        }
        let buffer = |segment: Option<&Arc<Segment>>| segment.map_or(BufferRef::NONE, BufferRef::segment);
        let spec = self.with_root(
            self.spec_of(collective, (data, count), buffer(input), buffer(output)),
            root,
        )?;
        let spec = match collective.reduces() {
            true => Self::with_reduction(spec, reduction)?,
            false => spec,
        };
        self.shared.run(spec, &self.settings())
    }
}

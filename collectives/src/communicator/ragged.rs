//! Collectives whose parts have different lengths (the `…_v` operations).

use super::Communicator;
use super::call::{Call, OperationSpec, Reduction};
use super::collectives::displacements;
use super::data::{Source, Target};
use crate::algorithm::Algorithm;
use crate::executor::Parts;
use crate::kernel::Element;
use crate::plan::Collective;
use crate::types::Rank;

impl Communicator {
    /// Each rank gets its part of every rank's `input`, of different lengths: `send[r]` elements go
    /// to rank r, and `receive[r]` come from it, consecutively.
    ///
    /// If two ranks disagree on a length, the communicator fails on all ranks, and the error names
    /// them and the lengths. The default protocol is [`Protocol::Simple`](crate::Protocol::Simple).
    /// As every pair exchanges lengths, no rank completes before all have begun.
    #[doc(alias = "MPI_Alltoallv")]
    pub fn all_to_all_v<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        send: &[usize],
        output: Y,
        receive: &[usize],
    ) -> Call<'_, (X, Y)> {
        self.ragged((input, send.to_vec()), (output, receive.to_vec()), None)
    }

    fn ragged<X: Source, Y: Target<Element = X::Element>>(
        &self,
        (mut input, send): (X, Vec<usize>),
        (mut output, receive): (Y, Vec<usize>),
        root: Option<Rank>,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::AllToAllV;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let ranks = self.ranks as usize;
        let ((sent, sending), (received, receiving)) = (displacements(&send), displacements(&receive));
        let spec = if let Some(root) = root.filter(|root| root.0 >= self.ranks) {
            COLLECTIVE.misuse(format!("rank {root} cannot be the root of {ranks} ranks"))
        } else if send.len() != ranks || receive.len() != ranks {
            COLLECTIVE.misuse(format!("{} and {} counts for {ranks} ranks", send.len(), receive.len()))
        } else if sending > given || receiving > wanted {
            COLLECTIVE.misuse(format!(
                "the counts are of {sending} and {receiving} elements, and there are {given} and {wanted}"
            ))
        } else if send[self.rank.index()] != receive[self.rank.index()] {
            COLLECTIVE.misuse("what a rank sends to itself is as much as it receives from itself")
        } else {
            Ok(OperationSpec {
                parts: Some(Parts {
                    send: sent,
                    receive: received,
                    root,
                }),
                ..self.spec::<X::Element>(COLLECTIVE, 0, from, into)
            })
        };
        Call::new(self, spec, (input, output))
    }

    /// All ranks get all `input`s, by rank, of different lengths: `counts`, the same on all ranks,
    /// or it fails as [`all_to_all_v`](Self::all_to_all_v) does. Directly between all pairs, by
    /// [`Protocol::Simple`](crate::Protocol::Simple) by default.
    #[doc(alias = "MPI_Allgatherv")]
    pub fn all_gather_v<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        counts: &[usize],
    ) -> Call<'_, (X, Y)> {
        // Each rank sends the same part to all others.
        const COLLECTIVE: Collective = Collective::AllToAllV;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let (receive, all) = displacements(counts);
        let spec = if counts.len() != self.ranks as usize {
            COLLECTIVE.misuse(format!("{} counts for {} ranks", counts.len(), self.ranks))
        } else if all > wanted {
            COLLECTIVE.misuse(format!("the counts are of {all} elements, and the output has {wanted}"))
        } else if counts[self.rank.index()] != given {
            COLLECTIVE.misuse(format!(
                "rank {} gives {given} elements, and its count is {}",
                self.rank,
                counts[self.rank.index()]
            ))
        } else {
            Ok(OperationSpec {
                parts: Some(Parts {
                    send: vec![(0, given as u64); self.ranks as usize],
                    receive,
                    root: None,
                }),
                ..self.spec::<X::Element>(COLLECTIVE, 0, from, into)
            })
        };
        Call::new(self, spec, (input, output))
    }

    /// Each rank gets its part of the reduction of all `input`s, of different lengths: `counts`,
    /// the same on all ranks, or it fails as [`all_to_all_v`](Self::all_to_all_v) does. By
    /// [`Algorithm::FullMesh`], which is `deterministic`; others are refused.
    #[doc(alias = "MPI_Reduce_scatter")]
    pub fn reduce_scatter_v<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        mut output: Y,
        counts: &[usize],
        op: impl Into<Reduction>,
    ) -> Call<'_, (X, Y)> {
        const COLLECTIVE: Collective = Collective::ReduceScatter;
        let ((from, given), (into, wanted)) = (input.region(), output.region());
        let (send, all) = displacements(counts);
        let spec = if counts.len() != self.ranks as usize {
            COLLECTIVE.misuse(format!("{} counts for {} ranks", counts.len(), self.ranks))
        } else if all != given {
            COLLECTIVE.misuse(format!("the counts are of {all} elements, and the input has {given}"))
        } else if counts[self.rank.index()] != wanted {
            COLLECTIVE.misuse(format!(
                "rank {} gets {wanted} elements, and its count is {}",
                self.rank,
                counts[self.rank.index()]
            ))
        } else {
            let mut receive = vec![(0, 0); self.ranks as usize];
            receive[0] = (0, wanted as u64);
            let spec = OperationSpec {
                bytes: (all as u64).saturating_mul(X::Element::TYPE.bytes() as u64),
                parts: Some(Parts {
                    send,
                    receive,
                    root: None,
                }),
                ..self.spec::<X::Element>(COLLECTIVE, 0, from, into)
            };
            Self::with_reduction(spec, op.into())
        };
        Call::new(self, spec, (input, output)).algorithm(Algorithm::FullMesh)
    }

    /// The root gets all `input`s, by rank, of different lengths: `counts`, which only the root
    /// uses. A mismatch fails as in [`all_to_all_v`](Self::all_to_all_v).
    #[doc(alias = "MPI_Gatherv")]
    pub fn gather_v<X: Source, Y: Target<Element = X::Element>>(
        &self,
        mut input: X,
        output: Y,
        counts: &[usize],
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        let (_, given) = input.region();
        let mut send = vec![0; self.ranks as usize];
        if let Some(to_root) = send.get_mut(root.index()) {
            *to_root = given;
        }
        let receive = if self.rank == root {
            counts.to_vec()
        } else {
            vec![0; self.ranks as usize]
        };
        self.ragged((input, send), (output, receive), Some(root))
    }

    /// Each rank gets its part of the root's `input`, of different lengths: `counts`, which only
    /// the root uses. A mismatch fails as in [`all_to_all_v`](Self::all_to_all_v).
    #[doc(alias = "MPI_Scatterv")]
    pub fn scatter_v<X: Source, Y: Target<Element = X::Element>>(
        &self,
        input: X,
        counts: &[usize],
        mut output: Y,
        root: Rank,
    ) -> Call<'_, (X, Y)> {
        let (_, wanted) = output.region();
        let mut receive = vec![0; self.ranks as usize];
        if let Some(from_root) = receive.get_mut(root.index()) {
            *from_root = wanted;
        }
        let send = if self.rank == root {
            counts.to_vec()
        } else {
            vec![0; self.ranks as usize]
        };
        self.ragged((input, send), (output, receive), Some(root))
    }
}

//! The counts of a size, and algorithm and bus bandwidth, by nccl-tests' formulas.

use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{DataType, Rank};

/// The operation on `bytes` bytes, rounded down to whole elements and parts.
pub(crate) fn case(collective: Collective, ranks: u32, root: Rank, bytes: u64, data: DataType) -> Case {
    Case {
        collective,
        ranks,
        root,
        count: bytes / data.bytes() as u64 / parts(collective, ranks),
    }
}

pub(crate) fn parts(collective: Collective, ranks: u32) -> u64 {
    match collective {
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::SendRecv
        | Collective::Barrier => 1,
        _ => u64::from(ranks.max(1)),
    }
}

/// Algorithm bandwidth and bus bandwidth in bytes per second.
pub(crate) fn bandwidths(case: &Case, data: DataType, seconds: f64) -> (f64, f64) {
    let bytes = case.count * data.bytes() as u64 * parts(case.collective, case.ranks);
    let algorithm = if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 };
    (algorithm, algorithm * factor(case.collective, case.ranks))
}

/// The factor of the bus bandwidth: the part of the size that the busiest link carries at least.
pub(crate) fn factor(collective: Collective, ranks: u32) -> f64 {
    let p = f64::from(ranks.max(1));
    match collective {
        Collective::AllReduce => 2.0 * (p - 1.0) / p,
        Collective::Broadcast | Collective::Reduce | Collective::SendRecv => 1.0,
        Collective::Barrier => 0.0,
        _ => (p - 1.0) / p,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_are_nccl_tests() {
        let bandwidths = |collective, ranks, bytes| {
            let case = case(collective, ranks, Rank(0), bytes, DataType::F32);
            bandwidths(&case, DataType::F32, 1.0)
        };
        assert_eq!(bandwidths(Collective::AllReduce, 4, 4000), (4000.0, 6000.0));
        assert_eq!(bandwidths(Collective::Broadcast, 4, 4000), (4000.0, 4000.0));
        for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll] {
            assert_eq!(bandwidths(collective, 4, 4000), (4000.0, 3000.0));
            assert_eq!(
                bandwidths(collective, 3, 4000).0,
                3996.0,
                "what does not divide is left out"
            );
        }
        assert_eq!(bandwidths(Collective::Barrier, 4, 0), (0.0, 0.0));
    }

    #[test]
    fn counts_are_of_the_whole_or_of_a_part() {
        let count = |collective| case(collective, 3, Rank(0), 4096, DataType::F64).count;
        assert_eq!(count(Collective::AllReduce), 512);
        assert_eq!(count(Collective::SendRecv), 512);
        assert_eq!(count(Collective::AllGather), 170);
    }
}

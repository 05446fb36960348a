//! Guarantees on bits: sums of 16-bit types, and results independent of how an operation is cut.

use doorbell_collectives::executor::Tuning;
use doorbell_collectives::kernel::{bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::{Algorithm, Protocol, Rank, ReduceOp};

use crate::matrix::{Mode, Team, bits};

const CUTS: [(Protocol, u32, usize); 4] = [
    (Protocol::Simple, 1, 1 << 20),
    (Protocol::Ll, 2, 500),
    (Protocol::Ll128, 2, 1100),
    (Protocol::Simple, 2, 4096),
];

/// Eight are summed in f32: the error of seven f32 additions, then one rounding.
fn sums_of_eight<T: Number>(wide: impl Fn(T) -> f64, round: impl Fn(f32) -> T) {
    const RANKS: u32 = 8;
    let mut team = Team::new(RANKS);
    let case = Case {
        collective: Collective::AllReduce,
        ranks: RANKS,
        root: Rank(0),
        count: 5003,
    };
    for algorithm in Algorithm::of(Collective::AllReduce) {
        let mode = Mode {
            algorithm,
            tuning: Tuning {
                protocol: Protocol::Simple,
                channels: 2,
                slice: 2048,
            },
            in_place: false,
        };
        team.run::<T>(&case, ReduceOp::Sum, 77, mode);
        let got = team.output::<T>(&case, Rank(0), false);
        for (index, &got) in (0..).zip(got) {
            let inputs = (0..RANKS).map(|rank| wide(input_element::<T>(77, Rank(rank), index)));
            let (sum, magnitudes) = inputs.fold((0.0, 0.0), |(sum, all), value| (sum + value, all + value.abs()));
            let off = 7.0 * f64::from(f32::EPSILON) / 2.0 * 1.001 * magnitudes;
            // Slightly beyond f32's error, as the conversion rounds as well.
            let (low, high) = (round((sum - off) as f32), round((sum + off) as f32));
            let within = wide(low)..=wide(high);
            assert!(
                within.contains(&wide(got)),
                "{algorithm}, element {index}: {} is not in {within:?}",
                wide(got)
            );
        }
    }
}

#[test]
fn sums_of_16_bits_are_rounded_once() {
    sums_of_eight::<f16>(|value| f64::from(value.to_f32()), f16::from_f32);
    sums_of_eight::<bf16>(|value| f64::from(value.to_f32()), bf16::from_f32);
}

#[test]
fn deterministic_results_do_not_depend_on_how_they_are_cut() {
    for ranks in [3, 8] {
        let mut team = Team::new(ranks);
        let mut promised = 0;
        for &collective in Collective::ALL.iter().filter(|collective| collective.reduces()) {
            let case = Case {
                collective,
                ranks,
                root: Rank(1),
                count: 2003,
            };
            for algorithm in Algorithm::of(collective).filter(|algorithm| algorithm.deterministic(collective)) {
                let mut first: Option<Vec<Vec<u8>>> = None;
                for (protocol, channels, slice) in CUTS {
                    let tuning = Tuning {
                        protocol,
                        channels,
                        slice,
                    };
                    let mode = Mode {
                        algorithm,
                        tuning,
                        in_place: false,
                    };
                    team.run::<f32>(&case, ReduceOp::Sum, 3, mode);
                    let got: Vec<_> = (0..ranks)
                        .map(|rank| bits(team.output::<f32>(&case, Rank(rank), false)).to_vec())
                        .collect();
                    let first = first.get_or_insert_with(|| got.clone());
                    assert!(
                        *first == got,
                        "{algorithm} {collective} among {ranks}, {tuning:?}: other bits than when cut otherwise"
                    );
                }
                promised += 1;
            }
        }
        assert!(
            promised >= 3,
            "every collective that reduces has an algorithm that promises it"
        );
    }
}

//! Dispatch and combine beside the plain reference, over random routings; and what is refused.

use std::time::{Duration, Instant};

use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{
    Mode, MoeError, MoeOptions, NO_EXPERT, Payload, Received, Routing, RoutingError, Shape, ShapeError, dequantise,
    reference,
};
use doorbell_collectives::{Communicator, Options, Rank};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::world;

/// How tokens choose their experts.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Skew {
    /// Any, and some choices are not made.
    Random,
    /// The first choice of all tokens is one expert.
    OneExpert,
    /// Only the experts of the last rank, as far as they suffice.
    LastRank,
}

#[derive(Clone, Debug)]
struct Layer {
    options: MoeOptions,
    skew: Skew,
    /// By rank: tokens of each operation.
    tokens: Vec<usize>,
    seed: u64,
}

/// The rows of an expert, with their source ranks.
type ExpertRows = Vec<(Rank, Vec<u8>)>;

/// Linear congruential generator with Knuth's constants, of which the upper bits are used.
struct Draw(u64);

impl Draw {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below
    }
}

impl Layer {
    fn routing(&self, rank: usize, step: u64) -> Routing {
        let shape = &self.options.shape;
        let (experts, top_k, local) = (shape.experts(), shape.top_k() as usize, shape.local_experts());
        let mut draw = Draw(self.seed ^ (rank as u64) << 32 ^ step);
        let (mut indices, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..self.tokens[rank] {
            let mut all: Vec<u32> = (0..experts).collect();
            for at in 0..all.len() {
                let other = at + draw.below(all.len() - at);
                all.swap(at, other);
            }
            match self.skew {
                Skew::Random => {}
                Skew::OneExpert => all.sort_by_key(|expert| *expert != experts / 2),
                Skew::LastRank => all.sort_by_key(|expert| *expert < experts - local),
            }
            for expert in &all[..top_k] {
                let none = self.skew == Skew::Random && draw.below(5) == 0;
                indices.push(if none { NO_EXPERT } else { i64::from(*expert) });
                weights.push(draw.below(2000) as f32 / 1000.0 - 1.0);
            }
        }
        Routing::new(shape, &indices, &weights).unwrap()
    }

    fn inputs(&self, rank: usize, step: u64) -> Vec<bf16> {
        let mut draw = Draw(self.seed ^ 0x1234 ^ (rank as u64) << 16 ^ step);
        let elements = self.tokens[rank] * self.options.shape.hidden() as usize;
        (0..elements)
            .map(|_| bf16::from_f32(draw.below(100_000) as f32 / 777.0 - 60.0))
            .collect()
    }

    /// The output of an expert for a row.
    fn expert(&self, expert: u32, row: &[u8]) -> Vec<bf16> {
        let elements = dequantise(self.options.payload, self.options.shape.hidden(), row);
        let scaled = elements
            .into_iter()
            .map(|element| element * (1.0 + expert as f32 / 8.0));
        scaled.map(bf16::from_f32).collect()
    }

    /// Runs the local experts, and returns by local expert the received rows of each source.
    fn experts(&self, received: &mut Received<'_>, rank: Rank) -> Vec<ExpertRows> {
        let shape = &self.options.shape;
        let mut seen = Vec::new();
        for local in 0..shape.local_experts() {
            let mut rows_of = Vec::new();
            for source in (0..shape.ranks()).map(Rank) {
                for row in received.rows().range(local, source) {
                    let (bytes, output) = received.with_outputs(row..row + 1);
                    output.copy_from_slice(&self.expert(shape.first_expert(rank) + local, bytes));
                    rows_of.push((source, bytes.to_vec()));
                }
            }
            let together: Vec<u8> = rows_of.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
            assert_eq!(received.expert_rows(local), together);
            assert_eq!(received.rows().of_expert(local), rows_of.len());
            seen.push(rows_of);
        }
        seen
    }

    /// Two operations after one another, then two whose dispatches overlap where the mode permits.
    /// Returns all that was received and combined.
    fn run(&self, comm: &Communicator) -> Vec<(Vec<ExpertRows>, Vec<bf16>)> {
        let rank = comm.rank();
        let layer = comm.expert_parallel(self.options).unwrap();
        let given = |step| (self.inputs(rank.index(), step), self.routing(rank.index(), step));
        let mut results = Vec::new();
        for step in 0..2 {
            let (tokens, routing) = given(step);
            let mut received = layer.dispatch(&tokens, &routing).unwrap();
            let seen = self.experts(&mut received, rank);
            let mut combined = vec![bf16::MAX; tokens.len()];
            received.combine(&mut combined).unwrap();
            results.push((seen, combined));
        }
        if self.options.mode == Mode::LowLatency {
            let [(first, first_routing), (second, second_routing)] = [given(2), given(3)];
            let sent = layer.dispatch_send(&first, &first_routing).unwrap();
            let also = layer.dispatch_send(&second, &second_routing).unwrap();
            let mut received = sent.receive().unwrap();
            let seen = self.experts(&mut received, rank);
            let combining = received.combine_send().unwrap();
            let mut received = also.receive().unwrap();
            let seen_also = self.experts(&mut received, rank);
            let mut combined = vec![bf16::MAX; first.len()];
            combining.receive(&mut combined).unwrap();
            results.push((seen, combined));
            let mut combined = vec![bf16::MAX; second.len()];
            received.combine(&mut combined).unwrap();
            results.push((seen_also, combined));
        }
        results
    }

    fn check(&self) {
        let shape = self.options.shape;
        let ranks = shape.ranks() as usize;
        let all = world::ranks(shape.ranks(), &world::options(), |comm| self.run(&comm));
        for step in 0..all[0].len() {
            let tokens: Vec<_> = (0..ranks).map(|rank| self.inputs(rank, step as u64)).collect();
            let routings: Vec<_> = (0..ranks).map(|rank| self.routing(rank, step as u64)).collect();
            let experts = reference::dispatch(&shape, self.options.payload, &tokens, &routings);
            for rank in 0..ranks {
                let (seen, combined) = &all[rank][step];
                let own = &experts[shape.first_expert(Rank(rank as u32)) as usize..][..seen.len()];
                for (seen, wanted) in seen.iter().zip(own) {
                    let wanted: Vec<_> = wanted.iter().map(|row| (row.source, row.bytes.clone())).collect();
                    assert!(*seen == wanted, "rank {rank}, step {step}: rows of {self:?}");
                }
                let wanted = reference::combine(&routings[rank], |expert, pair| {
                    let is_it = |row: &&reference::Row| row.source.index() == rank && row.pair == pair;
                    let rows: Vec<_> = experts[expert as usize].iter().filter(is_it).collect();
                    assert_eq!(rows.len(), 1, "a token once for each chosen expert");
                    self.expert(expert, &rows[0].bytes)
                });
                let bits = |all: &[bf16]| all.iter().map(|one| one.to_bits()).collect::<Vec<_>>();
                assert!(
                    bits(combined) == bits(&wanted),
                    "rank {rank}, step {step}: sums of {self:?}"
                );
            }
        }
    }
}

fn layers() -> impl Strategy<Value = Layer> {
    let shape = (1..=8_u32, 1..=4_u32, 1..=7_u32, 1..=3_u32, 1..=9_u32);
    let how = (
        prop_oneof![Just(Mode::LowLatency), Just(Mode::HighThroughput)],
        prop_oneof![Just(Payload::Bf16), Just(Payload::Fp8)],
        prop_oneof![Just(Skew::Random), Just(Skew::OneExpert), Just(Skew::LastRank)],
    );
    (shape, how, any::<u64>()).prop_map(|((ranks, local, top_k, blocks, most), (mode, payload, skew), seed)| {
        let experts = ranks * local;
        let shape = Shape::new(ranks, experts, top_k.min(experts), 128 * blocks, most).unwrap();
        let mut draw = Draw(seed);
        Layer {
            options: MoeOptions {
                shape,
                payload,
                mode,
                capacity: None,
            },
            skew,
            // None is as frequent as any other number.
            tokens: (0..ranks).map(|_| draw.below(most as usize + 1)).collect(),
            seed,
        }
    })
}

#[test]
fn random_routings_give_the_bits_of_the_plain_reference() {
    let config = Config {
        cases: 48,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[26; 32]);
    TestRunner::new_with_rng(config, rng)
        .run(&layers(), |layer| {
            layer.check();
            Ok(())
        })
        .unwrap();
}

fn options(ranks: u32, mode: Mode, tokens: u32) -> MoeOptions {
    MoeOptions {
        shape: Shape::new(ranks, 4 * ranks, 3, 128, tokens).unwrap(),
        payload: Payload::Bf16,
        mode,
        capacity: None,
    }
}

/// More rows for a peer than a send queue has slots, in both directions at once.
#[test]
fn more_rows_than_a_send_queue_has_slots_arrive() {
    for (mode, payload) in [(Mode::LowLatency, Payload::Fp8), (Mode::HighThroughput, Payload::Bf16)] {
        let layer = Layer {
            options: MoeOptions {
                payload,
                ..options(3, mode, 200)
            },
            skew: Skew::LastRank,
            tokens: vec![200, 200, 199],
            seed: 5,
        };
        layer.check();
    }
}

#[test]
fn results_that_are_dropped_free_their_areas_on_all_ranks() {
    for mode in [Mode::LowLatency, Mode::HighThroughput] {
        let layer = Layer {
            options: options(2, mode, 8),
            skew: Skew::Random,
            tokens: vec![8, 3],
            seed: 9,
        };
        world::ranks(2, &world::options(), |comm| {
            let rank = comm.rank().index();
            let of = comm.expert_parallel(layer.options).unwrap();
            let dispatch = |step| of.dispatch(&layer.inputs(rank, step), &layer.routing(rank, step));
            for step in 0..7 {
                let received = dispatch(step).unwrap();
                if step % 3 == 0 {
                    received.combine_send().map(drop).unwrap();
                }
            }
            let most = if mode == Mode::LowLatency { 2 } else { 1 };
            let held: Vec<_> = (0..most).map(|step| dispatch(step).unwrap()).collect();
            let refused = dispatch(9).unwrap_err();
            assert!(matches!(refused, MoeError::Held { held } if held == most), "{refused}");
            drop(held);
            dispatch(9).unwrap();
        });
    }
}

#[test]
fn a_capacity_that_is_exceeded_is_an_error_on_all_ranks_and_nothing_else() {
    let layer = Layer {
        options: MoeOptions {
            capacity: Some(10),
            ..options(2, Mode::HighThroughput, 8)
        },
        skew: Skew::LastRank,
        tokens: vec![2, 8],
        seed: 3,
    };
    world::ranks(2, &world::options(), |comm| {
        let rank = comm.rank().index();
        let of = comm.expert_parallel(layer.options).unwrap();
        let refused = of
            .dispatch(&layer.inputs(rank, 0), &layer.routing(rank, 0))
            .unwrap_err();
        let wanted = "rank 1 would receive 30 rows, and has memory for 10: give a larger capacity";
        assert_eq!(refused.to_string(), wanted);
        let few = Layer {
            tokens: vec![2, 1],
            ..layer.clone()
        };
        let received = of.dispatch(&few.inputs(rank, 0), &few.routing(rank, 0)).unwrap();
        assert_eq!(received.rows().len(), 9 * rank);
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_begins() {
    let mut shapes = [
        Shape::new(3, 8, 2, 128, 1),
        Shape::new(0, 8, 2, 128, 1),
        Shape::new(2, 8, 9, 128, 1),
        Shape::new(2, 8, 0, 128, 1),
        Shape::new(2, 8, 2, 130, 1),
        Shape::new(2, 8, 2, 128, 0),
        Shape::new(2, 8, 8, 128, u32::MAX),
    ]
    .into_iter();
    assert!(shapes.all(|shape| shape.is_err()));
    let errors = world::ranks(2, &world::options(), |comm| {
        let good = options(2, Mode::LowLatency, 4);
        let other = options(2, Mode::LowLatency, 4 + comm.rank().0);
        let disagree = comm.expert_parallel(other).unwrap_err();
        let ranks = comm.expert_parallel(options(3, Mode::LowLatency, 4)).unwrap_err();
        let shape = Shape::new(2, 8, 3, 136, 4).unwrap();
        let payload = Payload::Fp8;
        let hidden = comm.expert_parallel(MoeOptions { shape, payload, ..good }).unwrap_err();
        assert!(matches!(
            hidden,
            MoeError::Shape(ShapeError::Hidden { multiple: 128, .. })
        ));
        let of = comm.expert_parallel(good).unwrap();
        let foreign = Routing::new(&shape, &[0, 1, 2], &[1.0; 3]).unwrap();
        let foreign = of.dispatch(&[bf16::ZERO; 128], &foreign).unwrap_err();
        let routing = Routing::new(&good.shape, &[0, 1, 2], &[1.0; 3]).unwrap();
        let tokens = of.dispatch(&[bf16::ZERO; 127], &routing).unwrap_err();
        let twice = Routing::new(&good.shape, &[0, 1, 1], &[1.0; 3]).unwrap_err();
        assert!(matches!(twice, RoutingError::Duplicate { token: 0, expert: 1 }));
        // Nothing was begun: the communicator goes on.
        comm.barrier().wait().unwrap();
        [disagree, ranks, foreign, tokens].map(|error| error.to_string())
    });
    let wanted = [
        "the dimensions are for 3 ranks, and the communicator has 2",
        "the routing was made for other dimensions",
        "127 elements, and the routing is of 128",
    ];
    for (own, errors) in errors.iter().enumerate() {
        let disagree = format!("rank {} has other dimensions", 1 - own);
        assert!(errors[0].starts_with(&disagree), "{errors:?}");
        assert_eq!(errors[1..], wanted);
    }
}

/// Rank 1 takes part in the exchange of counts with some that no routing has.
#[test]
fn impossible_counts_end_the_operation_on_all_ranks() {
    let layer = Layer {
        options: options(3, Mode::HighThroughput, 4),
        skew: Skew::Random,
        tokens: vec![4; 3],
        seed: 1,
    };
    let errors = world::ranks(3, &world::options(), |comm| {
        let rank = comm.rank().index();
        let of = comm.expert_parallel(layer.options).unwrap();
        if rank == 1 {
            let mut counts = vec![0_u32; 12];
            counts[7] = 5;
            comm.all_gather_into(&counts, &mut vec![0; 3 * 12]).wait().unwrap();
            return comm.barrier().wait().unwrap_err().to_string();
        }
        let error = of
            .dispatch(&layer.inputs(rank, 0), &layer.routing(rank, 0))
            .unwrap_err();
        let impossible = matches!(error, MoeError::Impossible { source_rank: Rank(1) });
        // The other rank may have aborted before.
        assert!(impossible || matches!(error, MoeError::Collective(_)), "{error}");
        error.to_string()
    });
    for error in errors {
        assert!(error.contains("rank 1 has sent counts that no routing has"), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_dispatch_or_combine_is_named_within_the_deadline() {
    let deadline = Duration::from_secs(2);
    let late = Duration::from_secs(2);
    let communicator = Options {
        deadline,
        ..world::options()
    };
    for (mode, dispatches) in [
        (Mode::LowLatency, false),
        (Mode::LowLatency, true),
        (Mode::HighThroughput, true),
    ] {
        let layer = Layer {
            options: options(3, mode, 4),
            skew: Skew::Random,
            tokens: vec![4; 3],
            seed: 1,
        };
        let errors = world::ranks(3, &communicator, |comm| {
            let rank = comm.rank().index();
            let of = comm.expert_parallel(layer.options).unwrap();
            let dispatch = || of.dispatch(&layer.inputs(rank, 0), &layer.routing(rank, 0));
            let received = dispatches.then(|| dispatch().unwrap());
            let began = Instant::now();
            if rank == 1 {
                while !comm.has_failed() {
                    assert!(began.elapsed() < 10 * deadline);
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            let error = match received {
                Some(received) => received.combine(&mut vec![bf16::ZERO; 4 * 128]).unwrap_err(),
                None => dispatch().unwrap_err(),
            };
            assert!(began.elapsed() < deadline + late);
            error
        });
        for error in errors {
            let MoeError::Collective(error) = error else {
                panic!("{error}")
            };
            assert_eq!(error.culprit(), Some(Rank(1)), "{error}");
        }
    }
}

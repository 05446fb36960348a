//! The routings of all ranks, drawn from the seed: each rank knows what the others send.

use doorbell_collectives::Rank;
use doorbell_collectives::moe::Routing;
use doorbell_collectives::reference::input_element;

use super::{Layer, Skew};

/// Draws of experts and weights differ from those of the elements of tokens.
const EXPERTS: u64 = 0x6d6f_6500_0000_0000;
const WEIGHTS: u64 = 0x6d6f_6501_0000_0000;

pub(super) struct Routings(Vec<Routing>);

impl Routings {
    pub(super) fn draw(layer: &Layer) -> Self {
        let all = (0..layer.shape.ranks()).map(|rank| of_rank(layer, Rank(rank)));
        Self(all.collect())
    }

    pub(super) fn of(&self, rank: Rank) -> &Routing {
        &self.0[rank.index()]
    }

    /// Pairs from one rank to another.
    pub(super) fn pairs(&self, from: Rank, to: Rank) -> usize {
        self.of(from).pairs_for(to).iter().map(|&pairs| pairs as usize).sum()
    }

    /// By rank: the pairs that it sends to a rank.
    pub(super) fn sent(&self, from: Rank) -> Vec<usize> {
        (0..self.0.len() as u32).map(|to| self.pairs(from, Rank(to))).collect()
    }

    /// By rank: the pairs that it receives from a rank.
    pub(super) fn received(&self, to: Rank) -> Vec<usize> {
        (0..self.0.len() as u32)
            .map(|from| self.pairs(Rank(from), to))
            .collect()
    }

    /// The pairs of the rank that receives most.
    pub(super) fn most_received(&self) -> usize {
        let all = (0..self.0.len() as u32).map(|to| self.received(Rank(to)).iter().sum());
        all.max().unwrap_or(0)
    }

    /// All pairs.
    pub(super) fn all(&self) -> usize {
        self.0.iter().map(Routing::pairs).sum()
    }
}

fn of_rank(layer: &Layer, rank: Rank) -> Routing {
    let (experts, top_k) = (layer.shape.experts(), layer.shape.top_k() as usize);
    let pairs = layer.shape.max_pairs();
    // Of zipf: the sums of the proportions up to each expert.
    let sums: Vec<f64> = (1..=experts)
        .scan(0.0, |sum, expert| {
            *sum += 1.0 / f64::from(expert);
            Some(*sum)
        })
        .collect();
    let mut drawn = 0;
    let mut draw = || {
        drawn += 1;
        input_element::<u64>(layer.seed ^ EXPERTS, rank, drawn) >> 32
    };
    let mut chosen: Vec<i64> = Vec::with_capacity(pairs);
    for token in 0..layer.shape.max_tokens() as usize {
        if layer.skew == Skew::OneExpert {
            chosen.push(0);
        }
        while chosen.len() < (token + 1) * top_k {
            let expert = match layer.skew {
                Skew::Uniform | Skew::OneExpert => draw() % u64::from(experts),
                Skew::Zipf => {
                    let at = draw() as f64 / (1_u64 << 32) as f64 * sums[sums.len() - 1];
                    sums.partition_point(|sum| *sum <= at).min(sums.len() - 1) as u64
                }
            };
            let expert = expert as i64;
            if !chosen[token * top_k..].contains(&expert) {
                chosen.push(expert);
            }
        }
    }
    let weights: Vec<f32> = (0..pairs as u64)
        .map(|pair| input_element::<f32>(layer.seed ^ WEIGHTS, rank, pair) / top_k as f32)
        .collect();
    Routing::new(&layer.shape, &chosen, &weights).expect("different experts below their number, and finite weights")
}

#[cfg(test)]
mod tests {
    use doorbell_collectives::moe::{Mode, Payload, Shape};

    use super::*;

    #[test]
    fn the_skews_are_what_they_are_called() {
        let layer = |skew| Layer {
            shape: Shape::new(2, 16, 3, 8, 500).unwrap(),
            payload: Payload::Bf16,
            mode: Mode::LowLatency,
            skew,
            seed: 1,
        };
        let per_expert = |skew| Routings::draw(&layer(skew)).of(Rank(1)).pairs_per_expert().to_vec();
        let uniform = per_expert(Skew::Uniform);
        assert!(uniform.iter().all(|pairs| (60..130).contains(pairs)), "{uniform:?}");
        let zipf = per_expert(Skew::Zipf);
        assert!(zipf[0] > 2 * zipf[3] && zipf[3] > zipf[15] && zipf[15] > 0, "{zipf:?}");
        let one = per_expert(Skew::OneExpert);
        assert!(one[0] == 500 && one[1..].iter().all(|pairs| *pairs < 100), "{one:?}");
        let all = Routings::draw(&layer(Skew::OneExpert));
        assert_eq!(all.all(), 2 * 500 * 3);
        let received = [0, 1].map(|to| all.received(Rank(to)).iter().sum::<usize>());
        assert_eq!((received[0] + received[1], all.most_received()), (3000, received[0]));
        assert_eq!(all.sent(Rank(0))[1], all.received(Rank(1))[0]);
    }
}

//! The routing of one rank's tokens: which experts each chooses, with which weights.

use std::sync::Arc;

use super::Shape;
use crate::types::Rank;

/// The index of a choice that is not made.
pub const NO_EXPERT: i64 = -1;

/// An impossible routing.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// The indices are not of whole tokens.
    #[error("{indices} expert indices: they must be a multiple of top-k, which is {top_k}")]
    Indices {
        /// The number of indices.
        indices: usize,
        /// The indices of a token.
        top_k: u32,
    },
    /// There is not one weight for each index.
    #[error("{weights} weights for {indices} expert indices: there must be as many")]
    Weights {
        /// The number of weights.
        weights: usize,
        /// The number of indices.
        indices: usize,
    },
    /// More tokens than a rank may have.
    #[error("{tokens} tokens, and a rank has at most {max} in one operation")]
    TooManyTokens {
        /// The number of tokens.
        tokens: usize,
        /// The maximum.
        max: u32,
    },
    /// There is no such expert.
    #[error("token {token} chooses expert {expert}, and there are {experts}, from 0 on; -1 is none")]
    NoSuchExpert {
        /// The token.
        token: usize,
        /// The given index.
        expert: i64,
        /// The number of experts.
        experts: u32,
    },
    /// A token chooses an expert twice.
    #[error("token {token} chooses expert {expert} twice")]
    Duplicate {
        /// The token.
        token: usize,
        /// The expert.
        expert: u32,
    },
    /// The weight of a chosen expert is not a finite number.
    #[error("the weight of token {token} for expert {expert} is {weight}: it must be finite")]
    Weight {
        /// The token.
        token: usize,
        /// The expert.
        expert: u32,
        /// The weight.
        weight: f32,
    },
}

/// The checked routing of one rank's tokens.
///
/// Pairs are numbered `token * top_k + k`. A clone shares its contents.
#[derive(Clone, PartialEq, Debug)]
pub struct Routing {
    shape: Shape,
    tokens: u32,
    /// By pair: the expert, or `NONE`.
    experts: Arc<[u32]>,
    weights: Arc<[f32]>,
    per_expert: Arc<[u32]>,
    /// Pairs in send order.
    order: Arc<[u32]>,
    /// By pair: its position in the send order, or `NONE`.
    positions: Arc<[u32]>,
}

const NONE: u32 = u32::MAX;

impl Routing {
    /// The routing of as many tokens as `indices` has rows: `[tokens, top_k]` indices of experts,
    /// [`NO_EXPERT`] where a token chooses fewer, and as many weights. The weights of choices that
    /// are not made are ignored.
    ///
    /// # Errors
    /// When it is impossible: see [`RoutingError`].
    pub fn new<I: Copy + Into<i64>>(shape: &Shape, indices: &[I], weights: &[f32]) -> Result<Self, RoutingError> {
        let top_k = shape.top_k() as usize;
        if !indices.len().is_multiple_of(top_k) {
            return Err(RoutingError::Indices {
                indices: indices.len(),
                top_k: shape.top_k(),
            });
        }
        if weights.len() != indices.len() {
            return Err(RoutingError::Weights {
                weights: weights.len(),
                indices: indices.len(),
            });
        }
        let tokens = indices.len() / top_k;
        if tokens > shape.max_tokens() as usize {
            return Err(RoutingError::TooManyTokens {
                tokens,
                max: shape.max_tokens(),
            });
        }
        let experts = checked(shape, indices, weights)?;
        let mut per_expert = vec![0; shape.experts() as usize];
        for &expert in experts.iter().filter(|&&expert| expert != NONE) {
            per_expert[expert as usize] += 1;
        }
        let (order, positions) = ordered(&experts, &per_expert);
        Ok(Self {
            shape: *shape,
            tokens: tokens as u32,
            experts,
            weights: weights.into(),
            per_expert: per_expert.into(),
            order,
            positions,
        })
    }

    /// The dimensions for which it was checked.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens as usize
    }

    /// The number of pairs: choices that are made.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.order.len()
    }

    /// The chosen experts of a token in order of k, with the pair's number and weight.
    ///
    /// # Panics
    /// When there is no such token.
    pub fn choices(&self, token: usize) -> impl Iterator<Item = Choice> {
        let top_k = self.shape.top_k() as usize;
        let pairs = token * top_k..(token + 1) * top_k;
        let experts = &self.experts[pairs.clone()];
        let chosen = pairs.zip(experts).filter(|&(_, &expert)| expert != NONE);
        chosen.map(|(pair, &expert)| Choice {
            pair: pair as u32,
            expert,
            weight: self.weights[pair],
            position: self.positions[pair],
        })
    }

    /// The pairs in send order: by expert, then token.
    #[must_use]
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// The token of a pair.
    #[must_use]
    pub fn token_of(&self, pair: u32) -> usize {
        (pair / self.shape.top_k()) as usize
    }

    /// The pairs of each expert.
    #[must_use]
    pub fn pairs_per_expert(&self) -> &[u32] {
        &self.per_expert
    }

    /// The pairs of each expert of a rank.
    #[must_use]
    pub fn pairs_for(&self, rank: Rank) -> &[u32] {
        let first = self.shape.first_expert(rank) as usize;
        &self.per_expert[first..first + self.shape.local_experts() as usize]
    }

    /// The position in the send order of the first pair for a rank.
    pub(super) fn base_for(&self, rank: Rank) -> u32 {
        let before = &self.per_expert[..self.shape.first_expert(rank) as usize];
        before.iter().sum()
    }

    /// Whether a token chooses an expert of a rank.
    ///
    /// # Panics
    /// When there is no such token.
    #[must_use]
    pub fn is_token_in_rank(&self, token: usize, rank: Rank) -> bool {
        self.choices(token)
            .any(|choice| self.shape.rank_of(choice.expert) == rank)
    }

    /// By rank: the tokens that choose at least one of its experts.
    #[must_use]
    pub fn tokens_per_rank(&self) -> Vec<u32> {
        let chosen_by = |rank| (0..self.tokens()).filter(move |&token| self.is_token_in_rank(token, rank));
        (0..self.shape.ranks())
            .map(|rank| chosen_by(Rank(rank)).count() as u32)
            .collect()
    }
}

/// A pair: one chosen expert of a token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// `token * top_k + k`.
    pub pair: u32,
    /// The expert.
    pub expert: u32,
    /// Its weight.
    pub weight: f32,
    /// The pair's position in the send order.
    pub position: u32,
}

fn checked<I: Copy + Into<i64>>(shape: &Shape, indices: &[I], weights: &[f32]) -> Result<Arc<[u32]>, RoutingError> {
    let mut chosen_by = vec![usize::MAX; shape.experts() as usize];
    let mut experts = Vec::with_capacity(indices.len());
    for (pair, (&index, &weight)) in indices.iter().zip(weights).enumerate() {
        let (token, index) = (pair / shape.top_k() as usize, index.into());
        if index == NO_EXPERT {
            experts.push(NONE);
            continue;
        }
        let known = u32::try_from(index).ok().filter(|&expert| expert < shape.experts());
        let Some(expert) = known else {
            return Err(RoutingError::NoSuchExpert {
                token,
                expert: index,
                experts: shape.experts(),
            });
        };
        if core::mem::replace(&mut chosen_by[expert as usize], token) == token {
            return Err(RoutingError::Duplicate { token, expert });
        }
        if !weight.is_finite() {
            return Err(RoutingError::Weight { token, expert, weight });
        }
        experts.push(expert);
    }
    Ok(experts.into())
}

/// The pairs by expert, then token; and by pair its position there.
fn ordered(experts: &[u32], per_expert: &[u32]) -> (Arc<[u32]>, Arc<[u32]>) {
    let mut next = Vec::with_capacity(per_expert.len());
    let mut all = 0;
    for &pairs in per_expert {
        next.push(all);
        all += pairs;
    }
    let mut order = vec![0; all as usize];
    let mut positions = vec![NONE; experts.len()];
    for (pair, &expert) in experts.iter().enumerate().filter(|&(_, &expert)| expert != NONE) {
        let position = &mut next[expert as usize];
        order[*position as usize] = pair as u32;
        positions[pair] = *position;
        *position += 1;
    }
    (order.into(), positions.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape::new(2, 4, 2, 8, 3).unwrap()
    }

    #[test]
    fn the_send_order_is_by_expert_then_token() {
        let indices = [3, 0, -1, 3, 0, 2];
        let weights = [0.5, 0.25, f32::NAN, 1.0, 2.0, 3.0];
        let routing = Routing::new(&shape(), &indices, &weights).unwrap();
        assert_eq!(routing.order(), [1, 4, 5, 0, 3]);
        assert_eq!(routing.pairs_per_expert(), [2, 0, 1, 2]);
        assert_eq!(routing.pairs_for(Rank(1)), [1, 2]);
        assert_eq!(routing.tokens_per_rank(), [2, 3]);
        let of_last: Vec<_> = routing
            .choices(2)
            .map(|choice| (choice.position, choice.weight))
            .collect();
        assert_eq!(of_last, [(1, 2.0), (2, 3.0)]);
        assert_eq!(routing.choices(1).count(), 1);
    }

    #[test]
    fn an_impossible_routing_is_refused_with_its_place() {
        let refused =
            |indices: &[i64], weights: &[f32]| Routing::new(&shape(), indices, weights).unwrap_err().to_string();
        let given = [
            refused(&[0, 1, 2], &[1.0; 3]),
            refused(&[0, 1], &[1.0; 3]),
            refused(&[0; 8], &[1.0; 8]),
            refused(&[0, 1, 2, 4], &[1.0; 4]),
            refused(&[0, -2], &[1.0; 2]),
            refused(&[i64::MAX, 0], &[1.0; 2]),
            refused(&[0, 1, 3, 3], &[1.0; 4]),
            refused(&[0, 1], &[1.0, f32::INFINITY]),
            refused(&[0, 1], &[f32::NAN, 1.0]),
        ];
        let wanted = [
            "3 expert indices: they must be a multiple of top-k, which is 2",
            "3 weights for 2 expert indices: there must be as many",
            "4 tokens, and a rank has at most 3 in one operation",
            "token 1 chooses expert 4, and there are 4, from 0 on; -1 is none",
            "token 0 chooses expert -2, and there are 4, from 0 on; -1 is none",
            "token 0 chooses expert 9223372036854775807, and there are 4, from 0 on; -1 is none",
            "token 1 chooses expert 3 twice",
            "the weight of token 0 for expert 1 is inf: it must be finite",
            "the weight of token 0 for expert 0 is NaN: it must be finite",
        ];
        assert_eq!(given, wanted);
    }
}

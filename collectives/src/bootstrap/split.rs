//! Group split by colour and key.

use serde::{Deserialize, Serialize};

use super::mesh::GroupId;
use crate::types::Rank;

/// A member's colour and key, and the id of its group if it is the first member.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Choice {
    pub(super) colour: Option<u32>,
    pub(super) key: i32,
    pub(super) id: GroupId,
}

impl Choice {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

/// The new group of `rank` and its members, by their ranks in the old group.
pub(super) fn divide(chosen: &[Choice], rank: Rank) -> Option<(GroupId, Vec<Rank>)> {
    let colour = chosen[rank.index()].colour?;
    let mut members: Vec<_> = (0..chosen.len() as u32)
        .map(Rank)
        .filter(|other| chosen[other.index()].colour == Some(colour))
        .collect();
    // The sort is stable: equal keys keep rank order.
    members.sort_by_key(|member| chosen[member.index()].key);
    Some((chosen[members.first()?.index()].id, members))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(colour: Option<u32>, key: i32, creator: u32) -> Choice {
        let id = GroupId { creator, number: 7 };
        Choice { colour, key, id }
    }

    #[test]
    fn members_are_ordered_by_key_and_rank() {
        let chosen = [
            choice(Some(1), 5, 0),
            choice(Some(2), 0, 1),
            choice(Some(1), -5, 2),
            choice(None, 0, 3),
            choice(Some(1), 5, 4),
            choice(Some(2), 0, 5),
        ];
        let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Vec<_>>();
        for rank in [0, 2, 4] {
            assert_eq!(divide(&chosen, Rank(rank)), Some((chosen[2].id, ranks(&[2, 0, 4]))));
        }
        for rank in [1, 5] {
            assert_eq!(divide(&chosen, Rank(rank)), Some((chosen[1].id, ranks(&[1, 5]))));
        }
        assert_eq!(divide(&chosen, Rank(3)), None);
    }

    #[test]
    fn choices_round_trip() {
        for one in [choice(None, i32::MIN, 3), choice(Some(u32::MAX), 9, 4)] {
            let bytes = one.encode();
            assert_eq!(Choice::decode(&bytes), Some(one));
            assert_eq!(Choice::decode(&bytes[1..]), None);
        }
    }
}

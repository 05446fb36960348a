//! What both kinds of memory measure and check: the tokens, the rows that each rank has to receive,
//! and the outputs of the experts. Every rank computes what the others send.

use doorbell_collectives::Rank;
use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{Payload, ReceivedRows, Routing, reference};
use doorbell_collectives::reference::input_element;

use super::routing::Routings;
use super::{Layer, Part};

/// One rank's part of one row of the table.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) part: Part,
    pub(super) layer: &'a Layer,
    pub(super) routings: &'a Routings,
    pub(super) rank: Rank,
}

/// A row that a rank has received: where it is, for which expert, and the token that it is.
pub(super) struct Place {
    pub(super) row: usize,
    pub(super) expert: u32,
    source: Rank,
    token: usize,
}

impl<'a> Job<'a> {
    pub(super) fn routing(&self) -> &'a Routing {
        self.routings.of(self.rank)
    }

    /// The bytes of a row of what is measured.
    pub(super) fn row_bytes(&self) -> usize {
        let payload = match self.part {
            Part::Dispatch => self.layer.payload,
            Part::Combine => Payload::Bf16,
        };
        payload.row_bytes(self.layer.shape.hidden())
    }

    /// By rank: the bytes that this one sends to it, and receives from it.
    pub(super) fn bytes(&self) -> (Vec<usize>, Vec<usize>) {
        let row = self.row_bytes();
        let bytes = |pairs: Vec<usize>| pairs.into_iter().map(|pairs| pairs * row).collect();
        let (sent, received) = (self.routings.sent(self.rank), self.routings.received(self.rank));
        match self.part {
            Part::Dispatch => (bytes(sent), bytes(received)),
            // What has come goes back.
            Part::Combine => (bytes(received), bytes(sent)),
        }
    }

    fn token_of(&self, rank: Rank, token: usize) -> Vec<bf16> {
        let hidden = u64::from(self.layer.shape.hidden());
        let first = token as u64 * hidden;
        (first..first + hidden)
            .map(|index| input_element(self.layer.seed, rank, index))
            .collect()
    }

    pub(super) fn tokens(&self) -> Vec<bf16> {
        (0..self.layer.shape.max_tokens() as usize)
            .flat_map(|token| self.token_of(self.rank, token))
            .collect()
    }

    /// The places of all that has to be received.
    pub(super) fn places(&self, rows: &ReceivedRows) -> Vec<Place> {
        let first = self.layer.shape.first_expert(self.rank);
        let mut all = Vec::new();
        for local in 0..self.layer.shape.local_experts() {
            for source in (0..self.layer.shape.ranks()).map(Rank) {
                let routing = self.routings.of(source);
                let expert = first + local;
                let before: u32 = routing.pairs_per_expert()[..expert as usize].iter().sum();
                let order = &routing.order()[before as usize..];
                for (row, &pair) in rows.range(local, source).zip(order) {
                    let token = routing.token_of(pair);
                    all.push(Place {
                        row,
                        expert,
                        source,
                        token,
                    });
                }
            }
        }
        all
    }

    /// The number of rows that are wrong, or too many or too few.
    pub(super) fn wrong_rows<'b>(&self, rows: &ReceivedRows, bytes_of: impl Fn(usize) -> &'b [u8]) -> u64 {
        let wanted: usize = self.routings.received(self.rank).iter().sum();
        let mut wrong = wanted.abs_diff(rows.len()) as u64;
        let mut right = vec![0; self.row_bytes()];
        for place in self.places(rows) {
            let token = self.token_of(place.source, place.token);
            reference::write_row(self.layer.payload, &token, &mut right);
            wrong += u64::from(bytes_of(place.row) != right);
        }
        wrong
    }

    /// What the expert returns for the row of a place.
    pub(super) fn output(&self, place: &Place) -> impl Iterator<Item = bf16> {
        output(place.expert, self.token_of(place.source, place.token))
    }

    /// The number of elements of the combined tokens that are wrong.
    pub(super) fn wrong_elements(&self, combined: &[bf16]) -> u64 {
        let wanted = reference::combine(self.routing(), |expert, pair| {
            let token = self.token_of(self.rank, self.routing().token_of(pair));
            output(expert, token).collect()
        });
        let bits = |(got, wanted): &(&bf16, &bf16)| got.to_bits() != wanted.to_bits();
        combined.iter().zip(&wanted).filter(bits).count() as u64
    }
}

/// What an expert returns for a token: other elements for each.
fn output(expert: u32, token: Vec<bf16>) -> impl Iterator<Item = bf16> {
    let factor = 1.0 + (expert % 5) as f32;
    token
        .into_iter()
        .map(move |element| bf16::from_f32(element.to_f32() * factor))
}

//! Every element of input and output lies in one block of one slice; scratch blocks are disjoint
//! and as long as the data that they hold; both ends of a message cut it alike.

use super::*;
use crate::plan::Collective;

const COUNTS: &[u64] = &[0, 1, 2, 63, 64, 65, 511, 512, 1000, 4096, 100_003];

fn shapes() -> impl Iterator<Item = Shape> {
    Collective::ALL
        .iter()
        .copied()
        .filter(|collective| *collective != Collective::AllToAllV)
        .flat_map(|collective| {
            [(1, 1), (2, 1), (3, 3), (5, 4), (8, 8)]
                .into_iter()
                .map(move |(ranks, blocks)| Shape {
                    collective,
                    order: (0..ranks).map(Rank).collect(),
                    root: Rank(0),
                    blocks,
                })
        })
}

fn layouts() -> impl Iterator<Item = (Shape, Layout)> {
    shapes().flat_map(|shape| {
        COUNTS.iter().flat_map(move |&count| {
            let shape = shape.clone();
            [1, 2, 7].into_iter().map(move |slices| {
                let scratch: Vec<u32> = (0..shape.data_blocks()).rev().collect();
                let extent = OperationExtent {
                    count,
                    parts: None,
                    slices,
                };
                let layout = Layout::new(&shape, extent, &scratch, &[]);
                (shape.clone(), layout)
            })
        })
    })
}

#[test]
fn every_element_is_in_one_block_of_one_slice() {
    for (shape, layout) in layouts() {
        let blocks = shape.output(Rank(0)).len() as u32;
        let mut runs: Vec<ElementRange> = (0..layout.extent.slices)
            .flat_map(|slice| (0..blocks).map(move |block| (slice, block)))
            .map(|(slice, block)| layout.element_range(PlanMemory::Output, block, 1, slice))
            .filter(|run| run.len > 0)
            .collect();
        runs.sort_by_key(|run| run.offset);
        let mut end = 0;
        for run in &runs {
            assert_eq!(run.offset, end, "{shape:?} {:?}", layout.extent);
            end += run.len;
        }
        let parts = match layout.kind {
            Kind::Window => u64::from(blocks > 0),
            _ => u64::from(blocks / shape.blocks),
        };
        assert_eq!(end, parts * layout.extent.count, "{shape:?} {:?}", layout.extent);
    }
}

#[test]
fn scratch_blocks_lie_apart_and_hold_what_they_are_for() {
    for (shape, layout) in layouts() {
        let all = shape.data_blocks();
        for slice in 0..layout.extent.slices {
            let mut end = 0;
            for at in 0..all {
                let run = layout.element_range(PlanMemory::Scratch, at, 1, slice);
                assert!(run.offset >= end, "{shape:?} {:?}", layout.extent);
                end = run.offset + run.len;
                let data = all - 1 - at;
                let like = (0..shape.output(Rank(0)).len() as u32).find(|position| {
                    shape.length_class(shape.output(Rank(0))[*position as usize]) == shape.length_class(data)
                });
                if let Some(position) = like {
                    let wanted = layout.element_range(PlanMemory::Output, position, 1, slice).len;
                    assert_eq!(
                        run.len, wanted,
                        "{shape:?} {:?}: block {data} in slice {slice}",
                        layout.extent
                    );
                }
            }
            assert!(end <= layout.scratch_len);
        }
    }
}

#[test]
fn a_piece_is_as_long_as_its_blocks() {
    for (shape, layout) in layouts() {
        let data = shape.output(Rank(0));
        for (first, blocks) in cut_into_pieces(&data, layout.joins()) {
            for slice in 0..layout.extent.slices {
                let whole = layout.element_range(PlanMemory::Output, first, blocks, slice);
                let each =
                    (first..first + blocks).map(|block| layout.element_range(PlanMemory::Output, block, 1, slice).len);
                assert_eq!(whole.len, each.sum::<u64>(), "{shape:?} {:?}", layout.extent);
            }
        }
    }
}

#[test]
fn neighbours_are_joined_where_memory_is() {
    assert_eq!(
        *cut_into_pieces(&[4, 5, 6, 0, 1, 9], Coalescing::Neighbours),
        [(0, 3), (3, 2), (5, 1)]
    );
    assert_eq!(*cut_into_pieces(&[4, 0, 9], Coalescing::All), [(0, 3)]);
    assert_eq!(*cut_into_pieces(&[4, 5], Coalescing::None), [(0, 1), (1, 1)]);
    assert_eq!(*cut_into_pieces(&[], Coalescing::All), []);
}

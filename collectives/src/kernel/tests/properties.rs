//! Results do not depend on how an operation is cut.

use proptest::prelude::*;

use super::reduce::content;
use super::{Memory, Random};
use crate::kernel::Function;
use crate::plan::BlockForm::{self, Element, Partial};
use crate::{DataType, ReduceOp};

fn reduce(
    function: &Function,
    sources: &[(BlockForm, Vec<u8>)],
    into: BlockForm,
    elements: usize,
    offset: usize,
) -> Vec<u8> {
    let mut memories: Vec<Memory> = sources.iter().map(|(_, bytes)| Memory::new(bytes, offset)).collect();
    let pointers: Vec<_> = memories
        .iter_mut()
        .zip(sources)
        .map(|(memory, (form, _))| (*form, memory.at().cast_const()))
        .collect();
    let len = elements * function.bytes(into);
    let mut own = Memory::new(&vec![0; len], offset);
    // SAFETY: all memories have that many elements of their form, and are disjoint.
    unsafe { function.reduce(&pointers, (into, own.at()), elements) };
    own.content(len).to_vec()
}

fn inputs(seed: u64, data: DataType, count: usize, elements: usize) -> Vec<(BlockForm, Vec<u8>)> {
    let mut random = Random::new(seed);
    let any = seed.is_multiple_of(2);
    (0..count)
        .map(|_| (Element, content(&mut random, data, Element, elements, any)))
        .collect()
}

fn types() -> impl Strategy<Value = DataType> {
    prop::sample::select(DataType::ALL)
}

fn operators() -> impl Strategy<Value = ReduceOp> {
    prop::sample::select(ReduceOp::ALL)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// In stages by partial results, as in a ring, or all at once: the same bits.
    #[test]
    fn stages_equal_one_pass(seed: u64, data in types(), op in operators(), count in 2usize..9, first in 1usize..8, elements in 0usize..300) {
        let first = first.min(count - 1);
        let sources = inputs(seed, data, count, elements);
        let function = Function::new(data, op, count as u32).expect("built-in operators fit");
        let whole = reduce(&function, &sources, Element, elements, 0);
        let stage = reduce(&function, &sources[..first], Partial, elements, 4);
        let staged = reduce(&function, &[&[(Partial, stage)], &sources[first..]].concat(), Element, elements, 9);
        prop_assert_eq!(whole, staged);
    }

    #[test]
    fn slices_equal_the_whole(seed: u64, data in types(), op in operators(), count in 1usize..6, elements in 1usize..300, cut in 0usize..300) {
        let cut = cut % elements;
        let sources = inputs(seed, data, count, elements);
        let function = Function::new(data, op, count as u32).expect("built-in operators fit");
        let part = |range: core::ops::Range<usize>| {
            let size = data.bytes();
            let sources: Vec<_> = sources.iter().map(|(form, bytes)| (*form, bytes[range.start * size..range.end * size].to_vec())).collect();
            reduce(&function, &sources, Element, range.len(), 3)
        };
        prop_assert_eq!(reduce(&function, &sources, Element, elements, 0), [part(0..cut), part(cut..elements)].concat());
    }

    /// Both partners of an exchange get the same bits; for `Min`, `Max` and integers in any order.
    #[test]
    fn operands_may_be_exchanged(seed: u64, data in types(), op in operators(), count in 2usize..9, elements in 0usize..200) {
        let exact = !matches!(data, DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64 | DataType::F8E4M3 | DataType::F8E5M2) || matches!(op, ReduceOp::Min | ReduceOp::Max);
        let count = if exact { count } else { 2 };
        let sources = inputs(seed, data, count, elements);
        let function = Function::new(data, op, count as u32).expect("built-in operators fit");
        let reversed: Vec<_> = sources.iter().rev().cloned().collect();
        prop_assert_eq!(reduce(&function, &sources, Element, elements, 0), reduce(&function, &reversed, Element, elements, 0));
    }
}

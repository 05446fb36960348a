//! Reduction kernels: a data type and an operator, with the loops for this machine.

use core::ops::Range;

use super::operator::{Op, Scalar, TypeMismatch, UserOperator};
use super::versions::{Fused, Loops, Narrow, Version};
use crate::plan::BlockForm;
use crate::types::{DataType, ReduceOp};

/// Bytes of a tile: two of them stay in the L1 cache beside the streamed data.
const TILE: usize = 4096;

/// Stack memory for partial results of a few elements, aligned for every type and vector.
#[repr(align(64))]
struct Tile([core::mem::MaybeUninit<u8>; TILE]);

impl Tile {
    const fn new() -> Self {
        Self([core::mem::MaybeUninit::uninit(); TILE])
    }

    fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

/// A reduction of one type by one operator, with loops for the machine's best instruction set.
#[derive(Clone)]
pub struct Function {
    data: DataType,
    op: Op,
    pub(super) ranks: u32,
    /// The built-in loops; for a user-defined operator those of `Sum`: they convert and scale.
    loops: Loops,
    narrow: Option<Narrow>,
    /// The one-pass loop, if there is one; unused for a user-defined operator.
    fused: Option<Fused>,
}

impl Function {
    /// The reduction of `data` by `op` over `ranks` ranks: `Avg` divides by that number.
    ///
    /// # Errors
    /// The user-defined operator is over another type than the accumulator of `data`.
    pub fn new(data: DataType, op: impl Into<Op>, ranks: u32) -> Result<Self, TypeMismatch> {
        Self::with_version(data, op.into(), ranks, Version::best())
    }

    pub(super) fn with_version(data: DataType, op: Op, ranks: u32, version: Version) -> Result<Self, TypeMismatch> {
        let builtin = match &op {
            Op::Builtin(op) => *op,
            Op::User(user) if user.over() != data.accumulator() => {
                return Err(TypeMismatch {
                    what: format!("the operator {:?}", user.name()),
                    over: user.over(),
                    data,
                });
            }
            Op::User(_) => ReduceOp::Sum,
        };
        let (loops, narrow, fused) = (
            version.loops(data, builtin),
            version.narrow(data),
            version.fused(data, builtin),
        );
        Ok(Self {
            data,
            op,
            ranks: ranks.max(1),
            loops,
            narrow,
            fused,
        })
    }

    /// The type of the elements.
    #[must_use]
    pub fn data(&self) -> DataType {
        self.data
    }

    /// The operator.
    #[must_use]
    pub fn op(&self) -> &Op {
        &self.op
    }

    /// Bytes of one element in that form.
    #[must_use]
    pub fn bytes(&self, form: BlockForm) -> usize {
        match form {
            BlockForm::Element => self.data.bytes(),
            BlockForm::Partial => self.data.accumulator().bytes(),
        }
    }

    /// Reduces the `sources`, in order, `into` a memory: as partial results, or as elements,
    /// rounded once, with `Avg`'s division done. Does nothing without sources.
    ///
    /// # Safety
    /// Each source is valid for reads of `elements` of its form, and `into` for writes, at any
    /// alignment. `into` is exactly one of the sources in the same form, or overlaps none. No other
    /// code writes any of them meanwhile: a device's writes are complete (their completion or flag
    /// was seen).
    pub unsafe fn reduce(&self, sources: &[(BlockForm, *const u8)], into: (BlockForm, *mut u8), elements: usize) {
        // SAFETY: the caller's contract is the same in all arms.
        unsafe {
            match (&self.op, sources) {
                (_, []) => {}
                (Op::User(user), _) => self.reduce_by_user(user, sources, into, elements),
                (Op::Builtin(_), &[(form, from)]) => self.single(form, from, into, elements),
                (Op::Builtin(_), &[(_, a), (_, b)]) if self.narrow.is_none() => {
                    let pair = if into.0 == BlockForm::Element {
                        self.loops.finish
                    } else {
                        self.loops.accumulate
                    };
                    pair(a, b, into.1, elements, self.ranks);
                }
                (Op::Builtin(op), _) => {
                    let divisor = (*op == ReduceOp::Avg).then_some(self.ranks as f32);
                    let done = self.fused.map_or(0, |fused| fused(sources, into, elements, divisor));
                    self.reduce_by_tiles(sources, into, done..elements);
                }
            }
        }
    }

    /// Copies `elements` of one form.
    ///
    /// # Safety
    /// `from` is valid for reads and `into` for writes of that many; they are the same or disjoint.
    /// No other code writes them meanwhile.
    pub unsafe fn copy(&self, form: BlockForm, from: *const u8, into: *mut u8, elements: usize) {
        if !core::ptr::eq(from, into) {
            // SAFETY: by contract.
            unsafe { core::ptr::copy_nonoverlapping(from, into, elements * self.bytes(form)) };
        }
    }

    /// Multiplies `elements` at `from` by `scalar` and rounds once, for [`ReduceOp::PreMulSum`].
    ///
    /// # Errors
    /// The scalar is of another type than the accumulator of the data. Nothing was written.
    ///
    /// # Safety
    /// `from` is valid for reads and `into` for writes of that many, at any alignment; they are the
    /// same or disjoint. No other code writes them meanwhile.
    pub unsafe fn scale(
        &self,
        scalar: Scalar,
        from: *const u8,
        into: *mut u8,
        elements: usize,
    ) -> Result<(), TypeMismatch> {
        if scalar.over() != self.data.accumulator() {
            return Err(TypeMismatch {
                what: "the scalar".to_owned(),
                over: scalar.over(),
                data: self.data,
            });
        }
        // SAFETY: the scalar is of the type of the loops; the rest by contract. A tile has room for
        // `count` of the accumulator type.
        unsafe {
            let Some(narrow) = self.narrow else {
                (self.loops.scale)(from, into, elements, scalar.address());
                return Ok(());
            };
            let mut tile = Tile::new();
            self.for_tiles(0..elements, |at, count| {
                (narrow.decode)(from.add(at * self.data.bytes()), tile.at(), count);
                (self.loops.scale)(tile.at(), tile.at(), count, scalar.address());
                (narrow.encode)(tile.at(), into.add(at * self.data.bytes()), count);
            });
        }
        Ok(())
    }

    fn for_tiles(&self, elements: Range<usize>, mut work: impl FnMut(usize, usize)) {
        let most = TILE / self.bytes(BlockForm::Partial);
        let mut at = elements.start;
        while at < elements.end {
            let count = most.min(elements.end - at);
            work(at, count);
            at += count;
        }
    }

    /// # Safety
    /// As [`reduce`](Self::reduce).
    unsafe fn single(&self, form: BlockForm, from: *const u8, into: (BlockForm, *mut u8), elements: usize) {
        // SAFETY: by contract; a tile has room for `count` of the accumulator type.
        unsafe {
            match (self.narrow, form, into.0) {
                (None, _, BlockForm::Partial) | (Some(_), BlockForm::Partial, BlockForm::Partial) => {
                    self.copy(into.0, from, into.1, elements)
                }
                (None, _, BlockForm::Element) => (self.loops.single)(from, into.1, elements, self.ranks),
                (Some(narrow), BlockForm::Element, BlockForm::Partial) => (narrow.decode)(from, into.1, elements),
                (Some(narrow), _, BlockForm::Element) => {
                    let mut tile = Tile::new();
                    self.for_tiles(0..elements, |at, count| {
                        let from = from.add(at * self.bytes(form));
                        let from = if form == BlockForm::Element {
                            (narrow.decode)(from, tile.at(), count);
                            tile.at()
                        } else {
                            from
                        };
                        (self.loops.single)(from, tile.at(), count, self.ranks);
                        (narrow.encode)(tile.at(), into.1.add(at * self.data.bytes()), count);
                    });
                }
            }
        }
    }

    /// # Safety
    /// As [`reduce`](Self::reduce); there are two sources or more.
    unsafe fn reduce_by_tiles(
        &self,
        sources: &[(BlockForm, *const u8)],
        into: (BlockForm, *mut u8),
        elements: Range<usize>,
    ) {
        let (mut first, mut next) = (Tile::new(), Tile::new());
        let last = sources.len() - 1;
        self.for_tiles(elements, |begin, count| {
            // The accumulator: the first source itself, until another was added to it.
            let mut sum = core::ptr::null();
            for (index, &(form, from)) in sources.iter().enumerate() {
                // SAFETY: by contract; a tile has room for `count` of the accumulator type. `into`
                // is written last for these elements, when all sources were read.
                unsafe {
                    let mut from = from.add(begin * self.bytes(form));
                    if let (Some(narrow), BlockForm::Element) = (self.narrow, form) {
                        let tile = if index == 0 { first.at() } else { next.at() };
                        (narrow.decode)(from, tile, count);
                        from = tile;
                    }
                    if index == 0 {
                        sum = from;
                        continue;
                    }
                    let pair = if index == last && into.0 == BlockForm::Element {
                        self.loops.finish
                    } else {
                        self.loops.accumulate
                    };
                    let to = if index == last && (self.narrow.is_none() || into.0 == BlockForm::Partial) {
                        into.1.add(begin * self.bytes(into.0))
                    } else {
                        first.at()
                    };
                    pair(sum, from, to, count, self.ranks);
                    sum = to;
                }
            }
            if let (Some(narrow), BlockForm::Element) = (self.narrow, into.0) {
                // SAFETY: as above.
                unsafe { (narrow.encode)(sum, into.1.add(begin * self.data.bytes()), count) };
            }
        });
    }

    /// The operator only accesses tiles, never the operation's memory.
    ///
    /// # Safety
    /// As [`reduce`](Self::reduce).
    unsafe fn reduce_by_user(
        &self,
        user: &UserOperator,
        sources: &[(BlockForm, *const u8)],
        into: (BlockForm, *mut u8),
        elements: usize,
    ) {
        let (mut first, mut next) = (Tile::new(), Tile::new());
        self.for_tiles(0..elements, |begin, count| {
            // SAFETY: by contract; a tile has room for `count` of the accumulator type, and is
            // aligned for it. `into` is written last for these elements.
            unsafe {
                for (index, &(form, from)) in sources.iter().enumerate() {
                    let tile = if index == 0 { first.at() } else { next.at() };
                    let from = from.add(begin * self.bytes(form));
                    match (self.narrow, form) {
                        (Some(narrow), BlockForm::Element) => (narrow.decode)(from, tile, count),
                        _ => core::ptr::copy_nonoverlapping(from, tile, count * self.bytes(form)),
                    }
                    if index > 0 {
                        user.combine(first.at(), next.at(), count);
                    }
                }
                let to = into.1.add(begin * self.bytes(into.0));
                match (self.narrow, into.0) {
                    (Some(narrow), BlockForm::Element) => (narrow.encode)(first.at(), to, count),
                    _ => core::ptr::copy_nonoverlapping(first.at(), to, count * self.bytes(into.0)),
                }
            }
        });
    }
}

debug_fields!(Function, self, data = self.data, op = self.op, ranks = self.ranks);

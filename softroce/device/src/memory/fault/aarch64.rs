//! The routines for AArch64, by its procedure call standard; all registers used are the callee's.

use std::arch::global_asm;

pub(in crate::memory) use super::handler::install;
pub(super) use super::routines::{compare_swap, copy, fetch_add, probe, store_bytes, store_word};

pub(super) fn detect() {}

global_asm!(
    ".pushsection .text.doorbell_fault,\"ax\",@progbits",
    ".irp name, start, copy, store_word, store_bytes, fetch_add, compare_swap, probe, resume",
    ".globl doorbell_fault_\\name",
    ".hidden doorbell_fault_\\name",
    ".endr",
    ".p2align 6",
    "doorbell_fault_start:",
    // (dst: x0, src: x1, len: x2). Ends are copied by loads and stores that overlap.
    "doorbell_fault_copy:",
    "add x3, x1, x2",
    "add x4, x0, x2",
    "cmp x2, #16",
    "b.lo 4f",
    "cmp x2, #32",
    "b.hi 2f",
    "ldr q0, [x1]",
    "ldur q1, [x3, #-16]",
    "str q0, [x0]",
    "stur q1, [x4, #-16]",
    "mov w0, #0",
    "ret",
    "2:",
    "ldp q4, q5, [x3, #-32]",
    "sub x4, x4, #32",
    "3:",
    "ldp q0, q1, [x1], #32",
    "stp q0, q1, [x0], #32",
    "cmp x0, x4",
    "b.lo 3b",
    "stp q4, q5, [x4]",
    "mov w0, #0",
    "ret",
    "4:",
    "tbz x2, #3, 5f",
    "ldr x5, [x1]",
    "ldur x6, [x3, #-8]",
    "str x5, [x0]",
    "stur x6, [x4, #-8]",
    "mov w0, #0",
    "ret",
    "5:",
    "tbz x2, #2, 6f",
    "ldr w5, [x1]",
    "ldur w6, [x3, #-4]",
    "str w5, [x0]",
    "stur w6, [x4, #-4]",
    "mov w0, #0",
    "ret",
    "6:",
    "cbz x2, 7f",
    "lsr x5, x2, #1",
    "ldrb w6, [x1]",
    "ldrb w7, [x1, x5]",
    "ldurb w8, [x3, #-1]",
    "strb w6, [x0]",
    "strb w7, [x0, x5]",
    "sturb w8, [x4, #-1]",
    "7:",
    "mov w0, #0",
    "ret",
    // (word: x0, value: x1)
    "doorbell_fault_store_word:",
    "stlr x1, [x0]",
    "mov w0, #0",
    "ret",
    // (dst: x0, src: x1, len: x2)
    "doorbell_fault_store_bytes:",
    "add x4, x0, x2",
    "b 3f",
    "2:",
    "ldrb w3, [x1], #1",
    "stlrb w3, [x0]",
    "add x0, x0, #1",
    "3:",
    "cmp x0, x4",
    "b.lo 2b",
    "mov w0, #0",
    "ret",
    // (word: x0, add: x1, before: x2)
    "doorbell_fault_fetch_add:",
    "ldaxr x3, [x0]",
    "add x4, x3, x1",
    "stlxr w5, x4, [x0]",
    "cbnz w5, doorbell_fault_fetch_add",
    "str x3, [x2]",
    "mov w0, #0",
    "ret",
    // (word: x0, compare: x1, swap: x2, before: x3)
    "doorbell_fault_compare_swap:",
    "ldaxr x4, [x0]",
    "cmp x4, x1",
    "b.ne 2f",
    "stlxr w5, x2, [x0]",
    "cbnz w5, doorbell_fault_compare_swap",
    "2:",
    "str x4, [x3]",
    "mov w0, #0",
    "ret",
    // (first: x0, last: x1): one byte of each page.
    "doorbell_fault_probe:",
    "ldrb w2, [x0]",
    "add x0, x0, #4096",
    "cmp x0, x1",
    "b.ls doorbell_fault_probe",
    "ldrb w2, [x1]",
    "mov w0, #0",
    "ret",
    "doorbell_fault_resume:",
    "mov w0, #1",
    "ret",
    ".popsection",
);

/// The program counter of an interrupted context.
///
/// # Safety
/// `context` is that of a handler with SA_SIGINFO (sigaction(2)).
pub(super) unsafe fn program_counter<'a>(context: *mut libc::c_void) -> &'a mut libc::c_ulonglong {
    // SAFETY: a `ucontext_t` by contract, which the handler has for itself.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc }
}

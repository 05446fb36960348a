//! The routines for x86-64, by the System V calling convention; all registers used are the
//! callee's.

use std::arch::{global_asm, is_x86_feature_detected};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(in crate::memory) use super::handler::install;
pub(super) use super::routines::{compare_swap, copy, fetch_add, probe, store_bytes, store_word};

/// From how many bytes on registers of 32 bytes are used, which SSE2, the baseline, does not have.
static AVX_FROM: AtomicUsize = AtomicUsize::new(usize::MAX);
/// From how many bytes on `rep movsb` is used, where it has fast strings.
static STRING_FROM: AtomicUsize = AtomicUsize::new(usize::MAX);

/// More than the two registers of 32 bytes that the end takes.
const AVX_MIN: usize = 65;

/// The fastest for each length: measured against memcpy(3) (decision 072).
pub(super) fn detect() {
    let (avx, string) = (is_x86_feature_detected!("avx"), is_x86_feature_detected!("ermsb"));
    let string_from = if avx { 3072 } else { 1024 };
    select(
        if avx { AVX_MIN } else { usize::MAX },
        if string { string_from } else { usize::MAX },
    );
}

/// `avx_from` is at least [`AVX_MIN`].
pub(super) fn select(avx_from: usize, string_from: usize) {
    AVX_FROM.store(avx_from, Ordering::Relaxed);
    STRING_FROM.store(string_from, Ordering::Relaxed);
}

global_asm!(
    ".pushsection .text.doorbell_fault,\"ax\",@progbits",
    ".irp name, start, copy, store_word, store_bytes, fetch_add, compare_swap, probe, resume",
    ".globl doorbell_fault_\\name",
    ".hidden doorbell_fault_\\name",
    ".endr",
    ".p2align 6",
    "doorbell_fault_start:",
    // (dst: rdi, src: rsi, len: rdx). Ends are copied by loads and stores that overlap.
    "doorbell_fault_copy:",
    "cmp rdx, 16",
    "jb 4f",
    "cmp rdx, 32",
    "ja 2f",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "xor eax, eax",
    "ret",
    "2:",
    "cmp rdx, qword ptr [rip + {string_from}]",
    "jae 8f",
    "cmp rdx, qword ptr [rip + {avx_from}]",
    "jae 9f",
    "movups xmm4, [rsi + rdx - 32]",
    "movups xmm5, [rsi + rdx - 16]",
    "lea rcx, [rdi + rdx - 32]",
    "3:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "add rsi, 32",
    "add rdi, 32",
    "cmp rdi, rcx",
    "jb 3b",
    "movups [rcx], xmm4",
    "movups [rcx + 16], xmm5",
    "xor eax, eax",
    "ret",
    "4:",
    "cmp edx, 8",
    "jb 5f",
    "mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    "5:",
    "cmp edx, 4",
    "jb 6f",
    "mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    "6:",
    "test edx, edx",
    "jz 7f",
    "mov ecx, edx",
    "shr ecx",
    "movzx eax, byte ptr [rsi]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "movzx r9d, byte ptr [rsi + rdx - 1]",
    "mov [rdi], al",
    "mov [rdi + rcx], r8b",
    "mov [rdi + rdx - 1], r9b",
    "7:",
    "xor eax, eax",
    "ret",
    "8:",
    "mov rcx, rdx",
    "rep movsb",
    "xor eax, eax",
    "ret",
    "9:",
    "vmovdqu ymm2, [rsi + rdx - 64]",
    "vmovdqu ymm3, [rsi + rdx - 32]",
    "lea rcx, [rdi + rdx - 64]",
    ".p2align 4",
    "2:",
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm1, [rsi + 32]",
    "vmovdqu [rdi], ymm0",
    "vmovdqu [rdi + 32], ymm1",
    "add rsi, 64",
    "add rdi, 64",
    "cmp rdi, rcx",
    "jb 2b",
    "vmovdqu [rcx], ymm2",
    "vmovdqu [rcx + 32], ymm3",
    "vzeroupper",
    "xor eax, eax",
    "ret",
    // (word: rdi, value: rsi)
    ".p2align 4",
    "doorbell_fault_store_word:",
    "mov [rdi], rsi",
    "xor eax, eax",
    "ret",
    // (dst: rdi, src: rsi, len: rdx)
    "doorbell_fault_store_bytes:",
    "xor ecx, ecx",
    "jmp 3f",
    "2:",
    "mov al, [rsi + rcx]",
    "mov [rdi + rcx], al",
    "inc rcx",
    "3:",
    "cmp rcx, rdx",
    "jb 2b",
    "xor eax, eax",
    "ret",
    // (word: rdi, add: rsi, before: rdx)
    "doorbell_fault_fetch_add:",
    "lock xadd [rdi], rsi",
    "mov [rdx], rsi",
    "xor eax, eax",
    "ret",
    // (word: rdi, compare: rsi, swap: rdx, before: rcx)
    "doorbell_fault_compare_swap:",
    "mov rax, rsi",
    "lock cmpxchg [rdi], rdx",
    "mov [rcx], rax",
    "xor eax, eax",
    "ret",
    // (first: rdi, last: rsi): one byte of each page.
    "doorbell_fault_probe:",
    "2:",
    "mov al, [rdi]",
    "add rdi, 4096",
    "cmp rdi, rsi",
    "jbe 2b",
    "mov al, [rsi]",
    "xor eax, eax",
    "ret",
    "doorbell_fault_resume:",
    "mov eax, 1",
    "ret",
    ".popsection",
    avx_from = sym AVX_FROM,
    string_from = sym STRING_FROM,
);

/// The program counter of an interrupted context.
///
/// # Safety
/// `context` is that of a handler with SA_SIGINFO (sigaction(2)).
pub(super) unsafe fn program_counter<'a>(context: *mut libc::c_void) -> &'a mut libc::greg_t {
    // SAFETY: a `ucontext_t` by contract, which the handler has for itself.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] }
}

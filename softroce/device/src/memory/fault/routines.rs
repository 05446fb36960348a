//! The routines' prototypes, which the architectures' files define; each returns 1 for a fault.

unsafe extern "C" {
    #[link_name = "doorbell_fault_copy"]
    pub(super) fn copy(dst: *mut u8, src: *const u8, len: usize) -> u32;
    #[link_name = "doorbell_fault_store_word"]
    pub(super) fn store_word(word: *mut u8, value: u64) -> u32;
    #[link_name = "doorbell_fault_store_bytes"]
    pub(super) fn store_bytes(dst: *mut u8, src: *const u8, len: usize) -> u32;
    #[link_name = "doorbell_fault_fetch_add"]
    pub(super) fn fetch_add(word: *mut u8, add: u64, before: &mut u64) -> u32;
    #[link_name = "doorbell_fault_compare_swap"]
    pub(super) fn compare_swap(word: *mut u8, compare: u64, swap: u64, before: &mut u64) -> u32;
    #[link_name = "doorbell_fault_probe"]
    pub(super) fn probe(first: *const u8, last: *const u8) -> u32;
    #[link_name = "doorbell_fault_start"]
    static START: u8;
    #[link_name = "doorbell_fault_resume"]
    static RESUME: u8;
}

/// Where a routine that has faulted at `pc` continues.
pub(super) fn resume_from(pc: usize) -> Option<usize> {
    let (start, resume) = ((&raw const START).addr(), (&raw const RESUME).addr());
    (start..resume).contains(&pc).then_some(resume)
}

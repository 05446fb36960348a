//! A copy of an extended queue's completion, with its read functions, of an abandoned poll.

use core::ffi::c_int;

use doorbell_verbs_sys as sys;

/// Begins with what callers know of an extended queue; the read functions find the rest.
#[repr(C)]
// fields: one for each read function of `ibv_cq_ex`.
pub(super) struct HeldCompletion {
    queue: sys::ibv_cq_ex,
    opcode: sys::ibv_wc_opcode,
    vendor_err: u32,
    qp_num: u32,
    byte_len: u32,
    imm_data: u32,
    src_qp: u32,
    wc_flags: u32,
    slid: u32,
    sl: u8,
    dlid_path_bits: u8,
    ticks: u64,
    wallclock_ns: u64,
}

impl HeldCompletion {
    pub(super) fn new() -> Box<Self> {
        // SAFETY: all-zero is a valid value: integers, null pointers and absent functions.
        Box::new(unsafe { core::mem::zeroed() })
    }

    /// Copies the valid fields of the current completion of `from` (ibv_poll_cq(3): in a failed
    /// one, status, vendor error and queue pair number).
    ///
    /// # Safety
    /// `from` is live, and has a current completion.
    pub(super) unsafe fn copy(&mut self, from: *mut sys::ibv_cq_ex) {
        macro_rules! copy {
            ($($field:ident by $call:ident),* $(,)?) => {
                // SAFETY: by contract.
                $( if let Some(read) = unsafe { (*from).$call } {
                    // SAFETY: by contract.
                    self.$field = unsafe { read(from) };
                    self.queue.$call = Some(calls::$field);
                } )*
            };
        }
        *self = *Self::new();
        self.queue.next_poll = Some(calls::next_poll);
        self.queue.end_poll = Some(calls::end_poll);
        // SAFETY: by contract.
        (self.queue.wr_id, self.queue.status) = unsafe { ((*from).wr_id, (*from).status) };
        copy!(
            vendor_err by read_vendor_err,
            qp_num by read_qp_num,
            ticks by read_completion_ts,
            wallclock_ns by read_completion_wallclock_ns,
        );
        if self.queue.status == sys::IBV_WC_SUCCESS {
            copy!(
                opcode by read_opcode,
                byte_len by read_byte_len,
                imm_data by read_imm_data,
                src_qp by read_src_qp,
                wc_flags by read_wc_flags,
                slid by read_slid,
                sl by read_sl,
                dlid_path_bits by read_dlid_path_bits,
            );
        }
    }
}

mod calls {
    use super::{HeldCompletion, c_int, sys};

    macro_rules! read {
        ($($field:ident: $type:ty),* $(,)?) => {
            $( pub(super) unsafe extern "C" fn $field(queue: *mut sys::ibv_cq_ex) -> $type {
                // SAFETY: called only through the queue at the beginning of such a copy.
                unsafe { (*queue.cast::<HeldCompletion>()).$field }
            } )*
        };
    }

    read! {
        opcode: sys::ibv_wc_opcode,
        vendor_err: u32,
        qp_num: u32,
        byte_len: u32,
        imm_data: u32,
        src_qp: u32,
        wc_flags: u32,
        slid: u32,
        sl: u8,
        dlid_path_bits: u8,
        ticks: u64,
        wallclock_ns: u64,
    }

    pub(super) unsafe extern "C" fn next_poll(_: *mut sys::ibv_cq_ex) -> c_int {
        nix::errno::Errno::ENOENT as c_int
    }

    pub(super) unsafe extern "C" fn end_poll(_: *mut sys::ibv_cq_ex) {}
}

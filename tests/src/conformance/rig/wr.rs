//! Work requests.

use std::ffi::c_int;
use std::ptr;

use doorbell_verbs_sys::*;

use super::{Ah, Binding, Errno, Mw, Qp, zeroed};

#[derive(Clone)]
pub(in crate::conformance) struct Send {
    wr: ibv_send_wr,
    sges: Vec<ibv_sge>,
    /// Inline data, one vector per element.
    inline: Vec<Vec<u8>>,
    /// Held until the request is posted.
    ah: Option<Ah>,
}

impl Send {
    pub(in crate::conformance) fn new(opcode: ibv_wr_opcode) -> Self {
        let mut wr: ibv_send_wr = zeroed();
        wr.opcode = opcode;
        wr.send_flags = IBV_SEND_SIGNALED;
        Self {
            wr,
            sges: Vec::new(),
            inline: Vec::new(),
            ah: None,
        }
    }

    pub(in crate::conformance) fn id(mut self, wr_id: u64) -> Self {
        self.wr.wr_id = wr_id;
        self
    }

    pub(in crate::conformance) fn sge(mut self, sge: ibv_sge) -> Self {
        self.sges.push(sge);
        self
    }

    /// Adds inline data; several calls make several elements.
    pub(in crate::conformance) fn inline(mut self, bytes: &[u8]) -> Self {
        self.inline.push(bytes.to_vec());
        self.with(IBV_SEND_INLINE)
    }

    pub(in crate::conformance) fn with(mut self, flags: u32) -> Self {
        self.wr.send_flags |= flags;
        self
    }

    pub(in crate::conformance) fn unsignaled(mut self) -> Self {
        self.wr.send_flags &= !IBV_SEND_SIGNALED;
        self
    }

    /// Immediate data in network byte order.
    pub(in crate::conformance) fn imm(mut self, bytes: [u8; 4]) -> Self {
        self.wr.anon_1.imm_data = u32::from_ne_bytes(bytes);
        self
    }

    pub(in crate::conformance) fn at(mut self, remote_addr: u64, rkey: u32) -> Self {
        self.wr.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey };
        self
    }

    pub(in crate::conformance) fn atomic(mut self, remote_addr: u64, rkey: u32, compare_add: u64, swap: u64) -> Self {
        self.wr.wr.atomic = ibv_send_wr_atomic {
            remote_addr,
            compare_add,
            swap,
            rkey,
        };
        self
    }

    /// The rkey that a SEND or a local request invalidates.
    pub(in crate::conformance) fn invalidating(mut self, rkey: u32) -> Self {
        self.wr.anon_1.invalidate_rkey = rkey;
        self
    }

    /// The binding of a request, and the window's new rkey.
    pub(in crate::conformance) fn binding(mut self, mw: &Mw, rkey: u32, binding: Binding<'_>) -> Self {
        self.wr.anon_2.bind_mw = ibv_send_wr_bind_mw {
            mw: mw.raw(),
            rkey,
            bind_info: binding.info(),
        };
        self
    }

    pub(in crate::conformance) fn to(mut self, ah: &Ah, remote_qpn: u32, remote_qkey: u32) -> Self {
        self.wr.wr.ud = ibv_send_wr_ud {
            ah: ah.raw(),
            remote_qpn,
            remote_qkey,
        };
        self.ah = Some(ah.clone());
        self
    }
}

#[derive(Clone)]
pub(in crate::conformance) struct Recv {
    pub(in crate::conformance) wr_id: u64,
    pub(in crate::conformance) sges: Vec<ibv_sge>,
}

impl Recv {
    pub(in crate::conformance) fn new(wr_id: u64) -> Self {
        Self {
            wr_id,
            sges: Vec::new(),
        }
    }

    pub(in crate::conformance) fn sge(mut self, sge: ibv_sge) -> Self {
        self.sges.push(sge);
        self
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conformance) enum Posted {
    All,
    /// Refused at the request of this index, with an errno value; those before it are posted.
    Refused {
        at: Option<usize>,
        errno: Errno,
    },
}

impl Posted {
    pub(super) fn new(result: c_int, bad: Option<usize>) -> Self {
        if result == 0 {
            return Self::All;
        }
        Self::Refused {
            at: bad,
            errno: Errno(result),
        }
    }

    pub(in crate::conformance) fn is_refused_at(self, index: usize) -> bool {
        matches!(self, Self::Refused { at: Some(at), .. } if at == index)
    }
}

impl Qp {
    pub(in crate::conformance) fn post(&self, sends: &[Send]) -> Posted {
        let mut elements: Vec<Vec<ibv_sge>> = sends.iter().map(elements_of).collect();
        let mut list: Vec<ibv_send_wr> = sends.iter().map(|send| send.wr).collect();
        for (index, elements) in elements.iter_mut().enumerate() {
            list[index].sg_list = elements.as_mut_ptr();
            list[index].num_sge = elements.len() as c_int;
        }
        let first = list.as_mut_ptr();
        for index in 1..list.len() {
            list[index - 1].next = first.wrapping_add(index);
        }
        let mut bad = ptr::null_mut();
        // SAFETY: live; a list of requests with their elements and inline data, all of which live
        // through the call. Other memory is given by keys, which the device checks.
        let result = unsafe { inline::post_send(self.raw(), first, &mut bad) };
        Posted::new(
            result,
            (0..list.len()).find(|&index| ptr::eq(bad, first.wrapping_add(index))),
        )
    }

    pub(in crate::conformance) fn post_one(&self, send: Send) -> Errno {
        match self.post(&[send]) {
            Posted::All => Errno(0),
            Posted::Refused { errno, .. } => errno,
        }
    }

    pub(in crate::conformance) fn receive(&self, receives: &[Recv]) -> Posted {
        let (mut list, _elements) = chain(receives);
        let first = list.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post`.
        let result = unsafe { inline::post_recv(self.raw(), first, &mut bad) };
        Posted::new(
            result,
            (0..list.len()).find(|&index| ptr::eq(bad, first.wrapping_add(index))),
        )
    }

    pub(in crate::conformance) fn receive_one(&self, receive: Recv) -> Errno {
        match self.receive(&[receive]) {
            Posted::All => Errno(0),
            Posted::Refused { errno, .. } => errno,
        }
    }
}

fn elements_of(send: &Send) -> Vec<ibv_sge> {
    let inline = send.inline.iter().map(|bytes| ibv_sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: bytes.len() as u32,
        lkey: 0,
    });
    send.sges.iter().copied().chain(inline).collect()
}

/// The C requests, and the elements that they point to.
pub(super) fn chain(receives: &[Recv]) -> (Vec<ibv_recv_wr>, Vec<Vec<ibv_sge>>) {
    let mut elements: Vec<Vec<ibv_sge>> = receives.iter().map(|receive| receive.sges.clone()).collect();
    let mut list: Vec<ibv_recv_wr> = receives
        .iter()
        .zip(&mut elements)
        .map(|(receive, elements)| ibv_recv_wr {
            wr_id: receive.wr_id,
            next: ptr::null_mut(),
            sg_list: elements.as_mut_ptr(),
            num_sge: elements.len() as c_int,
        })
        .collect();
    let first = list.as_mut_ptr();
    for index in 1..list.len() {
        list[index - 1].next = first.wrapping_add(index);
    }
    (list, elements)
}

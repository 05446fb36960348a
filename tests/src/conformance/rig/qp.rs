//! Queue pairs and address handles.

use std::cell::Cell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use super::states::{rule, state_name};
use super::{Cq, Device, Errno, NotOffered, Object, Pd, Send, Setup, Srq, zeroed};

/// The default Q_Key of UD queue pairs.
pub(in crate::conformance) const QKEY: u32 = 0x1111_1111;

#[derive(Clone, Copy)]
pub(in crate::conformance) struct Peer {
    pub(in crate::conformance) gid: ibv_gid,
    pub(in crate::conformance) qpn: u32,
    pub(in crate::conformance) psn: u32,
}

pub(in crate::conformance) struct Qp {
    object: Object<ibv_qp>,
    qpn: u32,
    pub(in crate::conformance) setup: Setup,
    psn: u32,
    peer: Cell<Peer>,
    pd: Pd,
    send_cq: Cq,
    _recv_cq: Cq,
    _srq: Option<Srq>,
}

pub(super) fn init_attr(send_cq: &Cq, recv_cq: &Cq, srq: Option<&Srq>, setup: &Setup) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: ptr::null_mut(),
        send_cq: send_cq.raw(),
        recv_cq: recv_cq.raw(),
        srq: srq.map_or(ptr::null_mut(), Srq::raw),
        cap: ibv_qp_cap {
            max_send_wr: setup.depth,
            max_recv_wr: setup.depth,
            max_send_sge: setup.sges,
            max_recv_sge: setup.sges,
            max_inline_data: setup.inline,
        },
        qp_type: setup.transport,
        sq_sig_all: c_int::from(setup.signal_all),
    }
}

impl Pd {
    /// A queue pair in RESET, initially its own peer. `psn` is the first that it will send.
    pub(in crate::conformance) fn qp(&self, send_cq: &Cq, recv_cq: &Cq, setup: &Setup, psn: u32) -> Result<Qp, Errno> {
        self.qp_on(None, send_cq, recv_cq, setup, psn)
    }

    /// With a shared receive queue.
    pub(in crate::conformance) fn qp_on(
        &self,
        srq: Option<&Srq>,
        send_cq: &Cq,
        recv_cq: &Cq,
        setup: &Setup,
        psn: u32,
    ) -> Result<Qp, Errno> {
        let mut init = init_attr(send_cq, recv_cq, srq, setup);
        // SAFETY: PD and queues are live, and the queue pair holds them.
        let qp = unsafe { (self.device().api().create_qp)(self.raw(), &mut init) };
        self.adopt(qp, [send_cq, recv_cq], srq, setup, (psn, init.cap))
    }

    /// Wraps the result of a verb that creates queue pairs, with the granted capacities.
    pub(super) fn adopt(
        &self,
        qp: *mut ibv_qp,
        [send_cq, recv_cq]: [&Cq; 2],
        srq: Option<&Srq>,
        setup: &Setup,
        (psn, cap): (u32, ibv_qp_cap),
    ) -> Result<Qp, Errno> {
        let device = self.device();
        let object = Object::new(device, "queue pair", qp, device.api().destroy_qp)?;
        // SAFETY: just made.
        let qpn = unsafe { (*object.get()).qp_num };
        Ok(Qp {
            object,
            qpn,
            setup: Setup {
                depth: cap.max_send_wr,
                inline: cap.max_inline_data,
                ..*setup
            },
            psn,
            peer: Cell::new(Peer {
                gid: device.gid(),
                qpn,
                psn,
            }),
            pd: self.clone(),
            send_cq: send_cq.clone(),
            _recv_cq: recv_cq.clone(),
            _srq: srq.cloned(),
        })
    }
}

impl Qp {
    pub(in crate::conformance) fn raw(&self) -> *mut ibv_qp {
        self.object.get()
    }

    /// Releases the pointer, which the caller destroys.
    pub(super) fn take(&self) -> *mut ibv_qp {
        self.object.ptr.replace(ptr::null_mut())
    }

    pub(in crate::conformance) fn device(&self) -> &Device {
        self.pd.device()
    }

    pub(in crate::conformance) fn qpn(&self) -> u32 {
        self.qpn
    }

    pub(in crate::conformance) fn as_peer(&self) -> Peer {
        Peer {
            gid: self.device().gid(),
            qpn: self.qpn,
            psn: self.psn,
        }
    }

    pub(in crate::conformance) fn set_peer(&self, peer: Peer) {
        self.peer.set(peer);
    }

    pub(in crate::conformance) fn destroy(&self) -> Errno {
        self.object.destroy()
    }

    /// Attributes for any modification: each with a valid value for this queue pair.
    pub(in crate::conformance) fn attr(&self) -> ibv_qp_attr {
        let (setup, peer) = (&self.setup, self.peer.get());
        let mut attr: ibv_qp_attr = zeroed();
        attr.path_mtu = setup.mtu;
        attr.path_mig_state = IBV_MIG_MIGRATED;
        attr.qkey = QKEY;
        attr.rq_psn = peer.psn;
        attr.sq_psn = self.psn;
        attr.dest_qp_num = peer.qpn;
        attr.qp_access_flags = setup.access;
        attr.ah_attr = self.device().address_of(peer.gid);
        attr.max_rd_atomic = setup.rd_atomic;
        attr.max_dest_rd_atomic = setup.dest_rd_atomic;
        attr.min_rnr_timer = setup.min_rnr_timer;
        attr.port_num = 1;
        attr.timeout = setup.timeout;
        attr.retry_cnt = setup.retry_cnt;
        attr.rnr_retry = setup.rnr_retry;
        attr.alt_ah_attr = attr.ah_attr;
        attr.alt_port_num = 1;
        attr.alt_timeout = setup.timeout;
        attr
    }

    pub(in crate::conformance) fn modify(&self, attr: &ibv_qp_attr, mask: u32) -> Errno {
        let mut attr = *attr;
        // SAFETY: live.
        Errno(unsafe { (self.device().api().modify_qp)(self.raw(), &mut attr, mask as c_int) })
    }

    /// To a state, with exactly the attributes that the transition from `from` requires.
    pub(in crate::conformance) fn step(&self, from: ibv_qp_state, to: ibv_qp_state) -> Errno {
        let required = rule(self.setup.transport, from, to).map_or(0, |rule| rule.required);
        let mut attr = self.attr();
        attr.qp_state = to;
        self.modify(&attr, IBV_QP_STATE | required)
    }

    /// From RESET to a state, on the shortest path.
    pub(in crate::conformance) fn bring_to(&self, state: ibv_qp_state) -> Result<()> {
        let path: &[ibv_qp_state] = match state {
            IBV_QPS_RESET => &[],
            IBV_QPS_INIT => &[IBV_QPS_INIT],
            IBV_QPS_RTR => &[IBV_QPS_INIT, IBV_QPS_RTR],
            IBV_QPS_RTS | IBV_QPS_SQE => &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS],
            IBV_QPS_SQD => &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD],
            _ => &[IBV_QPS_INIT, IBV_QPS_ERR],
        };
        self.modify_through(IBV_QPS_RESET, path)?;
        if state == IBV_QPS_SQE {
            self.break_send_queue()?;
        }
        Ok(())
    }

    pub(in crate::conformance) fn modify_through(&self, mut from: ibv_qp_state, path: &[ibv_qp_state]) -> Result<()> {
        for &to in path {
            let result = self.step(from, to);
            ensure!(
                result == Errno(0),
                "{} → {}: {result}",
                state_name(from),
                state_name(to)
            );
            from = to;
        }
        Ok(())
    }

    /// RTS → SQE by a send from unregistered memory (IBTA vol 1, 10.3.1.6).
    pub(in crate::conformance) fn break_send_queue(&self) -> Result<()> {
        let unregistered = ibv_sge {
            addr: 16,
            length: 4,
            lkey: 0x00de_ad00,
        };
        let ah = self.pd.ah(self.device().address_of(self.device().gid()))?;
        let mut send = Send::new(IBV_WR_SEND).id(0x50e).sge(unregistered);
        if self.setup.transport == IBV_QPT_UD {
            send = send.to(&ah, self.peer.get().qpn, QKEY);
        }
        let result = self.post_one(send);
        ensure!(result == Errno(0), "a send that is to fail locally: {result}");
        self.send_cq.wait().context("of a local error")?;
        let state = self.state()?;
        ensure!(
            state == IBV_QPS_SQE,
            "a local error brings the queue pair to {} instead of SQE",
            state_name(state)
        );
        Ok(())
    }

    pub(in crate::conformance) fn query(&self) -> Result<(ibv_qp_attr, ibv_qp_init_attr)> {
        let (mut attr, mut init) = (zeroed(), MaybeUninit::uninit());
        let everything = IBV_QP_STATE | IBV_QP_CAP | IBV_QP_AV | IBV_QP_DEST_QPN;
        // SAFETY: live; both may be written, and `init` is filled on return of 0.
        unsafe {
            let result = (self.device().api().query_qp)(self.raw(), &mut attr, everything as c_int, init.as_mut_ptr());
            ensure!(result == 0, "ibv_query_qp: {}", Errno(result));
            Ok((attr, init.assume_init()))
        }
    }

    pub(in crate::conformance) fn state(&self) -> Result<ibv_qp_state> {
        Ok(self.query()?.0.qp_state)
    }
}

#[derive(Clone)]
pub(in crate::conformance) struct Ah {
    object: Rc<Object<ibv_ah>>,
    _pd: Pd,
}

impl Device {
    /// The address vector of a GID, from the device's own.
    pub(in crate::conformance) fn address_of(&self, gid: ibv_gid) -> ibv_ah_attr {
        let mut address: ibv_ah_attr = zeroed();
        address.is_global = 1;
        address.port_num = 1;
        address.grh.dgid = gid;
        address.grh.sgid_index = self.gid_index();
        address.grh.hop_limit = 64;
        address
    }
}

impl Pd {
    pub(in crate::conformance) fn ah(&self, mut address: ibv_ah_attr) -> Result<Ah> {
        let api = self.device().api();
        let (Some(create), Some(destroy)) = (api.create_ah, api.destroy_ah) else {
            return Err(NotOffered("address handles".to_owned()).into());
        };
        // SAFETY: the PD is live.
        let ah = unsafe { create(self.raw(), &mut address) };
        let object = Rc::new(Object::new(self.device(), "address handle", ah, destroy)?);
        Ok(Ah {
            object,
            _pd: self.clone(),
        })
    }

    /// From the completion of a datagram, and its GRH.
    pub(in crate::conformance) fn ah_from(&self, mut wc: ibv_wc, grh: [u8; 40]) -> Result<Ah> {
        let api = self.device().api();
        let (Some(create), Some(destroy)) = (api.create_ah_from_wc, api.destroy_ah) else {
            return Err(NotOffered("address handles from completions".to_owned()).into());
        };
        // SAFETY: an ibv_grh is 40 bytes of integers.
        let mut grh: ibv_grh = unsafe { std::mem::transmute(grh) };
        // SAFETY: the PD is live; both structs are read.
        let ah = unsafe { create(self.raw(), &mut wc, &mut grh, 1) };
        let object = Rc::new(Object::new(self.device(), "address handle", ah, destroy)?);
        Ok(Ah {
            object,
            _pd: self.clone(),
        })
    }
}

impl Ah {
    pub(super) fn raw(&self) -> *mut ibv_ah {
        self.object.get()
    }

    pub(in crate::conformance) fn destroy(&self) -> Errno {
        self.object.destroy()
    }
}

//! An endpoint by the soft device's verbs table, with memory registered by plain ibv_reg_mr.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::ptr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_cuda::Driver;
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs_sys::*;

use crate::memory::Memory;

const TIMEOUT: Duration = Duration::from_secs(60);
const RIGHTS: u32 =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
pub(crate) const DEPTH: u32 = 64;

pub(crate) struct Region {
    pub(crate) name: String,
    pub(crate) memory: Memory,
    mr: *mut ibv_mr,
}

impl Region {
    fn new(pd: *mut ibv_pd, name: String, memory: Memory) -> Result<Self> {
        let at = ptr::with_exposed_provenance_mut(memory.addr() as usize);
        // SAFETY: the domain is live, and the memory stays valid until the region is deregistered.
        let mr = unsafe { (api().reg_mr)(pd, at, memory.len(), RIGHTS as c_int) };
        ensure!(
            !mr.is_null(),
            "ibv_reg_mr of {name}: {}",
            std::io::Error::last_os_error()
        );
        Ok(Self { name, memory, mr })
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { (*self.mr).rkey }
    }

    fn sge(&self, at: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.memory.addr() + at as u64,
            length: len as u32,
            // SAFETY: the region is live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    pub(crate) fn deregister(&mut self) -> Result<()> {
        let mr = std::mem::replace(&mut self.mr, ptr::null_mut());
        if !mr.is_null() {
            // SAFETY: the region is live, and used no more.
            let result = unsafe { (api().dereg_mr)(mr) };
            ensure!(
                result == 0,
                "ibv_dereg_mr: {}",
                std::io::Error::from_raw_os_error(result)
            );
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub(crate) struct EndpointInfo {
    pub(crate) qpn: u32,
    gid: u128,
    pub(crate) regions: Vec<(u64, u32)>,
}

impl EndpointInfo {
    pub(crate) fn to_line(&self) -> String {
        let regions = self.regions.iter().map(|(addr, rkey)| format!(" {addr:x} {rkey:x}"));
        format!("{:x} {:x}{}", self.qpn, self.gid, regions.collect::<String>())
    }

    pub(crate) fn from_line(line: &str) -> Result<Self> {
        let words: Vec<_> = line.split_whitespace().collect();
        let number = |at: usize| -> Result<u128> {
            let word = words.get(at).context("a card that is too short")?;
            Ok(u128::from_str_radix(word, 16)?)
        };
        let regions = (2..words.len().saturating_sub(1)).step_by(2);
        Ok(Self {
            qpn: number(0)? as u32,
            gid: number(1)?,
            regions: regions
                .map(|at| Ok((number(at)? as u64, number(at + 1)? as u32)))
                .collect::<Result<_>>()?,
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Write,
    WriteImm,
    Read,
    Send,
    Atomic,
}

impl Op {
    pub(crate) const MOVING: [Self; 4] = [Self::Write, Self::WriteImm, Self::Read, Self::Send];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WriteImm => "write with immediate",
            Self::Read => "read",
            Self::Send => "send",
            Self::Atomic => "atomic",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) region: usize,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

pub(crate) struct End {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    pub(crate) regions: Vec<Region>,
}

// SAFETY: verbs objects may be used from any thread (man pages).
unsafe impl Send for End {}

/// Configures this process's soft device: with an address, otherwise from the environment.
pub(crate) fn set_up(address: IpAddr) -> Result<()> {
    let [mut config] = <[DeviceConfig; 1]>::try_from(DeviceConfig::from_env()?)
        .map_err(|devices| anyhow::anyhow!("one device is enough, and not {}", devices.len()))?;
    config.address = Some(address);
    configure(vec![config])?;
    Ok(())
}

impl End {
    /// An endpoint with `len` bytes of host memory and of each GPU's memory.
    pub(crate) fn new(len: usize, gpus: usize) -> Result<Self> {
        let mut kinds = vec![("host".to_owned(), Memory::host(len))];
        if gpus > 0 {
            let driver = Driver::load()?;
            for gpu in 0..gpus.min(driver.device_count()) {
                let context = driver.device(gpu)?.context()?;
                kinds.push((format!("gpu{gpu}"), Memory::gpu(&context, len)?));
            }
        }
        // SAFETY: the list is freed below; the device stays open.
        let context = unsafe {
            let list = (api().get_device_list)(ptr::null_mut());
            ensure!(!list.is_null() && !(*list).is_null(), "no soft device");
            let context = (api().open_device)(*list);
            (api().free_device_list)(list);
            context
        };
        ensure!(
            !context.is_null(),
            "ibv_open_device: {}",
            std::io::Error::last_os_error()
        );
        // SAFETY: each call's arguments were made by the calls before.
        unsafe {
            let pd = (api().alloc_pd)(context);
            ensure!(!pd.is_null(), "ibv_alloc_pd");
            let cq = (api().create_cq)(context, 4 * DEPTH as c_int, ptr::null_mut(), ptr::null_mut(), 0);
            ensure!(!cq.is_null(), "ibv_create_cq");
            let mut init = ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: cq,
                recv_cq: cq,
                srq: ptr::null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: DEPTH,
                    max_recv_wr: DEPTH,
                    max_send_sge: 4,
                    max_recv_sge: 4,
                    max_inline_data: 64,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 1,
            };
            let qp = (api().create_qp)(pd, &mut init);
            ensure!(!qp.is_null(), "ibv_create_qp");
            let mut end = Self {
                context,
                pd,
                cq,
                qp,
                regions: Vec::new(),
            };
            for (name, memory) in kinds {
                end.regions.push(Region::new(pd, name, memory)?);
            }
            Ok(end)
        }
    }

    pub(crate) fn info(&self) -> Result<EndpointInfo> {
        let mut gid = MaybeUninit::<ibv_gid>::uninit();
        // SAFETY: the context is live; the GID is initialized if the call returns 0.
        let gid = unsafe {
            ensure!(
                (api().query_gid)(self.context, 1, 0, gid.as_mut_ptr()) == 0,
                "ibv_query_gid"
            );
            gid.assume_init()
        };
        // SAFETY: both types are sixteen bytes.
        let gid = unsafe { std::mem::transmute_copy::<ibv_gid, [u8; 16]>(&gid) };
        Ok(EndpointInfo {
            // SAFETY: the queue pair is live.
            qpn: unsafe { (*self.qp).qp_num },
            gid: u128::from_be_bytes(gid),
            regions: self
                .regions
                .iter()
                .map(|region| (region.memory.addr(), region.rkey()))
                .collect(),
        })
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: the queue pair is live.
        let result = unsafe { (api().modify_qp)(self.qp, attr, mask as c_int) };
        ensure!(
            result == 0,
            "ibv_modify_qp: {}",
            std::io::Error::from_raw_os_error(result)
        );
        Ok(())
    }

    pub(crate) fn connect(&self, peer: &EndpointInfo) -> Result<()> {
        // SAFETY: the struct consists of integers.
        let mut attr: ibv_qp_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = RIGHTS;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attr, mask)?;
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_4096;
        attr.dest_qp_num = peer.qpn;
        attr.max_dest_rd_atomic = 16;
        attr.min_rnr_timer = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        // SAFETY: both types are sixteen bytes.
        attr.ah_attr.grh.dgid = unsafe { std::mem::transmute_copy::<[u8; 16], ibv_gid>(&peer.gid.to_be_bytes()) };
        attr.ah_attr.grh.hop_limit = 64;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask)?;
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 16;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 16;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
    }

    pub(crate) fn post(&self, op: Op, parts: &[Part], (addr, rkey): (u64, u32), inline: bool) -> Result<()> {
        let mut sges: Vec<_> = parts
            .iter()
            .map(|part| self.regions[part.region].sge(part.at, part.len))
            .collect();
        // SAFETY: the struct consists of integers and pointers, for which zero is valid.
        let mut wr: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
        wr.sg_list = sges.as_mut_ptr();
        wr.num_sge = sges.len() as c_int;
        wr.send_flags = IBV_SEND_SIGNALED | if inline { IBV_SEND_INLINE } else { 0 };
        wr.opcode = match op {
            Op::Write => IBV_WR_RDMA_WRITE,
            Op::WriteImm => IBV_WR_RDMA_WRITE_WITH_IMM,
            Op::Read => IBV_WR_RDMA_READ,
            Op::Send => IBV_WR_SEND,
            Op::Atomic => IBV_WR_ATOMIC_FETCH_AND_ADD,
        };
        if op == Op::Atomic {
            wr.wr.atomic = ibv_send_wr_atomic {
                remote_addr: addr,
                compare_add: 1,
                swap: 0,
                rkey,
            };
        } else {
            wr.wr.rdma = ibv_send_wr_rdma {
                remote_addr: addr,
                rkey,
            };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live; a list of one.
        let result = unsafe { inline::post_send(self.qp, &mut wr, &mut bad) };
        ensure!(
            result == 0,
            "ibv_post_send: {}",
            std::io::Error::from_raw_os_error(result)
        );
        Ok(())
    }

    pub(crate) fn receive(&self, parts: &[Part]) -> Result<()> {
        let mut sges: Vec<_> = parts
            .iter()
            .map(|part| self.regions[part.region].sge(part.at, part.len))
            .collect();
        let mut wr = ibv_recv_wr {
            wr_id: 0,
            next: ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as c_int,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live; a list of one.
        let result = unsafe { inline::post_recv(self.qp, &mut wr, &mut bad) };
        ensure!(
            result == 0,
            "ibv_post_recv: {}",
            std::io::Error::from_raw_os_error(result)
        );
        Ok(())
    }

    pub(crate) fn poll(&self) -> Option<ibv_wc> {
        let mut wc = MaybeUninit::uninit();
        // SAFETY: the queue is live, with room for one, which is initialized if the call returns 1.
        unsafe { (inline::poll_cq(self.cq, 1, wc.as_mut_ptr()) == 1).then(|| wc.assume_init()) }
    }

    pub(crate) fn wait(&self) -> Result<ibv_wc> {
        let since = Instant::now();
        let mut turns = 0_u32;
        loop {
            if let Some(wc) = self.poll() {
                return Ok(wc);
            }
            turns += 1;
            if turns.is_multiple_of(1024) {
                ensure!(since.elapsed() < TIMEOUT, "no completion came within {TIMEOUT:?}");
            }
        }
    }

    pub(crate) fn done(&self) -> Result<ibv_wc> {
        let wc = self.wait()?;
        if wc.status != IBV_WC_SUCCESS {
            bail!("a completion with status {}", wc.status);
        }
        Ok(wc)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: the objects are live, and used no more; destroyed in dependency order.
        unsafe {
            (api().destroy_qp)(self.qp);
            for region in &mut self.regions {
                if let Err(error) = region.deregister() {
                    eprintln!("gpu-verbs: {error:#}");
                }
            }
            (api().destroy_cq)(self.cq);
            (api().dealloc_pd)(self.pd);
            (api().close_device)(self.context);
        }
    }
}

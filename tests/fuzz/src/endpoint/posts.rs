//! Requests of the application, valid and not.

use std::net::IpAddr;

use arbitrary::{Result, Unstructured};
use doorbell_roce_proto::cm::MAD_LEN;
use doorbell_roce_proto::memory::{AtomicOp, Bind, Flush, Placement, Sge};
use doorbell_roce_proto::qp::{Path, RemoteAccess};
use doorbell_roce_proto::work::{Destination, Operation, Payload, ReceiveRequest, SendRequest};
use doorbell_roce_proto::{LKey, RKey};

use super::{OURS, QKEY, SHARED, THEIR_QPN, THEIRS, UD, World};
use crate::memory;

impl World {
    pub(super) fn post_send(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let index = self.pick(input)?;
        let qpn = self.qps[index].qpn;
        let sges = self.sges(input)?;
        let inline = [7; 64];
        let [is_inline, signaled, fence, solicited] = input.arbitrary()?;
        let request = SendRequest {
            wr_id: self.next_wr,
            operation: self.operation(input)?,
            payload: if is_inline {
                Payload::Inline(&inline[..input.int_in_range(0..=64)?])
            } else {
                Payload::Gather(&sges)
            },
            signaled,
            fence,
            solicited,
        };
        let posted = if index == UD {
            let to = Destination {
                path: path(if fence { OURS } else { THEIRS }),
                qpn: if fence { qpn } else { THEIR_QPN },
                qkey: QKEY,
            };
            self.endpoint.post_datagram(self.now, qpn, &request, &to)
        } else {
            self.endpoint.post_send(self.now, qpn, &request)
        };
        if posted.is_ok() {
            self.qps[index].sends.push_back(self.next_wr);
            self.next_wr += 1;
        }
        Ok(())
    }

    pub(super) fn post_receive(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let index = self.pick(input)?;
        let sges = self.sges(input)?;
        let request = ReceiveRequest {
            wr_id: self.next_wr,
            sges: &sges,
        };
        let (posted, queue) = if index == SHARED {
            (self.endpoint.post_shared_receive(self.srq, &request), &mut self.shared)
        } else {
            let queue = &mut self.qps[index];
            (self.endpoint.post_receive(queue.qpn, &request), &mut queue.receives)
        };
        if posted.is_ok() {
            queue.push_back(self.next_wr);
            self.next_wr += 1;
        }
        Ok(())
    }

    /// A datagram of the connection managers.
    pub(super) fn send_mad(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let mad = Box::new([input.arbitrary()?; MAD_LEN]);
        self.endpoint
            .send_mad(path(if input.arbitrary()? { OURS } else { THEIRS }), mad);
        Ok(())
    }

    fn operation(&self, input: &mut Unstructured<'_>) -> Result<Operation> {
        let (addr, rkey) = self.remote(input)?;
        let imm = input.arbitrary::<bool>()?.then_some(7);
        Ok(match input.arbitrary::<u8>()? % 11 {
            0 | 1 => Operation::Send { imm },
            2 => Operation::SendInvalidate { rkey: self.window },
            3 => Operation::Write { addr, rkey, imm },
            4 => Operation::Read { addr, rkey },
            5 => Operation::Atomic {
                addr: addr & !7,
                rkey,
                op: AtomicOp::FetchAdd { add: 1 },
            },
            6 => Operation::Atomic {
                addr,
                rkey,
                op: AtomicOp::CompareSwap { compare: 0, swap: addr },
            },
            7 => Operation::Invalidate { rkey: self.window },
            8 => Operation::AtomicWrite {
                addr: addr & !7,
                rkey,
                word: addr.to_ne_bytes(),
            },
            9 => Operation::Flush(Flush {
                addr,
                rkey,
                len: input.arbitrary()?,
                whole_region: imm.is_some(),
                placement: Placement {
                    global: true,
                    persistent: false,
                },
            }),
            _ => Operation::Bind(Bind {
                rkey: self.window,
                region: LKey(rkey.0),
                addr,
                len: input.arbitrary::<u16>()?.into(),
                access: RemoteAccess {
                    read: true,
                    write: imm.is_some(),
                    atomic: false,
                    ..RemoteAccess::default()
                },
                zero_based: false,
            }),
        })
    }

    /// Up to three elements, mostly inside a region.
    fn sges(&self, input: &mut Unstructured<'_>) -> Result<Vec<Sge>> {
        let count = input.int_in_range(0..=3)?;
        (0..count)
            .map(|_| {
                let region = *input.choose(&self.regions)?;
                let offset = u64::from(input.arbitrary::<u16>()? % 2064);
                let len = u32::from(input.arbitrary::<u16>()? % 1024);
                Ok(Sge {
                    addr: region.addr + offset,
                    len,
                    lkey: region.lkey,
                })
            })
            .collect()
    }

    /// An address and key, mostly of a region with some rights; also of the window.
    pub(super) fn remote(&self, input: &mut Unstructured<'_>) -> Result<(u64, RKey)> {
        let region = *input.choose(&self.regions)?;
        let addr = region.addr + u64::from(input.arbitrary::<u16>()? % 2064);
        Ok(match input.arbitrary::<u8>()? {
            0..200 => (addr, memory::rkey(region)),
            200..232 => (addr, self.window),
            232..244 => (self.untouched.addr, memory::rkey(self.untouched)),
            244..250 => (u64::MAX - (addr & 0xff), memory::rkey(region)),
            _ => (addr, RKey(input.arbitrary()?)),
        })
    }
}

fn path(remote: IpAddr) -> Path {
    Path::new(OURS, remote)
}

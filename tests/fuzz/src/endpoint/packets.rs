//! Packets: genuine ones, changed ones, made-up ones, and noise.

use std::net::{IpAddr, Ipv6Addr};

use arbitrary::{Result, Unstructured};
use doorbell_roce_proto::cm::MAD_LEN;
use doorbell_roce_proto::wire::{
    self, Aeth, AtomicAckEth, AtomicEth, Bth, Cnp, Credits, Deth, Extension, Feth, Ieth, ImmDt, IpFields, Layout, Nak,
    Opcode, Reth, RnrTimer, SelectiveEth, Syndrome, XrcEth,
};
use doorbell_roce_proto::{Psn, Qpn, mad_of};

use super::{FIRST_PSN, MTU, ON_LINK, OURS, QKEY, THEIR_QPN, THEIRS, UD, World, seal};

/// Of a made-up packet.
const MOST_PAYLOAD: usize = 300;
const HEADERS: usize = 64;
const STRANGER: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x66));
/// The queue pair of the connection managers, and its Q_Key (IBTA vol 1, 3.5.3 and 16.7.3).
const CM: Qpn = Qpn::new(1);
const CM_QKEY: u32 = 0x8001_0000;

impl World {
    /// A packet in flight arrives, perhaps again, perhaps changed; or is lost.
    pub(super) fn deliver(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        if self.flight.is_empty() {
            return Ok(());
        }
        let at = usize::from(input.arbitrary::<u8>()?) % self.flight.len();
        let fate = input.arbitrary::<u8>()?;
        let packet = match fate % 8 {
            0 => self.flight.get(at).cloned(),
            _ => self.flight.remove(at),
        };
        let mut packet = packet.unwrap_or_default();
        match fate % 8 {
            1 => return Ok(()),
            2 => {
                let at = usize::from(input.arbitrary::<u8>()?) % packet.len();
                packet[at] ^= input.arbitrary::<u8>()?;
                seal(&mut packet, OURS);
            }
            3 => {
                packet.truncate(usize::from(input.arbitrary::<u16>()?));
                seal(&mut packet, OURS);
            }
            _ => {}
        }
        self.datagram(OURS, 0, &packet);
        Ok(())
    }

    /// A packet of any kind to any queue pair, near the PSNs that it expects.
    pub(super) fn make_up(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let index = self.pick(input)?;
        let opcode = *input.choose(Opcode::ALL)?;
        let psn = FIRST_PSN.add(u32::from(input.arbitrary::<u8>()? % 64).wrapping_sub(16));
        let psn = if input.arbitrary::<u8>()? < 250 {
            psn
        } else {
            Psn::new(input.arbitrary()?)
        };
        let len = match input.arbitrary::<u8>()? {
            _ if !opcode.has_payload() => 0,
            0..128 => MTU.bytes(),
            len => usize::from(len - 128) * MOST_PAYLOAD / 127,
        };
        let to_cm = index == UD && opcode.has_payload() && input.arbitrary::<u8>()? >= 192;
        let (dest, len) = if to_cm {
            (CM, MAD_LEN)
        } else {
            (self.qps[index].qpn, len)
        };
        let mut bth = Bth::new(opcode, dest, psn);
        [bth.ack_req, bth.solicited] = input.arbitrary()?;
        bth.xrc = opcode.has_xrc_eth().then_some(XrcEth { srq: 0 });
        let extension = self.extension(input, opcode, len)?;
        classify(opcode, &extension);
        let payload = vec![input.arbitrary()?; len];
        if index == ON_LINK {
            let mut headers = [0; HEADERS];
            let length = wire::write_headers(&mut headers, &bth, &extension).expect("the headers of the opcode");
            self.link_packet(&headers[..length], &payload);
            return Ok(());
        }
        let mut packet = vec![0; wire::packet_len(opcode, len)];
        let start = wire::write(&mut packet, &bth, &extension, len).expect("the headers of the opcode");
        packet[start..start + len].copy_from_slice(&payload);
        assert_eq!(
            mad_of(&packet).is_some(),
            dest == CM && opcode == Opcode::ud_send(false)
        );
        let src = self.source(input, index)?;
        let fields = IpFields {
            src,
            dst: OURS,
            traffic_class: input.arbitrary()?,
        };
        let (_, header) = wire::ip_header(fields, packet.len());
        let addresses = wire::ip_header_addresses(&header);
        assert_eq!(
            addresses.map(|(src, dst)| (src.to_canonical(), dst.to_canonical())),
            Some((src, OURS))
        );
        seal(&mut packet, src);
        self.datagram(src, fields.traffic_class, &packet);
        Ok(())
    }

    /// Mostly the peer's address.
    fn source(&self, input: &mut Unstructured<'_>, index: usize) -> Result<IpAddr> {
        let (right, other) = if index < 2 { (OURS, THEIRS) } else { (THEIRS, OURS) };
        Ok(match input.arbitrary::<u8>()? {
            0..240 => right,
            240..248 => other,
            _ => STRANGER,
        })
    }

    fn extension(&self, input: &mut Unstructured<'_>, opcode: Opcode, len: usize) -> Result<Extension> {
        let (va, rkey) = self.remote(input)?;
        let len = match input.arbitrary::<u8>()? {
            0..192 if opcode.position().ends() => len as u32,
            0..240 => u32::from(input.arbitrary::<u16>()? % 2048),
            _ => input.arbitrary()?,
        };
        let reth = Reth { va, rkey, len };
        let imm = ImmDt(len);
        let aeth = Aeth {
            syndrome: syndrome(input)?,
            msn: input.arbitrary::<u32>()? & 0xff_ffff,
        };
        let deth = Deth {
            qkey: match input.arbitrary::<u8>()? {
                0..192 => QKEY,
                192..240 => CM_QKEY,
                _ => len,
            },
            src_qp: THEIR_QPN,
        };
        Ok(match opcode.layout() {
            Layout::Bare => Extension::Bare,
            Layout::Reth => Extension::Reth(reth),
            Layout::RethImm => Extension::RethImm(reth, imm),
            Layout::Imm => Extension::Imm(imm),
            Layout::Ieth => Extension::Ieth(Ieth { rkey }),
            Layout::Aeth => Extension::Aeth(aeth),
            Layout::AethAtomic => Extension::AethAtomic(aeth, AtomicAckEth { original: va }),
            Layout::Selective => Extension::Selective(SelectiveEth::from_bytes(&[va as u8; SelectiveEth::LEN])),
            Layout::Atomic => Extension::Atomic(AtomicEth {
                va,
                rkey,
                swap_add: va,
                compare: 0,
            }),
            Layout::FethReth => Extension::FethReth(
                Feth {
                    plt: input.arbitrary::<u8>()? & 0xf,
                    sel: input.arbitrary::<u8>()? & 3,
                },
                reth,
            ),
            Layout::Deth => Extension::Deth(deth),
            Layout::DethImm => Extension::DethImm(deth, imm),
        })
    }

    /// A CNP, or bytes that may be no packet at all, with a valid ICRC or without, or a short link
    /// header.
    pub(super) fn noise(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let kind = input.arbitrary::<u8>()?;
        let index = self.pick(input)?;
        let len = usize::from(input.arbitrary::<u8>()?) % 96;
        let mut bytes = input.bytes(len.min(input.len()))?.to_vec();
        if let Some(grh) = bytes.first_chunk() {
            let _ = wire::ip_header_addresses(grh);
        }
        let _ = mad_of(&bytes);
        let dest = if kind < 240 { self.qps[index].qpn } else { CM };
        if let Some(qpn) = bytes.get_mut(5..8) {
            qpn.copy_from_slice(&dest.get().to_be_bytes()[1..]);
        }
        if kind.is_multiple_of(4) {
            self.link_packet(&bytes, &[kind; 40]);
            return Ok(());
        }
        if (224..240).contains(&kind) {
            bytes.resize(Cnp::LEN, kind);
            let dest_qp = self.qps[index].qpn;
            assert_eq!(Cnp { dest_qp }.write(&mut bytes), Some(Cnp::LEN));
            assert_eq!(Cnp::parse(&bytes), Some(Cnp { dest_qp }));
        }
        let _ = Cnp::parse(&bytes);
        if kind % 4 != 1 {
            seal(&mut bytes, THEIRS);
        }
        self.datagram(THEIRS, kind, &bytes);
        Ok(())
    }
}

/// What an opcode is must agree with the headers that it has.
fn classify(opcode: Opcode, extension: &Extension) {
    assert_eq!(opcode.has_imm(), extension.imm().is_some(), "{opcode:?}");
    assert_eq!(
        opcode.has_invalidate(),
        matches!(extension, Extension::Ieth(_)),
        "{opcode:?}"
    );
    assert_eq!(
        opcode.layout().is_empty(),
        matches!(extension, Extension::Bare),
        "{opcode:?}"
    );
    assert!(opcode.is_request() || !opcode.needs_receive(), "{opcode:?}");
}

fn syndrome(input: &mut Unstructured<'_>) -> Result<Syndrome> {
    let code = input.arbitrary::<u8>()?;
    Ok(match code {
        0..192 => {
            let credits = Credits::from_code(code);
            assert!(credits.count().is_none_or(|count| count <= 1 << 15));
            Syndrome::Ack(credits)
        }
        192..208 => {
            let timer = RnrTimer::from_code(code);
            assert_eq!(RnrTimer::at_least(timer.duration()), timer);
            Syndrome::RnrNak(timer)
        }
        208..224 => Syndrome::Nak(Nak::PsnSequence),
        224..232 => Syndrome::Nak(Nak::InvalidRequest),
        232..240 => Syndrome::Nak(Nak::RemoteAccess),
        240..248 => Syndrome::Nak(Nak::RemoteOperational),
        _ => Syndrome::Nak(Nak::InvalidRd),
    })
}

//! The QP information that the ends exchange: hexadecimal fields, each followed by a colon, of one
//! of two fixed lengths.

use doorbell_verbs::{Gid, Lid, Psn, Qpn};

use super::message::Malformed;

/// Length with a GID, the terminating NUL included.
const WITH_GID: usize = 108;
const WITHOUT_GID: usize = 59;

const WIDE_QPN: &str = "the queue pair number in its QP information has more than 24 bits";
const WIDE_PSN: &str = "the sequence number in its QP information has more than 24 bits";

/// The address of a queue pair and its memory. Without a GID the port is addressed by its LID alone
/// (InfiniBand).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QpInfo {
    /// The port's LID; 0 on RoCE.
    pub(crate) lid: Lid,
    /// Outstanding READs and atomics that it serves.
    pub(crate) out_reads: u16,
    pub(crate) qpn: Qpn,
    pub(crate) psn: Psn,
    pub(crate) rkey: u32,
    /// Where the peer writes to or reads from.
    pub(crate) vaddr: u64,
    pub(crate) gid: Option<Gid>,
    /// The number of its shared receive queue; 0 but for transports that name one.
    pub(crate) srqn: u32,
}

impl QpInfo {
    pub(crate) fn len(has_gid: bool) -> usize {
        if has_gid { WITH_GID } else { WITHOUT_GID }
    }

    /// Encodes it as text, for TCP.
    pub(crate) fn format(&self) -> Vec<u8> {
        let mut text = format!(
            "{:04x}:{:04x}:{:06x}:{:06x}:{:08x}:{:016x}:",
            self.lid.0,
            self.out_reads,
            self.qpn.get(),
            self.psn.get(),
            self.rkey,
            self.vaddr
        );
        match self.gid {
            Some(gid) => {
                for byte in gid.0 {
                    text.push_str(&format!("{byte:02x}:"));
                }
                text.push_str(&format!("{:08x}:", self.srqn));
            }
            None => text.push_str(&format!("{:08x}", self.srqn)),
        }
        let mut bytes = text.into_bytes();
        bytes.push(0);
        bytes
    }

    /// Length as a struct.
    pub(crate) const STRUCT: usize = 56;

    /// Encodes it as a C struct, for a queue pair: big-endian numbers, with four bytes of padding
    /// before the address. The last number is the sender's GID index, which is meaningless here.
    pub(crate) fn to_struct(self) -> [u8; QpInfo::STRUCT] {
        let mut bytes = [0; QpInfo::STRUCT];
        let words = [
            self.lid.0.into(),
            self.out_reads.into(),
            self.qpn.get(),
            self.psn.get(),
            self.rkey,
        ];
        for (into, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *into = word.to_be_bytes();
        }
        bytes[24..32].copy_from_slice(&self.vaddr.to_be_bytes());
        bytes[32..48].copy_from_slice(&self.gid.unwrap_or_default().0);
        bytes[48..52].copy_from_slice(&self.srqn.to_be_bytes());
        bytes
    }

    /// Decodes [`QpInfo::to_struct`].
    pub(crate) fn from_struct(bytes: &[u8; QpInfo::STRUCT]) -> Result<QpInfo, Malformed> {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_be_bytes(word)
        };
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[32..48]);
        let vaddr = u64::from(word(24)) << 32 | u64::from(word(28));
        let gid = (gid != [0; 16]).then_some(Gid(gid));
        QpInfo::checked([0, 4, 8, 12, 16, 48].map(|at| word(at).into()), vaddr, gid)
    }

    /// From the LID, the outstanding reads, the queue pair number, the sequence number, the rkey
    /// and the shared receive queue's number, each as long as the peer has sent it.
    fn checked(fields: [u64; 6], vaddr: u64, gid: Option<Gid>) -> Result<QpInfo, Malformed> {
        let [lid, out_reads, qpn, psn, rkey, srqn] = fields;
        Ok(QpInfo {
            lid: Lid(fits(lid, "the LID in its QP information has more than 16 bits")?),
            out_reads: fits(
                out_reads,
                "the outstanding reads in its QP information have more than 16 bits",
            )?,
            qpn: fits(qpn, WIDE_QPN).and_then(|qpn| Qpn::new(qpn).ok_or(Malformed(WIDE_QPN)))?,
            psn: fits(psn, WIDE_PSN).and_then(|psn| Psn::new(psn).ok_or(Malformed(WIDE_PSN)))?,
            rkey: fits(rkey, "the rkey in its QP information has more than 32 bits")?,
            vaddr,
            gid,
            srqn: fits(srqn, "the last number in its QP information has more than 32 bits")?,
        })
    }

    /// Decodes [`QpInfo::format`]. A field may have fewer or more digits than usual, as long as its
    /// value fits.
    pub(crate) fn parse(bytes: &[u8]) -> Result<QpInfo, Malformed> {
        let has_gid = match bytes.len() {
            WITH_GID => true,
            WITHOUT_GID => false,
            _ => return Err(Malformed("its QP information is of another length")),
        };
        let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        let text = std::str::from_utf8(text).map_err(|_| Malformed("its QP information is no text"))?;
        let mut fields = Fields(text);
        let mut numbers = [0; 6];
        for number in &mut numbers {
            *number = fields.next()?;
        }
        let [lid, out_reads, qpn, psn, rkey, vaddr] = numbers;
        let mut gid = has_gid.then(Gid::default);
        for byte in gid.iter_mut().flat_map(|gid| &mut gid.0) {
            *byte = fits(fields.next()?, "the GID in its QP information is invalid")?;
        }
        let srqn = fields.next()?;
        fields.end()?;
        QpInfo::checked([lid, out_reads, qpn, psn, rkey, srqn], vaddr, gid)
    }
}

fn fits<T: TryFrom<u64>>(value: u64, otherwise: &'static str) -> Result<T, Malformed> {
    T::try_from(value).map_err(|_| Malformed(otherwise))
}

struct Fields<'a>(&'a str);

impl Fields<'_> {
    fn next(&mut self) -> Result<u64, Malformed> {
        let (field, rest) = self.0.split_once(':').unwrap_or((self.0, ""));
        self.0 = rest;
        // from_str_radix accepts a sign, which is no digit.
        if field.is_empty() || !field.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(Malformed("its QP information is not made of hexadecimal fields"));
        }
        u64::from_str_radix(field, 16).map_err(|_| Malformed("a field of its QP information has more than 64 bits"))
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed("its QP information has more fields than belong there"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As a C tool sent it.
    const SENT: &[u8] = b"0000:0001:1fb24e:ef0f40:0000be68:00007efeacdd9000:00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01:00000000:\0";

    fn sent() -> QpInfo {
        QpInfo {
            lid: Lid(0),
            out_reads: 1,
            qpn: Qpn::truncated(0x001f_b24e),
            psn: Psn::truncated(0x00ef_0f40),
            rkey: 0xbe68,
            vaddr: 0x7efe_acdd_9000,
            gid: Some(Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1])),
            srqn: 0,
        }
    }

    #[test]
    fn qp_info_of_a_c_tool_is_parsed_and_formatted_identically() {
        assert_eq!(QpInfo::parse(SENT), Ok(sent()));
        assert_eq!(sent().format(), SENT);
    }

    #[test]
    fn qp_info_struct_of_a_c_tool_is_decoded_and_encoded_identically() {
        let sent: [u8; QpInfo::STRUCT] = *b"\0\0\0\0\0\0\0\x01\0\x95O\xd9\0\xfc\x8d\xd8\0\x01\xa0\x98\0\0\0\0\0\0V\x1c\xf4\x13 \0\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f[\0\x01\0\0\0\0\0\0\0\0";
        let qp_info = QpInfo {
            lid: Lid(0),
            out_reads: 1,
            qpn: Qpn::truncated(0x0095_4fd9),
            psn: Psn::truncated(0x00fc_8dd8),
            rkey: 0x1_a098,
            vaddr: 0x561c_f413_2000,
            gid: Some(Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 91, 0, 1])),
            srqn: 0,
        };
        assert_eq!(QpInfo::from_struct(&sent), Ok(qp_info));
        assert_eq!(qp_info.to_struct(), sent);
    }

    #[test]
    fn qp_info_without_a_gid_has_the_shorter_length() {
        let qp_info = QpInfo { gid: None, ..sent() };
        let bytes = qp_info.format();
        assert_eq!(bytes.len(), QpInfo::len(false));
        assert_eq!(QpInfo::parse(&bytes), Ok(qp_info));
    }

    #[test]
    fn nonsense_is_refused() {
        for (at, with) in [
            (0, b'g'),
            (0, b'+'),
            (4, b'0'),
            (48, b':'),
            (50, 0xff),
            (3, b':'),
            (20, 0),
            (107, b'1'),
            (107, b':'),
        ] {
            let mut bad = SENT.to_vec();
            bad[at] = with;
            assert!(QpInfo::parse(&bad).is_err(), "byte {at} = {with}");
        }
        assert!(QpInfo::parse(&SENT[..107]).is_err());
        assert!(QpInfo::parse(&[0; 108]).is_err());
        assert!(QpInfo::parse(&[b':'; 59]).is_err());
        assert!(QpInfo::parse(&[]).is_err());
    }

    proptest! {
        #[test]
        fn every_qp_info_survives_formatting_and_parsing(
            (lid, out_reads, qpn, psn) in (any::<u16>(), any::<u16>(), 0u32..1 << 24, 0u32..1 << 24),
            (rkey, vaddr, gid, srqn) in (any::<u32>(), any::<u64>(), any::<Option<[u8; 16]>>(), any::<u32>()),
        ) {
            let (qpn, psn) = (Qpn::truncated(qpn), Psn::truncated(psn));
            let qp_info = QpInfo { lid: Lid(lid), out_reads, qpn, psn, rkey, vaddr, gid: gid.map(Gid), srqn };
            let bytes = qp_info.format();
            prop_assert_eq!(bytes.len(), QpInfo::len(gid.is_some()));
            prop_assert_eq!(QpInfo::parse(&bytes), Ok(qp_info));
        }

        #[test]
        fn every_struct_decodes_or_is_an_error(bytes: [u8; 28], wide in any::<[u8; 28]>(), is_wide: bool) {
            let mut whole = [0; QpInfo::STRUCT];
            whole[..28].copy_from_slice(&bytes);
            whole[28..].copy_from_slice(&wide);
            if !is_wide {
                (whole[0], whole[1], whole[4], whole[5], whole[8], whole[12]) = (0, 0, 0, 0, 0, 0);
            }
            match QpInfo::from_struct(&whole) {
                Ok(qp_info) => prop_assert_eq!(QpInfo::from_struct(&qp_info.to_struct()), Ok(qp_info)),
                Err(_) => prop_assert!(is_wide),
            }
        }

        #[test]
        fn hostile_bytes_parse_or_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            if let Ok(qp_info) = QpInfo::parse(&bytes) {
                prop_assert_eq!(QpInfo::parse(&qp_info.format()), Ok(qp_info));
            }
        }

        #[test]
        fn a_changed_byte_parses_or_is_an_error(at in 0usize..108, with in any::<u8>()) {
            let mut bytes = SENT.to_vec();
            bytes[at] = with;
            if let Ok(qp_info) = QpInfo::parse(&bytes) {
                prop_assert_eq!(QpInfo::parse(&qp_info.format()), Ok(qp_info));
            }
        }
    }
}

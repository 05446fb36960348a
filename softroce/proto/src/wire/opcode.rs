//! The opcodes of the BTH (IBTA vol 1, 9.2.1, table 38) and their properties.
//!
//! One row per opcode; the engine uses these properties instead of comparing numbers.

/// The transport service, the top three bits of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection: RC to any shared receive queue of the peer's XRC domain.
    Xrc,
}

impl Transport {
    /// Whether requests are acknowledged, and sent again until they are.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::Xrc)
    }

    /// Whether its queue pairs have one peer.
    pub const fn is_connected(self) -> bool {
        !matches!(self, Self::Ud)
    }
}

/// The operation of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// Acknowledge, positive or negative.
    Acknowledge,
    /// ATOMIC acknowledge.
    AtomicAcknowledge,
    /// Compare and swap.
    CompareSwap,
    /// Fetch and add.
    FetchAdd,
    /// FLUSH.
    Flush,
    /// Atomic WRITE of 8 bytes.
    AtomicWrite,
    /// Selective ACK, between Doorbell ends (decision 111).
    SelectiveAck,
}

/// A packet's position in its message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Position {
    /// The first of several: exactly one path MTU.
    First,
    /// Neither first nor last: exactly one path MTU.
    Middle,
    /// The last of several: 1 byte to one path MTU.
    Last,
    /// The only one: 0 bytes to one path MTU.
    Only,
}

impl Position {
    /// The position by whether the packet is the first and the last of its message.
    pub const fn of(first: bool, last: bool) -> Self {
        match (first, last) {
            (true, true) => Self::Only,
            (true, false) => Self::First,
            (false, true) => Self::Last,
            (false, false) => Self::Middle,
        }
    }

    /// Whether it starts the message: FIRST or ONLY.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether it ends the message: LAST or ONLY.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// The extension headers after the BTH, in wire order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Layout {
    /// None.
    Bare,
    /// RETH.
    Reth,
    /// RETH, then ImmDt.
    RethImm,
    /// ImmDt.
    Imm,
    /// IETH.
    Ieth,
    /// AETH.
    Aeth,
    /// AETH, then AtomicAckETH.
    AethAtomic,
    /// AtomicETH.
    Atomic,
    /// DETH.
    Deth,
    /// DETH, then ImmDt.
    DethImm,
    /// FETH, then RETH.
    FethReth,
    /// SelectiveEth.
    Selective,
}

impl Layout {
    /// Their length in bytes.
    pub const fn len(self) -> usize {
        match self {
            Self::Bare => 0,
            Self::Reth => 16,
            Self::RethImm | Self::FethReth => 20,
            Self::Imm | Self::Ieth | Self::Aeth => 4,
            Self::AethAtomic | Self::DethImm => 12,
            Self::Atomic => 28,
            Self::Deth => 8,
            Self::Selective => 32,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        matches!(self, Self::Bare)
    }
}

macro_rules! opcodes {
    ($($name:ident = $code:literal: $transport:ident $operation:ident $position:ident, $layout:ident, $payload:literal;)*) => {
        /// An opcode of the services RC, UC, UD and XRC (IBTA vol 1, table 38 and annex A19), or
        /// the one of ours, in the range 0xc0 to 0xff of manufacturers.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum Opcode {
            $(
                #[doc = concat!(
                    stringify!($code), ": ", stringify!($transport), " ", stringify!($operation), " ",
                    stringify!($position), ", ", stringify!($layout), ".",
                )]
                $name = $code,
            )*
        }

        impl Opcode {
            /// Every opcode, in numerical order.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The opcode with this number, `None` for reserved ones, RD and [CNP](super::Cnp).
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The transport service it belongs to.
            pub const fn transport(self) -> Transport {
                match self {
                    $(Self::$name => Transport::$transport,)*
                }
            }

            /// Its operation.
            pub const fn operation(self) -> Operation {
                match self {
                    $(Self::$name => Operation::$operation,)*
                }
            }

            /// Its position in the message; ONLY for requests and acknowledgements of one packet.
            pub const fn position(self) -> Position {
                match self {
                    $(Self::$name => Position::$position,)*
                }
            }

            /// The extension headers that follow the BTH, and the XRCETH if there is one.
            pub const fn layout(self) -> Layout {
                match self {
                    $(Self::$name => Layout::$layout,)*
                }
            }

            /// Whether payload may follow the headers (it may be empty in a SEND or WRITE ONLY).
            pub const fn has_payload(self) -> bool {
                match self {
                    $(Self::$name => $payload,)*
                }
            }
        }
    };
}

opcodes! {
    RcSendFirst = 0x00: Rc Send First, Bare, true;
    RcSendMiddle = 0x01: Rc Send Middle, Bare, true;
    RcSendLast = 0x02: Rc Send Last, Bare, true;
    RcSendLastImm = 0x03: Rc Send Last, Imm, true;
    RcSendOnly = 0x04: Rc Send Only, Bare, true;
    RcSendOnlyImm = 0x05: Rc Send Only, Imm, true;
    RcWriteFirst = 0x06: Rc Write First, Reth, true;
    RcWriteMiddle = 0x07: Rc Write Middle, Bare, true;
    RcWriteLast = 0x08: Rc Write Last, Bare, true;
    RcWriteLastImm = 0x09: Rc Write Last, Imm, true;
    RcWriteOnly = 0x0a: Rc Write Only, Reth, true;
    RcWriteOnlyImm = 0x0b: Rc Write Only, RethImm, true;
    RcReadRequest = 0x0c: Rc ReadRequest Only, Reth, false;
    RcReadResponseFirst = 0x0d: Rc ReadResponse First, Aeth, true;
    RcReadResponseMiddle = 0x0e: Rc ReadResponse Middle, Bare, true;
    RcReadResponseLast = 0x0f: Rc ReadResponse Last, Aeth, true;
    RcReadResponseOnly = 0x10: Rc ReadResponse Only, Aeth, true;
    RcAcknowledge = 0x11: Rc Acknowledge Only, Aeth, false;
    RcAtomicAcknowledge = 0x12: Rc AtomicAcknowledge Only, AethAtomic, false;
    RcCompareSwap = 0x13: Rc CompareSwap Only, Atomic, false;
    RcFetchAdd = 0x14: Rc FetchAdd Only, Atomic, false;
    RcSendLastInvalidate = 0x16: Rc Send Last, Ieth, true;
    RcSendOnlyInvalidate = 0x17: Rc Send Only, Ieth, true;
    RcFlush = 0x1c: Rc Flush Only, FethReth, false;
    RcAtomicWrite = 0x1d: Rc AtomicWrite Only, Reth, true;
    UcSendFirst = 0x20: Uc Send First, Bare, true;
    UcSendMiddle = 0x21: Uc Send Middle, Bare, true;
    UcSendLast = 0x22: Uc Send Last, Bare, true;
    UcSendLastImm = 0x23: Uc Send Last, Imm, true;
    UcSendOnly = 0x24: Uc Send Only, Bare, true;
    UcSendOnlyImm = 0x25: Uc Send Only, Imm, true;
    UcWriteFirst = 0x26: Uc Write First, Reth, true;
    UcWriteMiddle = 0x27: Uc Write Middle, Bare, true;
    UcWriteLast = 0x28: Uc Write Last, Bare, true;
    UcWriteLastImm = 0x29: Uc Write Last, Imm, true;
    UcWriteOnly = 0x2a: Uc Write Only, Reth, true;
    UcWriteOnlyImm = 0x2b: Uc Write Only, RethImm, true;
    UdSendOnly = 0x64: Ud Send Only, Deth, true;
    UdSendOnlyImm = 0x65: Ud Send Only, DethImm, true;
    XrcSendFirst = 0xa0: Xrc Send First, Bare, true;
    XrcSendMiddle = 0xa1: Xrc Send Middle, Bare, true;
    XrcSendLast = 0xa2: Xrc Send Last, Bare, true;
    XrcSendLastImm = 0xa3: Xrc Send Last, Imm, true;
    XrcSendOnly = 0xa4: Xrc Send Only, Bare, true;
    XrcSendOnlyImm = 0xa5: Xrc Send Only, Imm, true;
    XrcWriteFirst = 0xa6: Xrc Write First, Reth, true;
    XrcWriteMiddle = 0xa7: Xrc Write Middle, Bare, true;
    XrcWriteLast = 0xa8: Xrc Write Last, Bare, true;
    XrcWriteLastImm = 0xa9: Xrc Write Last, Imm, true;
    XrcWriteOnly = 0xaa: Xrc Write Only, Reth, true;
    XrcWriteOnlyImm = 0xab: Xrc Write Only, RethImm, true;
    XrcReadRequest = 0xac: Xrc ReadRequest Only, Reth, false;
    XrcReadResponseFirst = 0xad: Xrc ReadResponse First, Aeth, true;
    XrcReadResponseMiddle = 0xae: Xrc ReadResponse Middle, Bare, true;
    XrcReadResponseLast = 0xaf: Xrc ReadResponse Last, Aeth, true;
    XrcReadResponseOnly = 0xb0: Xrc ReadResponse Only, Aeth, true;
    XrcAcknowledge = 0xb1: Xrc Acknowledge Only, Aeth, false;
    XrcAtomicAcknowledge = 0xb2: Xrc AtomicAcknowledge Only, AethAtomic, false;
    XrcCompareSwap = 0xb3: Xrc CompareSwap Only, Atomic, false;
    XrcFetchAdd = 0xb4: Xrc FetchAdd Only, Atomic, false;
    XrcSendLastInvalidate = 0xb6: Xrc Send Last, Ieth, true;
    XrcSendOnlyInvalidate = 0xb7: Xrc Send Only, Ieth, true;
    XrcFlush = 0xbc: Xrc Flush Only, FethReth, false;
    XrcAtomicWrite = 0xbd: Xrc AtomicWrite Only, Reth, true;
    RcSelectiveAcknowledge = 0xd1: Rc SelectiveAck Only, Selective, false;
}

impl Opcode {
    /// Its number.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Whether it goes from requester to responder.
    pub const fn is_request(self) -> bool {
        !self.is_response()
    }

    /// Whether it goes from responder to requester: READ responses and acknowledgements.
    pub const fn is_response(self) -> bool {
        matches!(
            self.operation(),
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::SelectiveAck
        )
    }

    /// Whether it carries immediate data.
    // public: part of the classification of opcodes.
    pub const fn has_imm(self) -> bool {
        matches!(self.layout(), Layout::Imm | Layout::RethImm | Layout::DethImm)
    }

    /// Whether it carries a key to invalidate.
    // public: part of the classification of opcodes.
    pub const fn has_invalidate(self) -> bool {
        matches!(self.layout(), Layout::Ieth)
    }

    /// Whether the responder needs a posted receive: any packet of a SEND, and the last of a WRITE
    /// with immediate (IBTA vol 1, 9.4.1, 9.4.3).
    // public: part of the classification of opcodes.
    pub const fn needs_receive(self) -> bool {
        matches!(self.operation(), Operation::Send) || self.has_imm()
    }

    /// The RC SEND opcode at `position`; `imm` applies to the last packet only.
    pub(crate) const fn rc_send(position: Position, imm: bool) -> Self {
        match (position, imm) {
            (Position::First, _) => Self::RcSendFirst,
            (Position::Middle, _) => Self::RcSendMiddle,
            (Position::Last, false) => Self::RcSendLast,
            (Position::Last, true) => Self::RcSendLastImm,
            (Position::Only, false) => Self::RcSendOnly,
            (Position::Only, true) => Self::RcSendOnlyImm,
        }
    }

    /// The RC RDMA WRITE opcode at `position`; `imm` applies to the last packet only.
    pub(crate) const fn rc_write(position: Position, imm: bool) -> Self {
        match (position, imm) {
            (Position::First, _) => Self::RcWriteFirst,
            (Position::Middle, _) => Self::RcWriteMiddle,
            (Position::Last, false) => Self::RcWriteLast,
            (Position::Last, true) => Self::RcWriteLastImm,
            (Position::Only, false) => Self::RcWriteOnly,
            (Position::Only, true) => Self::RcWriteOnlyImm,
        }
    }

    /// Of an RC opcode, that of the same packet over another connected service, if there is one: UC
    /// has SENDs and WRITEs without invalidate.
    pub const fn over(self, transport: Transport) -> Option<Self> {
        // They differ in the top bits.
        let service = match transport {
            Transport::Rc => Self::RcSendFirst,
            Transport::Uc => Self::UcSendFirst,
            Transport::Xrc => Self::XrcSendFirst,
            Transport::Ud => return None,
        };
        match Self::from_code(self.code() & 0x1f | service.code()) {
            Some(same) if matches!(self.transport(), Transport::Rc) && self.code() < 0x20 => Some(same),
            _ => None,
        }
    }

    /// Whether an XRCETH follows the BTH.
    pub const fn has_xrc_eth(self) -> bool {
        matches!(self.transport(), Transport::Xrc) && self.is_request()
    }

    /// The UD SEND opcode.
    pub const fn ud_send(imm: bool) -> Self {
        if imm { Self::UdSendOnlyImm } else { Self::UdSendOnly }
    }

    pub(crate) const fn rc_read_response(position: Position) -> Self {
        match position {
            Position::First => Self::RcReadResponseFirst,
            Position::Middle => Self::RcReadResponseMiddle,
            Position::Last => Self::RcReadResponseLast,
            Position::Only => Self::RcReadResponseOnly,
        }
    }
}

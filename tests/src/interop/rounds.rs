//! One request at a time: every operation, every size, from either end.

use anyhow::{Context, Result, ensure};
use doorbell_verbs::{Buffer, Local, QueueKind, Success};

use super::end::{End, MARGIN, MAX_LEN, verify};
use super::pattern::{self, BACKGROUND};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operation {
    Send,
    SendImm,
    SendInline,
    Write,
    WriteImm,
    WriteInline,
    Read,
    CompareSwap,
    FetchAdd,
}

impl Operation {
    const ALL: [Self; 9] = [
        Self::Send,
        Self::SendImm,
        Self::SendInline,
        Self::Write,
        Self::WriteImm,
        Self::WriteInline,
        Self::Read,
        Self::CompareSwap,
        Self::FetchAdd,
    ];

    const fn takes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImm | Self::SendInline | Self::WriteImm)
    }

    const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    fn applies_to(self, len: usize) -> bool {
        match self {
            Self::SendInline | Self::WriteInline => len <= 64,
            Self::CompareSwap | Self::FetchAdd => len == 8,
            _ => len > 0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Round {
    number: u64,
    operation: Operation,
    len: usize,
}

/// Runs all rounds and returns their number; `first` initiates the even ones.
pub(super) fn run(end: &mut End, first: bool) -> Result<u64> {
    let mut number = 0;
    for len in sizes(end.mtu() as usize) {
        for operation in Operation::ALL.into_iter().filter(|operation| operation.applies_to(len)) {
            for active in [first, !first] {
                let round = Round { number, operation, len };
                let result = if active {
                    round.initiate(end)
                } else {
                    round.respond(end)
                };
                result
                    .with_context(|| format!("round {number}, {operation:?} of {len} bytes, active here: {active}"))?;
                number += 1;
            }
        }
    }
    Ok(number)
}

/// 0 B (inline) to 1 MiB, with the sizes around a multiple of the path MTU.
fn sizes(mtu: usize) -> Vec<usize> {
    let mut sizes = vec![
        0, 1, 2, 3, 4, 7, 8, 63, 64, 1000, 4096, 10_000, 65_535, 65_536, 300_001, MAX_LEN,
    ];
    sizes.extend([mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 5]);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

impl Round {
    fn imm(self) -> u32 {
        0xd00b_0000 | self.number as u32 & 0xffff
    }

    /// The word at the responder before an atomic, and the atomic's operand.
    fn word(self) -> (u64, u64) {
        (self.number.wrapping_mul(0x0123_4567_89ab_cdef), !self.number << 7)
    }

    fn initiate(self, end: &mut End) -> Result<()> {
        let mut local = end.take_local()?;
        if self.operation == Operation::Read {
            local[..self.len + MARGIN].fill(BACKGROUND);
        } else {
            pattern::fill(self.number, 0, &mut local[..self.len]);
        }
        end.channel.barrier()?;
        let local = match self.operation {
            Operation::CompareSwap | Operation::FetchAdd => self.post_atomic(end, local)?,
            _ => self.post(end, local)?,
        };
        if self.operation == Operation::Read {
            verify("what was read", self.number, 0, &local[..self.len])?;
            ensure!(
                is_background(&local[self.len..][..MARGIN]),
                "bytes behind the READ's buffer changed"
            );
        }
        end.put_back(local);
        end.channel.barrier()
    }

    fn post(self, end: &mut End, local: Buffer<Local>) -> Result<Buffer<Local>> {
        let target = end
            .peer
            .slice(0, self.len as u64)
            .context("the peer's memory is too short")?;
        let (len, imm) = (self.len, self.imm());
        let mut kept = None;
        let mut inline = [0; 64];
        if matches!(self.operation, Operation::SendInline | Operation::WriteInline) {
            inline[..len].copy_from_slice(&local[..len]);
        }
        end.qp.post(|batch| match self.operation {
            Operation::Send => {
                batch.send(local.part(..len)).signaled();
            }
            Operation::SendImm => {
                batch.send(local.part(..len)).imm(imm).signaled();
            }
            Operation::Write => {
                batch.write(local.part(..len), target).signaled();
            }
            Operation::WriteImm => {
                batch.write(local.part(..len), target).imm(imm).signaled();
            }
            Operation::Read => {
                batch.read(local.part(..len), target).signaled();
            }
            Operation::SendInline => {
                kept = Some(local);
                batch.send_inline(&inline[..len]).signaled();
            }
            Operation::WriteInline | Operation::CompareSwap | Operation::FetchAdd => {
                kept = Some(local);
                batch.write_inline(&inline[..len], target).signaled();
            }
        })?;
        let (success, mut buffers) = end.wait_one(QueueKind::Send)?;
        let expected = match self.operation {
            Operation::Send | Operation::SendImm | Operation::SendInline => Success::Send,
            Operation::Read => Success::Read,
            _ => Success::Write,
        };
        ensure!(success == expected, "completed as {success:?}");
        kept.or_else(|| buffers.take())
            .context("the completion gave no buffer back")
    }

    fn post_atomic(self, end: &mut End, local: Buffer<Local>) -> Result<Buffer<Local>> {
        let (before, operand) = self.word();
        let at = end.peer.word(0).context("the peer's memory is not aligned")?;
        // The rest of the buffer is joined again afterwards.
        let (front, rest) = local.split_at(8);
        let word = front
            .into_word()
            .map_err(|_| anyhow::anyhow!("the local buffer is not aligned"))?;
        end.qp.post(|batch| match self.operation {
            Operation::CompareSwap => {
                batch.compare_swap(word, at, before, operand).signaled();
            }
            _ => {
                batch.fetch_add(word, at, operand).signaled();
            }
        })?;
        let (success, mut buffers) = end.wait_one(QueueKind::Send)?;
        ensure!(
            matches!(success, Success::CompareSwap | Success::FetchAdd),
            "completed as {success:?}"
        );
        let word = buffers.take_word().context("the completion gave no word back")?;
        ensure!(
            word.get() == before,
            "the old value is {:#x} instead of {before:#x}",
            word.get()
        );
        word.into_buffer()
            .join(rest)
            .map_err(|_| anyhow::anyhow!("the pieces are not adjacent"))
    }

    fn respond(self, end: &mut End) -> Result<()> {
        let mut scratch = vec![BACKGROUND; self.len + MARGIN];
        if self.operation.is_atomic() {
            scratch[..8].copy_from_slice(&self.word().0.to_ne_bytes());
        } else if self.operation == Operation::Read {
            pattern::fill(self.number, 0, &mut scratch[..self.len]);
        }
        end.exposed.write_at(0, &scratch);
        if self.operation.takes_receive() {
            let mut local = end.take_local()?;
            local[..self.len + MARGIN].fill(BACKGROUND);
            end.qp.receive(local)?;
        }
        end.channel.barrier()?;
        if self.operation.takes_receive() {
            self.receive(end)?;
        }
        end.channel.barrier()?;
        end.exposed.read_at(0, &mut scratch);
        self.check_exposed(&scratch)
    }

    fn receive(self, end: &mut End) -> Result<()> {
        let (success, mut buffers) = end.wait_one(QueueKind::Receive)?;
        let len = self.len as u32;
        let expected = match self.operation {
            Operation::WriteImm => Success::ReceiveWrite { len, imm: self.imm() },
            Operation::SendImm => Success::Receive {
                len,
                imm: Some(self.imm()),
            },
            _ => Success::Receive { len, imm: None },
        };
        ensure!(success == expected, "received {success:?} instead of {expected:?}");
        let local: Buffer<Local> = buffers.take().context("the receive gave no buffer back")?;
        if self.operation == Operation::WriteImm {
            ensure!(
                is_background(&local[..self.len + MARGIN]),
                "a WRITE changed the buffer of the receive it took"
            );
        } else {
            verify("the message", self.number, 0, &local[..self.len])?;
            ensure!(
                is_background(&local[self.len..][..MARGIN]),
                "bytes behind the message changed"
            );
        }
        end.put_back(local);
        Ok(())
    }

    /// Checks the memory exposed to the peer.
    fn check_exposed(self, found: &[u8]) -> Result<()> {
        let (front, margin) = found.split_at(self.len);
        ensure!(is_background(margin), "bytes behind the target changed");
        match self.operation {
            Operation::Write | Operation::WriteImm | Operation::WriteInline | Operation::Read => {
                verify("the target", self.number, 0, front)
            }
            Operation::Send | Operation::SendImm | Operation::SendInline => {
                ensure!(is_background(front), "a SEND changed memory it was not for");
                Ok(())
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let (before, operand) = self.word();
                let swaps = self.operation == Operation::CompareSwap;
                let expected = if swaps { operand } else { before.wrapping_add(operand) };
                ensure!(
                    front == expected.to_ne_bytes(),
                    "the word is {front:02x?} instead of {expected:#x}"
                );
                Ok(())
            }
        }
    }
}

fn is_background(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == BACKGROUND)
}

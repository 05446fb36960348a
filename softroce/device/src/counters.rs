//! The port's counters in the files that stand for sysfs under `doorbell run`.
//!
//! Each process that has the device open adds what it counted, once a second while there is
//! traffic and when it closes the device: a file is the sum over the processes of the job, as an
//! adapter's counters are over those of a host. A process that is killed takes up to a second with
//! it. Files that cannot be written, as of another user, stay as they are.

use std::fs::{OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use doorbell_roce_proto::{Counters, Instant};

/// How old the files are at most.
const INTERVAL: Duration = Duration::from_secs(1);

type Count = fn(&Counters) -> u64;

/// The files, below the port's folder, and what each counts. `counters` has an adapter's units:
/// data in words of four bytes; `hw_counters` has the names of rxe, and of mlx5 where rxe has none.
pub const COUNTER_FILES: [(&str, Count); 25] = [
    ("counters/port_xmit_packets", |it| it.tx_packets),
    ("counters/port_rcv_packets", |it| it.rx_packets),
    ("counters/port_xmit_data", |it| it.tx_bytes / 4),
    ("counters/port_rcv_data", |it| it.rx_bytes / 4),
    ("counters/port_rcv_errors", |it| it.malformed + it.icrc_errors),
    ("hw_counters/sent_pkts", |it| it.tx_packets),
    ("hw_counters/rcvd_pkts", |it| it.rx_packets),
    ("hw_counters/duplicate_request", |it| it.duplicates),
    ("hw_counters/out_of_seq_request", |it| it.out_of_sequence),
    ("hw_counters/rcvd_rnr_err", |it| it.rnr_naks_received),
    ("hw_counters/send_rnr_err", |it| it.rnr_naks_sent),
    ("hw_counters/rcvd_seq_err", |it| it.sequence_naks_received),
    ("hw_counters/local_ack_timeout_err", |it| it.timeouts),
    ("hw_counters/rx_icrc_encapsulated", |it| it.icrc_errors),
    ("hw_counters/retransmitted_pkts", |it| it.retransmits),
    ("hw_counters/out_of_sequence", |it| it.out_of_sequence),
    ("hw_counters/packet_seq_err", |it| it.sequence_naks_received),
    ("hw_counters/np_ecn_marked_roce_packets", |it| it.marked_packets),
    ("hw_counters/np_cnp_sent", |it| it.cnps_sent),
    ("hw_counters/rp_cnp_handled", |it| it.cnps_handled),
    ("hw_counters/rp_cnp_ignored", |it| it.cnps_ignored),
    ("hw_counters/tail_loss_probes", |it| it.tail_loss_probes),
    ("hw_counters/selective_acks_sent", |it| it.selective_acks_sent),
    ("hw_counters/selective_acks_rcvd", |it| it.selective_acks_received),
    ("hw_counters/direct_requests", |it| it.direct_requests),
];

/// The counters of this process, in the files of one port.
pub(crate) struct CounterFiles {
    port: PathBuf,
    added: [u64; COUNTER_FILES.len()],
    due: Instant,
    /// Nothing was counted since the last time: they are not due again before the device wakes up.
    unchanged: bool,
}

impl CounterFiles {
    /// Those of a device in a folder that stands for `/`; `None` where there are none.
    pub(crate) fn open(view: &Path, device: &str, now: Instant) -> Option<Self> {
        let port = view.join("sys/class/infiniband").join(device).join("ports/1");
        port.join("counters").is_dir().then_some(Self {
            port,
            added: [0; COUNTER_FILES.len()],
            due: now + INTERVAL,
            unchanged: false,
        })
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.due <= now
    }

    /// Until when the device may sleep: for ever, if nothing was counted.
    pub(crate) fn sleep_until(&self) -> Option<Instant> {
        (!self.unchanged).then_some(self.due)
    }

    /// The device may count from now on.
    pub(crate) fn wake(&mut self, now: Instant) {
        if self.unchanged {
            self.unchanged = false;
            self.due = now + INTERVAL;
        }
    }

    /// Adds what was counted since the last time.
    pub(crate) fn write(&mut self, counters: &Counters, now: Instant) {
        self.due = now + INTERVAL;
        self.unchanged = true;
        for ((name, value), added) in COUNTER_FILES.iter().zip(&mut self.added) {
            let value = value(counters);
            if value == *added {
                continue;
            }
            self.unchanged = false;
            match add(&self.port.join(name), value - *added) {
                Ok(()) => *added = value,
                Err(error) => tracing::debug!("counter {name}: {error}"),
            }
        }
    }
}

/// Does not wait for another process, which may be stopped: it is added the next time.
fn add(path: &Path, count: u64) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    file.try_lock().map_err(|error| match error {
        TryLockError::Error(error) => error,
        TryLockError::WouldBlock => io::ErrorKind::WouldBlock.into(),
    })?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let before: u64 = text.trim().parse().map_err(io::Error::other)?;
    // It never becomes shorter, and a reader gets the whole line.
    file.write_all_at(format!("{}\n", before.saturating_add(count)).as_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_add_to_the_same_files() {
        let view = tempfile::tempdir().unwrap();
        let port = view.path().join("sys/class/infiniband/soft0/ports/1");
        for folder in ["counters", "hw_counters"] {
            std::fs::create_dir_all(port.join(folder)).unwrap();
        }
        for (name, _) in COUNTER_FILES {
            std::fs::write(port.join(name), "0\n").unwrap();
        }
        let at = Instant::ZERO;
        let mut two = [0, 1].map(|_| CounterFiles::open(view.path(), "soft0", at).unwrap());
        assert!(CounterFiles::open(view.path(), "soft1", at).is_none());
        let counted = |packets| Counters {
            tx_packets: packets,
            tx_bytes: 100 * packets,
            ..Counters::default()
        };
        let read = |name: &str| std::fs::read_to_string(port.join(name)).unwrap();
        assert!(!two[0].is_due(at) && two[0].is_due(at + INTERVAL));
        two[0].write(&counted(7), at);
        two[1].write(&counted(4), at);
        two[0].write(&counted(9), at);
        assert_eq!(read("counters/port_xmit_packets"), "13\n");
        assert_eq!(read("counters/port_xmit_data"), "325\n");
        assert_eq!(read("hw_counters/rcvd_pkts"), "0\n");
        assert_eq!(two[0].sleep_until(), Some(at + INTERVAL), "more may follow");
        two[0].write(&counted(9), at);
        assert_eq!(two[0].sleep_until(), None, "an idle device is not woken");
        two[0].wake(at + INTERVAL);
        assert_eq!(two[0].sleep_until(), Some(at + 2 * INTERVAL));
        let reader = std::fs::File::open(port.join("hw_counters/sent_pkts")).unwrap();
        reader.try_lock().unwrap();
        two[1].write(&counted(5), at);
        assert_eq!(read("hw_counters/sent_pkts"), "13\n");
        drop(reader);
        two[1].write(&counted(5), at);
        assert_eq!(read("hw_counters/sent_pkts"), "14\n", "it is added later");
    }
}

//! Hostile and unauthenticated connections to a rendezvous: rejected, and the group still forms.

use std::io::{Read, Write, copy};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use doorbell_collectives::Rank;
use doorbell_collectives::bootstrap::{
    BootstrapError, Exchange, Group, Options, Rendezvous, RendezvousServer, Secret, UniqueId,
};

use super::scripted::{ACCEPT, PREAMBLE};
use super::with_all;

fn serving(ranks: u32) -> RendezvousServer {
    Rendezvous::open("127.0.0.1".parse().unwrap(), ranks)
        .unwrap()
        .spawn(super::TIMEOUT)
        .unwrap()
}

fn connect(serving: &RendezvousServer) -> TcpStream {
    let address: SocketAddr = format!("{}:{}", serving.id().host(), serving.id().port())
        .parse()
        .unwrap();
    TcpStream::connect(address).unwrap()
}

fn join(serving: &RendezvousServer, rank: u32, ranks: u32) -> Result<Group, BootstrapError> {
    Group::join(serving.id(), Rank(rank), ranks, &Options::default())
}

fn comes_together(serving: &RendezvousServer, ranks: u32) {
    let groups = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || join(serving, rank, ranks).unwrap()))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    with_all(groups, |mut group| group.control_mut().barrier().unwrap());
}

fn answer(serving: &RendezvousServer, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(serving);
    stream.set_read_timeout(Some(super::TIMEOUT)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    said
}

#[test]
fn garbage_is_rejected_and_the_group_forms() {
    let serving = serving(3);
    let frame = |length: u32, bytes: &[u8]| [&PREAMBLE[..], &length.to_be_bytes(), bytes].concat();
    let cases: [Vec<u8>; 6] = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        // Another version; a length that exceeds memory; an empty hello; one that proves nothing.
        b"doorbel\x02\0\0\0\0".to_vec(),
        frame(u32::MAX, &[]),
        frame(0, &[]),
        frame(72, &[0; 72]),
    ];
    for bytes in &cases {
        let said = answer(&serving, bytes);
        let (_challenge, refusal) = said.split_at(8 + 4 + 1 + 32);
        assert!(refusal[4] == REFUSAL, "{bytes:?}: {said:?}");
    }
    // One that disconnects silently.
    drop(connect(&serving));
    comes_together(&serving, 3);
    serving.wait().unwrap();
}

#[test]
fn silent_and_slow_connections_do_not_block_the_group() {
    let serving = serving(2);
    let mut silent: Vec<_> = (0..300).map(|_| connect(&serving)).collect();
    for stream in &mut silent[200..] {
        stream.write_all(b"door").unwrap();
    }
    comes_together(&serving, 2);
    serving.wait().unwrap();
}

#[test]
fn a_wrong_secret_is_rejected_at_once() {
    let serving = serving(2);
    let real = serving.id();
    let forged = UniqueId::new(real.host(), real.port(), Secret::derived(&["a guess"])).unwrap();
    let said = Group::join(&forged, Rank(0), 2, &Options::default())
        .unwrap_err()
        .to_string();
    assert!(
        said.contains(
            "do not authenticate each other: it refused this connection: it does not prove the group's secret"
        ),
        "{said}"
    );
    comes_together(&serving, 2);
}

#[test]
fn invalid_and_duplicate_ranks_are_rejected_with_a_reason() {
    let serving = serving(2);
    for (rank, ranks, why) in [
        (0, 3, "this group has 2 ranks, and it was started for 3"),
        (2, 2, "rank 2 of 2 cannot be"),
        (0, 0, "rank 0 of 0 cannot be"),
        (0, 5000, "a group has 1 to 4096"),
    ] {
        let said = join(&serving, rank, ranks).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
    let (id, welcomed) = through_a_proxy(&serving);
    let first = thread::spawn(move || Group::join(&id, Rank(1), 2, &Options::default()).unwrap());
    welcomed.recv_timeout(super::TIMEOUT).unwrap();
    let said = join(&serving, 1, 2).unwrap_err().to_string();
    assert!(
        said.contains(&format!("rank 1 has come already: process {} on ", std::process::id())),
        "{said}"
    );
    // The first is unaffected.
    let zero = join(&serving, 0, 2).unwrap();
    with_all(vec![zero, first.join().unwrap()], |mut group| {
        group.control_mut().barrier().unwrap()
    });
}

#[test]
fn a_late_rank_finds_no_rendezvous() {
    let serving = serving(1);
    let id = serving.id().clone();
    comes_together(&serving, 1);
    serving.wait().unwrap();
    let short = Options {
        timeout: Duration::from_millis(200),
        ..Options::default()
    };
    let said = Group::join(&id, Rank(0), 1, &short).unwrap_err().to_string();
    assert!(
        said.contains("rank 0 found no rendezvous of its group at 127.0.0.1:"),
        "{said}"
    );
}

/// The id of a proxy to the rendezvous, and a channel that signals that its reply has passed.
fn through_a_proxy(serving: &RendezvousServer) -> (UniqueId, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let behind = connect(serving);
    let (answered, hears) = channel();
    thread::spawn(move || {
        let (front, _) = listener.accept().unwrap();
        let ends = (front.try_clone().unwrap(), behind.try_clone().unwrap());
        thread::spawn(move || copy(&mut &ends.0, &mut &ends.1));
        (&front).write_all(&first(&read_first(&mut &behind))).unwrap();
        let mut byte = [0];
        (&behind).read_exact(&mut byte).unwrap();
        answered.send(()).unwrap();
        (&front).write_all(&byte).unwrap();
        let _ = copy(&mut &behind, &mut &front);
    });
    (UniqueId::new("127.0.0.1", port, serving.id().secret()).unwrap(), hears)
}

#[test]
fn a_dropped_rendezvous_informs_registered_ranks() {
    let serving = serving(2);
    let (id, welcomed) = through_a_proxy(&serving);
    let waiting = thread::spawn(move || {
        Group::join(&id, Rank(1), 2, &Options::default())
            .unwrap_err()
            .to_string()
    });
    welcomed.recv_timeout(super::TIMEOUT).unwrap();
    drop(serving);
    let said = waiting.join().unwrap();
    assert!(said.contains("rank 0 of 2 did not come"), "{said}");
}

const CHALLENGE: u8 = 0;
const REFUSAL: u8 = 1;

/// The first frame of a connection, behind the preamble.
fn first(frame: &[u8]) -> Vec<u8> {
    [&PREAMBLE[..], &(frame.len() as u32).to_be_bytes(), frame].concat()
}

fn read_first(stream: &mut impl Read) -> Vec<u8> {
    stream.read_exact(&mut [0; 8]).unwrap();
    read_frame(stream)
}

fn read_frame(stream: &mut impl Read) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut frame).unwrap();
    frame
}

const TAG: usize = 32;

/// Holds the port where rank 1 searches for the rendezvous, and admits it as the rendezvous would,
/// with this MAC. Returns what rank 1 sent.
fn impostor(listener: &TcpListener, mac: impl FnOnce(&[u8]) -> Vec<u8>) -> Vec<u8> {
    let (mut victim, _) = listener.accept().unwrap();
    victim.set_read_timeout(Some(super::TIMEOUT)).unwrap();
    victim
        .write_all(&first(&[&[CHALLENGE][..], &[7; 32]].concat()))
        .unwrap();
    let mut sent = read_first(&mut victim);
    let accept = [&[ACCEPT][..], &mac(sent.last_chunk::<TAG>().unwrap())].concat();
    victim.write_all(&(accept.len() as u32).to_be_bytes()).unwrap();
    victim.write_all(&accept).unwrap();
    victim.read_to_end(&mut sent).unwrap_or_default();
    sent
}

#[test]
fn an_impostor_on_the_rendezvous_port_learns_nothing_and_is_named() {
    // No MAC that it can know, and the victim's own reflected.
    type MacOf = fn(&[u8]) -> Vec<u8>;
    let macs: [MacOf; 2] = [|_| vec![0; TAG], <[u8]>::to_vec];
    for mac in macs {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let id = UniqueId::new("127.0.0.1", port, Secret::random().unwrap()).unwrap();
        let impostor = thread::spawn(move || impostor(&listener, mac));
        let joined = Group::join(&id, Rank(1), 2, &Options::default());
        let said = joined.expect_err("an impostor became rank 0").to_string();
        assert!(
            said.contains("it does not prove the group's secret") && said.contains(&format!("127.0.0.1:{port}")),
            "{said}"
        );
        let secret = u128::from_str_radix(&id.to_string()[id.to_string().len() - 32..], 16).unwrap();
        let sent = impostor.join().unwrap();
        let sends = |bytes: [u8; 16]| sent.windows(16).any(|window| window == bytes);
        assert!(
            !sends(secret.to_be_bytes()) && !sends(secret.to_le_bytes()),
            "the secret was sent"
        );
    }
}

/// A registration that was recorded takes no part when it is sent again: its nonce is of another
/// connection.
#[test]
fn a_replayed_registration_is_refused() {
    let serving = serving(2);
    let recorded = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let id = UniqueId::new("127.0.0.1", port, serving.id().secret()).unwrap();
        let victim = thread::spawn(move || {
            let short = Options {
                timeout: Duration::from_secs(2),
                ..Options::default()
            };
            Group::join(&id, Rank(1), 2, &short).err()
        });
        let (mut front, _) = listener.accept().unwrap();
        let mut behind = connect(&serving);
        let challenge = read_first(&mut behind);
        front.write_all(&first(&challenge)).unwrap();
        let hello = first(&read_first(&mut front));
        // To the connection that it was made for, it is a registration.
        behind.write_all(&hello).unwrap();
        assert_eq!(read_frame(&mut behind)[0], ACCEPT);
        drop((front, listener));
        assert!(victim.join().unwrap().is_some());
        hello
    };
    let mut replay = connect(&serving);
    read_first(&mut replay);
    replay.write_all(&recorded).unwrap();
    let said = read_frame(&mut replay);
    assert_eq!(said[0], REFUSAL);
    assert!(
        said.ends_with(b"it does not prove the group's secret"),
        "{}",
        String::from_utf8_lossy(&said)
    );
    comes_together(&serving, 2);
    serving.wait().unwrap();
}

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant as Clock};

use super::*;

fn sources(socket: &UdpSocket) -> Sources<'_> {
    Sources {
        socket: socket.as_fd(),
        taken_over: None,
        multicast: None,
        port: None,
        members: None,
    }
}

fn socket() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").unwrap()
}

/// Without a timeout: a lost wake-up would hang.
fn sleep(wakeup: &Wakeup, socket: &UdpSocket) {
    if let Some(sleep) = wakeup.prepare_sleep() {
        sleep.commit(&sources(socket), None).unwrap();
    }
}

#[test]
fn a_reason_or_a_deadline_ends_a_sleep_once() {
    let (wakeup, socket) = (Wakeup::new().unwrap(), socket());
    wakeup.publish(Reasons::OWN_RECORDS);
    assert!(wakeup.prepare_sleep().is_none(), "published before");
    for publish in [
        |wakeup: &Wakeup| wakeup.publish(Reasons::OWN_RECORDS),
        |wakeup: &Wakeup| {
            wakeup.set_deadline(Deadline::Engine, 5);
            wakeup.wake_before(5);
        },
    ] {
        let sleep = wakeup.prepare_sleep().unwrap();
        assert!(wakeup.is_asleep());
        publish(&wakeup);
        sleep.commit(&sources(&socket), None).unwrap();
        assert!(!wakeup.is_asleep());
    }
    let sleep = wakeup.prepare_sleep().unwrap();
    assert_eq!(sleep.due(), Some(Instant(5)));
    wakeup.wake_before(9);
    let (before, time) = (Clock::now(), Duration::from_millis(20));
    sleep.commit(&sources(&socket), Some(time)).unwrap();
    assert!(before.elapsed() >= time, "a later deadline ends no sleep");
}

#[test]
fn a_blocked_socket_ends_a_sleep_when_it_has_space() {
    let (wakeup, socket) = (Wakeup::new().unwrap(), socket());
    wakeup.set(Reasons::UDP_BLOCKED, true);
    sleep(&wakeup, &socket);
}

#[test]
fn a_datagram_ends_a_sleep() {
    let (wakeup, to) = (Wakeup::new().unwrap(), socket());
    let sleep = wakeup.prepare_sleep().unwrap();
    socket().send_to(&[1], to.local_addr().unwrap()).unwrap();
    sleep.commit(&sources(&to), None).unwrap();
}

#[test]
fn only_the_stop_ends_a_pause() {
    let wakeup = Wakeup::new().unwrap();
    let (before, time) = (Clock::now(), Duration::from_millis(20));
    wakeup.publish(Reasons::DELAYED_ACK);
    wakeup.pause(time);
    assert!(before.elapsed() >= time);
    wakeup.stop();
    wakeup.pause(Duration::from_secs(3600));
}

#[test]
fn no_wake_up_is_lost_between_alternating_threads() {
    const ROUNDS: u32 = 2_000;
    let wakeups = Arc::new([Wakeup::new().unwrap(), Wakeup::new().unwrap()]);
    let turn = Arc::new(AtomicU32::new(0));
    let play = |wakeups: &[Wakeup; 2], turn: &AtomicU32, parity: u32| {
        let socket = socket();
        for round in (parity..ROUNDS).step_by(2) {
            while turn.load(Ordering::Relaxed) != round {
                sleep(&wakeups[parity as usize], &socket);
            }
            turn.store(round + 1, Ordering::Relaxed);
            wakeups[1 - parity as usize].publish(Reasons::OWN_RECORDS);
        }
    };
    let (others, shared) = (Arc::clone(&wakeups), Arc::clone(&turn));
    let thread = thread::spawn(move || play(&others, &shared, 1));
    play(&wakeups, &turn, 0);
    thread.join().unwrap();
    assert_eq!(turn.load(Ordering::Relaxed), ROUNDS);
}

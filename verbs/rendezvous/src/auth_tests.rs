//! Keys, and frames that are not the awaited one.

use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use super::*;

/// What makes the keys of a connection its own.
#[derive(Clone, Debug)]
struct Handshake {
    hello: Hello,
    server_nonce: Nonce,
}

const HANDSHAKE: Handshake = Handshake {
    hello: Hello {
        client: 1,
        server: 9,
        nonce: [1; NONCE],
        payload: Vec::new(),
    },
    server_nonce: [2; NONCE],
};

const PROTOCOL: Protocol = Protocol {
    preamble: b"TEST   1",
    max_hello: 0,
    max_message: 0,
};

fn secret() -> Secret {
    Secret::derived(&["a group"])
}

/// Both ends of a connection.
fn ends(client: &Handshake, server: &Handshake) -> (Session, Session) {
    (
        Session::client(&PROTOCOL, &secret(), &client.hello, &client.server_nonce),
        Session::server(&PROTOCOL, &secret(), &server.hello, &server.server_nonce),
    )
}

#[test]
fn keys_are_those_of_rfc_5869() {
    let mut salt = [0; BLOCK];
    salt[..13].copy_from_slice(&std::array::from_fn::<u8, 13, _>(|i| i as u8));
    let info: Vec<u8> = (0xf0..0xfa).collect();
    let key = hkdf(&salt, &[0x0b; 22], &info)
        .map(|byte| format!("{byte:02x}"))
        .concat();
    assert_eq!(key, "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
}

#[test]
fn both_ends_prove_the_secret_to_each_other() {
    let (mut client, mut server) = ends(&HANDSHAKE, &HANDSHAKE);
    for frame in [&b"register"[..], b"", b"more"] {
        assert_eq!(server.receive.open(frame, &client.send.seal(frame)), Ok(()));
        assert_eq!(client.receive.open(frame, &server.send.seal(frame)), Ok(()));
    }
}

#[test]
fn another_secret_protocol_nonce_or_role_is_another_key() {
    let own = ends(&HANDSHAKE, &HANDSHAKE).0.send.seal(b"x");
    let Handshake { hello, server_nonce } = &HANDSHAKE;
    let mut other = Session::client(&PROTOCOL, &Secret::derived(&["another group"]), hello, server_nonce);
    assert_ne!(other.send.seal(b"x"), own);
    let protocol = Protocol {
        preamble: b"TEST   2",
        ..PROTOCOL
    };
    let mut other = Session::client(&protocol, &secret(), hello, server_nonce);
    assert_ne!(other.send.seal(b"x"), own);
    let changes: [fn(&mut Handshake); 4] = [
        |one| one.hello.client = 2,
        |one| one.hello.server = 2,
        |one| one.hello.nonce[31] ^= 1,
        |one| one.server_nonce[0] ^= 1,
    ];
    for change in changes {
        let mut changed = HANDSHAKE;
        change(&mut changed);
        let (_, mut server) = ends(&HANDSHAKE, &changed);
        assert_eq!(server.receive.open(b"x", &own), Err(Forged), "{changed:?}");
    }
}

#[test]
fn a_reflected_frame_is_forged() {
    let (mut client, mut server) = ends(&HANDSHAKE, &HANDSHAKE);
    let (of_client, of_server) = (client.send.seal(b"x"), server.send.seal(b"x"));
    assert_eq!(client.receive.open(b"x", &of_client), Err(Forged));
    assert_eq!(server.receive.open(b"x", &of_server), Err(Forged));
    // With roles and nonces exchanged as well: a client whose challenge was its own nonce.
    let swapped = Handshake {
        hello: Hello {
            nonce: HANDSHAKE.server_nonce,
            ..HANDSHAKE.hello
        },
        server_nonce: HANDSHAKE.hello.nonce,
    };
    let (_, mut server) = ends(&HANDSHAKE, &swapped);
    assert_eq!(server.receive.open(b"x", &of_server), Err(Forged));
}

#[test]
fn replayed_reordered_changed_and_truncated_frames_are_forged() {
    let awaited = |number: usize| {
        let (mut client, mut server) = ends(&HANDSHAKE, &HANDSHAKE);
        let tags: Vec<_> = (0..3).map(|_| client.send.seal(b"frame")).collect();
        for tag in &tags[..number] {
            server.receive.open(b"frame", tag).unwrap();
        }
        (server, tags)
    };
    for (before, next) in [(1, 0), (0, 1), (2, 1)] {
        let (mut server, tags) = awaited(before);
        assert_eq!(
            server.receive.open(b"frame", &tags[next]),
            Err(Forged),
            "{next} after {before}"
        );
    }
    for frame in [&b"fram"[..], b"frame ", b"Frame"] {
        let (mut server, tags) = awaited(0);
        assert_eq!(server.receive.open(frame, &tags[0]), Err(Forged));
    }
    for bit in 0..TAG * 8 {
        let (mut server, mut tags) = awaited(0);
        tags[0][bit / 8] ^= 1 << (bit % 8);
        assert_eq!(server.receive.open(b"frame", &tags[0]), Err(Forged), "bit {bit}");
    }
    for length in 0..TAG {
        let (mut server, tags) = awaited(0);
        assert_eq!(
            server.receive.open(b"frame", &tags[0][..length]),
            Err(Forged),
            "{length}"
        );
    }
}

/// Compiles only as long as a secret cannot be compared: with `PartialEq` both implementations fit.
const _: () = {
    struct Comparable;
    trait Ambiguous<A> {
        const HERE: () = ();
    }
    impl<T> Ambiguous<()> for T {}
    impl<T: PartialEq> Ambiguous<Comparable> for T {}
    <Secret as Ambiguous<_>>::HERE
};

/// By the source, as some processors compare 32 bytes at once: there a comparison of slices passes
/// [`a_forged_mac_takes_as_long_wherever_it_differs`].
#[test]
fn tags_are_compared_in_constant_time_only() {
    let code = include_str!("auth.rs").split("#[cfg(test)]").next().unwrap();
    assert_eq!(code.matches("verify_slice(tag)").count(), 1);
    for comparison in ["==", "!=", ".eq(", ".ne(", "cmp(", "matches!", "starts_with", "iter()"] {
        assert!(!code.contains(comparison), "auth.rs compares by {comparison}");
    }
}

/// A comparison that ends at the first difference reveals a MAC byte by byte through its time:
/// single steps (ptrace(2)) show it without a clock.
#[test]
fn a_forged_mac_takes_as_long_wherever_it_differs() {
    let counts = [0, TAG / 2, TAG - 1].map(|at| {
        let (mut client, mut server) = ends(&HANDSHAKE, &HANDSHAKE);
        // The first is opened outside the count.
        let [_, mut tag] = [(); 2].map(|()| client.send.seal(b"a frame"));
        tag[at] ^= 1;
        instructions(|| assert_eq!(server.receive.open(b"a frame", &tag), Err(Forged)))
    });
    assert!(counts[0] > TAG, "{counts:?}");
    assert_eq!([counts[0]; 3], counts);
}

/// The number of instructions of `work`, and of the signal before it, in a child process.
fn instructions(mut work: impl FnMut()) -> usize {
    // Detection of the processor's features happens once.
    work();
    // SAFETY: the child computes, without the heap, and exits.
    let child = match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            ptrace::traceme().unwrap();
            raise(Signal::SIGSTOP).unwrap();
            work();
            // SAFETY: it ends the process without its handlers, which are the parent's.
            unsafe { nix::libc::_exit(0) }
        }
    };
    let mut count = 0;
    loop {
        match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, 0) => return count,
            WaitStatus::Stopped(..) => ptrace::step(child, None).unwrap(),
            status => panic!("{status:?}"),
        }
        count += 1;
    }
}

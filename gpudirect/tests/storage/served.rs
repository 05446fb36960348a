//! Files served by queue pairs of the userspace device.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;
use std::time::Duration;

use doorbell_gpudirect::storage::{FileClient, FileServer, ServeError};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::exchange::{Exchange, Listener};
use doorbell_verbs::{Library, Local, PeerWrite, ProtectionDomain};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::{folder, pattern};

const TIMEOUT: Duration = Duration::from_secs(30);
const LEN: usize = (9 << 20) + 777;

fn pd() -> ProtectionDomain {
    let device = Library::new(api()).open("soft0").expect("the userspace device");
    device.protection_domain().expect("a protection domain")
}

/// Runs `client` against a server of `folder`; the server's outcome.
fn with_server(folder: &Path, client: impl FnOnce(&ProtectionDomain, Exchange)) -> Result<u64, ServeError> {
    let listener = Listener::bind("127.0.0.1:0").expect("bound");
    let address = listener.local_addr();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            let server = FileServer::new(folder)?;
            server.serve(&pd(), listener.accept(TIMEOUT)?)
        });
        client(&pd(), Exchange::connect(address, TIMEOUT).expect("connected"));
        server.join().expect("the server ends")
    })
}

#[test]
fn any_range_of_a_file_arrives_and_nothing_beyond() {
    let folder = folder();
    let bytes = pattern(LEN);
    fs::write(folder.path().join("data"), &bytes).expect("a file");
    let sent = with_server(folder.path(), |pd, exchange| {
        let mut client = FileClient::new(pd, exchange).expect("a client");
        assert_eq!(client.len("data").expect("served"), LEN as u64);
        let mut inbox = pd.register(vec![0xa5; LEN + 9000], PeerWrite).expect("registered");
        let ranges = (0..LEN + 9000, 0..LEN, 0..5000usize);
        let mut runner = TestRunner::new(ProptestConfig {
            cases: 24,
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let mut whole = vec![0; inbox.len()];
        let check = std::cell::RefCell::new(|offset: usize, len: usize, at: usize| {
            inbox.fill(0xa5);
            let into = inbox.remote().slice(at as u64, len as u64).expect("within");
            let count = client.read_at("data", offset as u64, into).expect("served") as usize;
            let expected = &bytes[offset.min(LEN)..(offset + len).min(LEN)];
            assert_eq!(count, expected.len());
            inbox.read_at(0, &mut whole);
            assert!(whole[at..at + count] == *expected, "{len} bytes at {offset}");
            let mut around = whole[..at].iter().chain(&whole[at + count..]);
            assert!(around.all(|byte| *byte == 0xa5));
        });
        check.borrow_mut()(0, LEN, 0);
        runner
            .run(&ranges, |(offset, len, at)| {
                check.borrow_mut()(offset, len, at);
                Ok(())
            })
            .expect("every range");
        client.finish().expect("finished");
    });
    assert!(sent.expect("served") >= LEN as u64);
}

#[test]
fn names_that_leave_the_folder_are_refused_and_the_next_is_served() {
    let outside = folder();
    fs::write(outside.path().join("secret"), b"secret").expect("a file");
    let folder = folder();
    fs::create_dir(folder.path().join("inner")).expect("a folder");
    fs::write(folder.path().join("inner/data"), b"12345").expect("a file");
    symlink(outside.path().join("secret"), folder.path().join("link")).expect("a link");
    symlink("inner/data", folder.path().join("inside")).expect("a link");
    nix::unistd::mkfifo(&folder.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let outcome = with_server(folder.path(), |pd, exchange| {
        let mut client = FileClient::new(pd, exchange).expect("a client");
        let secret = outside.path().join("secret");
        let up = format!("../{}/secret", outside.path().file_name().expect("a name").display());
        for (name, errno) in [
            (secret.to_str().expect("text"), libc::EXDEV),
            (&up, libc::EXDEV),
            ("link", libc::EXDEV),
            ("inner/../../x", libc::EXDEV),
            ("missing", libc::ENOENT),
            ("inner", 0),
            ("pipe", 0),
        ] {
            match client.len(name) {
                Err(ServeError::Refused { errno: found, text }) => {
                    assert_eq!(found, errno, "{name}: {text}");
                    assert!(text.starts_with(name), "{text}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        assert_eq!(client.len("inner/data").expect("served"), 5);
        assert_eq!(client.len("inside").expect("served"), 5);
        client.finish().expect("finished");
    });
    assert_eq!(outcome.expect("served"), 0);
}

#[test]
fn a_client_that_sends_nonsense_ends_its_session_alone() {
    let folder = folder();
    fs::write(folder.path().join("data"), pattern(100)).expect("a file");
    let outcome = with_server(folder.path(), |pd, exchange| {
        let receives = pd.register_chunks(vec![0; 512], 256, Local).expect("registered");
        let mut peer = exchange
            .connection(pd, |qp| qp.max_inline_data(64), receives, b"")
            .expect("connected");
        peer.send_inline(b"GET / HTTP/1.1").expect("sent");
        let ended = peer.next_completion();
        assert!(
            !matches!(ended, Ok(Some((doorbell_verbs::Success::Receive { .. }, _)))),
            "{ended:?}"
        );
    });
    let error = outcome.expect_err("no message of the protocol").to_string();
    assert_eq!(error, "the peer has sent no message of this protocol");
}

/// A key that the client does not own: its device refuses the WRITE, and the session ends.
#[test]
fn a_forged_key_writes_nothing() {
    let folder = folder();
    fs::write(folder.path().join("data"), pattern(100_000)).expect("a file");
    let outcome = with_server(folder.path(), |pd, exchange| {
        let inbox = pd.register(vec![0; 4096], PeerWrite).expect("registered");
        let mut client = FileClient::new(pd, exchange)
            .expect("a client")
            .timeout(Duration::from_secs(20));
        let beyond = doorbell_verbs::Remote::<doorbell_verbs::WriteAccess>::from_raw(
            inbox.remote().addr(),
            inbox.remote().rkey().0,
            100_000,
        );
        client.read_at("data", 0, beyond).expect_err("beyond the memory");
        let mut bytes = vec![1; 4096];
        inbox.read_at(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "a part of it was written");
    });
    outcome.expect_err("the key was refused");
}

/// What a client learns of a file that is truncated, written or replaced after it had requested the
/// length.
#[test]
fn a_file_that_changes_while_it_is_served_is_an_error_until_its_length_is_requested_again() {
    let folder = folder();
    let path = folder.path().join("data");
    let outcome = with_server(folder.path(), |pd, exchange| {
        let mut client = FileClient::new(pd, exchange).expect("a client");
        let inbox = pd.register(vec![0; 100_000], PeerWrite).expect("registered");
        let changes: [(&str, &dyn Fn()); 3] = [
            ("it had 100000 bytes, and has 50000", &|| {
                let file = fs::OpenOptions::new().write(true).open(&path);
                file.and_then(|file| file.set_len(50_000)).expect("truncated");
            }),
            ("it was written to, or replaced", &|| {
                // Not within the tick of the clock that stamps have.
                thread::sleep(Duration::from_millis(20));
                fs::write(&path, pattern(100_000)).expect("written");
            }),
            ("it was written to, or replaced", &|| {
                let other = folder.path().join("other");
                fs::write(&other, pattern(100_000)).expect("a file");
                fs::rename(&other, &path).expect("replaced");
            }),
        ];
        for (what, change) in changes {
            fs::write(&path, pattern(100_000)).expect("a file");
            assert_eq!(client.len("data").expect("served"), 100_000);
            assert_eq!(client.read_at("data", 0, inbox.remote()).expect("read"), 100_000);
            change();
            let error = client
                .read_at("data", 0, inbox.remote())
                .expect_err("changed")
                .to_string();
            let expected =
                format!("data: 100000 bytes at offset 0: the server: data: has changed while it was read: {what}");
            assert_eq!(error, expected);
            client.len("data").expect("served");
            client.read_at("data", 0, inbox.remote()).expect("as it is now");
        }
        client.finish().expect("finished");
    });
    outcome.expect("served");
}

#[test]
fn of_one_file_nothing_else_in_its_folder_is_served() {
    let folder = folder();
    fs::create_dir(folder.path().join("real")).expect("a folder");
    fs::write(folder.path().join("real/data"), b"12345").expect("a file");
    fs::write(folder.path().join("real/secret"), b"secret").expect("a file");
    symlink("real/data", folder.path().join("link")).expect("a link");
    let server = FileServer::one_file(folder.path().join("link")).expect("a file");
    assert_eq!(
        server.open("link".as_ref()).expect("opened").len().expect("a length"),
        5
    );
    for name in ["secret", "data", "./link", "real/data", "../link"] {
        let error = server.open(name.as_ref()).expect_err("not served").to_string();
        assert_eq!(error, format!("{name}: cannot open: link alone is served"));
    }
    let error = FileServer::one_file(folder.path().join("real")).expect_err("a folder");
    assert!(error.to_string().contains("neither a regular file"), "{error}");
}

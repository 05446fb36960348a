//! Memory beyond plain regions: device memory, options, other rights, the registration cache.

use std::sync::Arc;

use doorbell_verbs::{
    CompletionStatus, Local, MemoryError, Opaque, PeerAll, PeerRead, PeerWrite, QueueKind, RegistrationCache,
    ReregisterError, Success,
};

use crate::{Side, connect, is_soft};

#[test]
fn a_peer_writes_and_counts_in_the_devices_own_memory() {
    let (mut a, b) = (Side::new(0), Side::new(1));
    let memory = match b.context.device_memory(4096, 64) {
        Ok(memory) => memory,
        Err(error) => {
            assert!(!is_soft() && error.to_string().contains("use the host's"), "{error}");
            assert_eq!(b.context.attr().device_memory_bytes, 0);
            return;
        }
    };
    let all = |builder: doorbell_verbs::QueuePairBuilder<'_>| {
        builder
            .allow_remote_read()
            .allow_remote_write()
            .allow_remote_atomic()
            .rc()
    };
    let (mut to_b, _to_a) = connect(&a, &b, all);
    let inbox = b.pd.register_device_memory(&memory, 1024, 2048, PeerAll).unwrap();
    let mut message = a.buffer(2000);
    message.fill(0x5a);
    to_b.write(message, inbox.remote()).unwrap();
    let mut word = a.buffer(8).into_word().unwrap();
    word.set(0);
    to_b.post(|batch| {
        batch.fetch_add(word, inbox.remote().word(2000).unwrap(), 7).signaled();
    })
    .unwrap();
    a.next(QueueKind::Send, |completion| completion.result().unwrap());
    a.next(QueueKind::Send, |completion| {
        assert_eq!(completion.result(), Ok(Success::FetchAdd));
        assert_eq!(completion.take_word().unwrap().get(), 0);
    });
    let mut found = vec![0; 2008];
    memory.read(1024, &mut found).unwrap();
    assert!(found[..2000].iter().all(|&byte| byte == 0x5a));
    assert_eq!(found[2000..], 7_u64.to_ne_bytes());
    memory.read(0, &mut found[..1024]).unwrap();
    assert!(
        found[..1024].iter().all(|&byte| byte == 0),
        "what lies before is untouched"
    );

    // And back, by the local key.
    let from = b.pd.register_device_memory(&memory, 1024, 16, Local).unwrap();
    assert_eq!(from.len(), 16);
    let (mut to_a, mut to_b) = {
        let (to_a, to_b) = connect(&b, &a, |builder| builder.rc());
        (to_a, to_b)
    };
    to_b.receive(a.buffer(16)).unwrap();
    to_a.send(from).unwrap();
    a.next(QueueKind::Receive, |completion| {
        completion.result().unwrap();
        assert_eq!(*completion.take::<Local>().unwrap(), [0x5a; 16]);
    });
    drop(memory);
    let _kept: doorbell_verbs::Buffer<Opaque<PeerAll>> = inbox;
}

#[test]
fn a_key_grants_what_the_region_grants_now() {
    let (mut a, b) = (Side::new(0), Side::new(1));
    let writer = |a: &Side, b: &Side| connect(a, b, |builder| builder.allow_remote_read().allow_remote_write().rc());
    let inbox = b.pd.register(vec![0_u8; 64], PeerRead).unwrap();
    let before = inbox.remote();
    let inbox = match inbox.with_rights(PeerWrite) {
        Ok(inbox) => inbox,
        Err(ReregisterError::Refused(inbox, error)) => {
            assert!(!is_soft(), "{error}");
            assert!(error.to_string().contains("register it anew"), "{error}");
            assert_eq!(inbox.remote(), before);
            return;
        }
        Err(other) => panic!("{other}"),
    };
    let (mut to_b, _to_a) = writer(&a, &b);
    to_b.post(|batch| {
        batch.write_inline(b"doorbell", inbox.remote()).signaled();
    })
    .unwrap();
    a.next(QueueKind::Send, |completion| completion.result().unwrap());
    let mut found = [0; 8];
    inbox.read_at(0, &mut found);
    assert_eq!(&found, b"doorbell");
    to_b.read(a.buffer(8), before).unwrap();
    assert_eq!(a.failed(), CompletionStatus::RemoteAccess);

    let now = inbox.with_rights(Local).unwrap();
    assert_eq!(now[..8], *b"doorbell");
}

#[test]
fn a_cache_registers_once_and_its_buffers_are_sent() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let (mut to_b, mut to_a) = connect(&a, &b, |builder| builder.rc());
    let cache = RegistrationCache::new(&a.pd, Default::default());
    let weights: Arc<Vec<u8>> = Arc::new((0..64 << 10).map(|i| (i / 7) as u8).collect());
    for round in 0..8 {
        let range = round * 8192..(round + 1) * 8192;
        to_a.receive(b.buffer(8192)).unwrap();
        to_b.post(|batch| {
            batch.send(cache.shared(&weights, range.clone()).unwrap()).signaled();
        })
        .unwrap();
        b.next(QueueKind::Receive, |completion| {
            completion.result().unwrap();
            assert_eq!(*completion.take::<Local>().unwrap(), weights[range.clone()]);
        });
        a.next(QueueKind::Send, |completion| completion.result().unwrap());
    }
    let stats = cache.stats();
    assert_eq!((stats.misses, stats.hits, stats.regions), (1, 7, 1));
    assert_eq!(cache.clear(), 0);
}

#[test]
fn a_missing_feature_is_reported_by_name() {
    let side = Side::new(0);
    assert!(!side.pd.supports_dmabuf());
    let fd = std::fs::File::open("/dev/null").unwrap().into();
    let error = side.pd.register_dmabuf(fd, 0, 4096, 0, Local).unwrap_err();
    assert!(matches!(error, MemoryError::NoDmaBuf { .. }), "{error}");
    if !side.context.attr().on_demand_paging {
        let error = side
            .pd
            .registration()
            .on_demand()
            .register(vec![0; 64], Local)
            .unwrap_err();
        assert!(matches!(error, MemoryError::NoOnDemandPaging { .. }), "{error}");
    }
    // A hint, which any device accepts.
    side.pd
        .registration()
        .relaxed_ordering()
        .register(vec![0; 64], PeerWrite)
        .unwrap();
}

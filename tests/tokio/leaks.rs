//! Futures dropped at every point at which they wait, in a process of its own: its descriptors and
//! the objects of its devices are counted before and after.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use std::{env, fs};

use doorbell::cm::ConnectionManager;
use doorbell::softroce::{CM_API, api};
use doorbell::{Context, Library};
use doorbell_softroce_ibverbs::{DeviceConfig, add};
use doorbell_test::Devices;
use doorbell_verbs_sys::{self as sys, Api, Promise};

use crate::{LIMIT, Result, connecting, queue_pair, run_within, stream};

#[test]
fn nothing_is_left_of_dropped_futures() -> Result {
    // Its `soft0` has an address that no other process takes over, or leaves to it.
    let mut devices = Devices::new().build()?;
    let child = Command::new(env::current_exe()?)
        .envs(devices.child()?)
        .args(["--exact", "leaks::in_a_process_of_its_own", "--ignored", "--nocapture"])
        .status()?;
    assert!(child.success());
    Ok(())
}

#[test]
#[ignore = "run by nothing_is_left_of_dropped_futures"]
fn in_a_process_of_its_own() -> Result {
    let manager = ConnectionManager::new(&CM_API, &COUNTED);
    run_within(5 * LIMIT, async {
        let (a, b) = (device(5)?, device(6)?);
        // What devices and processes keep once they have met.
        connecting::streams(&a, &b, 2).await?;
        connecting::managed(manager, 1).await?;
        until("meeting", |now| now.objects == [0; KINDS]).await?;

        let before = Counts::now()?;
        let is_back = |now: &Counts| now.descriptors.len() <= before.descriptors.len() && now.objects == before.objects;
        queue_pair::operations_dropped_at_every_point(&a, &b).await?;
        until("operations", is_back).await?;
        stream::futures_dropped_at_every_point(&a, &b).await?;
        until("reading and writing", is_back).await?;
        connecting::streams(&a, &b, 200).await?;
        until("connecting streams", is_back).await?;
        connecting::queue_pairs(&a, &b, 200).await?;
        until("connecting queue pairs", is_back).await?;
        connecting::managed(manager, 200).await?;
        until("connecting by the connection manager", is_back).await
    })
}

/// Its packets are late, so that what waits for them sleeps, and some are lost.
fn device(seed: u32) -> Result<Context> {
    let mut config = DeviceConfig::new("leaks");
    config.exclusive = true;
    config.faults = format!("drop=0.02,delay=3ms,seed={seed}").parse()?;
    let device = add(config)?;
    Ok(Library::new(&COUNTED).open(device.name())?)
}

/// Streams linger, and threads that connect go on, when their futures are gone.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSES: u32 = 3000;

#[derive(Debug)]
struct Counts {
    descriptors: Vec<PathBuf>,
    objects: [i64; KINDS],
}

impl Counts {
    fn now() -> Result<Self> {
        let links = fs::read_dir("/proc/self/fd")?;
        // The one of this listing is closed already.
        let descriptors = links.filter_map(|link| fs::read_link(link.ok()?.path()).ok());
        Ok(Self {
            descriptors: descriptors.collect(),
            objects: std::array::from_fn(|kind| LIVE[kind].load(Ordering::Relaxed)),
        })
    }
}

async fn until(after: &str, is_so: impl Fn(&Counts) -> bool) -> Result {
    for _ in 0..PAUSES {
        if is_so(&Counts::now()?) {
            println!("{after}: nothing is left");
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
    Err(format!("{after}: left are {:?}", Counts::now()?).into())
}

/// The userspace device's table, with the live objects of each kind counted.
macro_rules! counted {
    ($($kind:literal: $make:ident($($arg:ident: $type:ty),*) -> $object:ident, $destroy:ident;)*) => {
        const KINDS: usize = [$($kind),*].len();
        static LIVE: [AtomicI64; KINDS] = [const { AtomicI64::new(0) }; KINDS];

        $(
            unsafe extern "C" fn $make($($arg: $type),*) -> *mut sys::$object {
                // SAFETY: the caller's promise.
                let made = unsafe { (api().$make)($($arg),*) };
                LIVE[$kind].fetch_add((!made.is_null()).into(), Ordering::Relaxed);
                made
            }

            unsafe extern "C" fn $destroy(object: *mut sys::$object) -> i32 {
                // SAFETY: the caller's promise.
                let status = unsafe { (api().$destroy)(object) };
                LIVE[$kind].fetch_sub((status == 0).into(), Ordering::Relaxed);
                status
            }
        )*

        static COUNTED: LazyLock<Api> = LazyLock::new(|| Api {
            // SAFETY: they do what those of the userspace device do.
            promise: unsafe { Promise::given() },
            $($make, $destroy,)*
            // So that all memory is registered by `reg_mr`.
            reg_mr_iova2: None,
            reg_dmabuf_mr: None,
            ..*api()
        });
    };
}

counted! {
    0: alloc_pd(context: *mut sys::ibv_context) -> ibv_pd, dealloc_pd;
    1: reg_mr(pd: *mut sys::ibv_pd, at: *mut libc::c_void, len: usize, access: i32) -> ibv_mr, dereg_mr;
    2: create_comp_channel(context: *mut sys::ibv_context) -> ibv_comp_channel, destroy_comp_channel;
    3: create_cq(context: *mut sys::ibv_context, entries: i32, user: *mut libc::c_void, channel: *mut sys::ibv_comp_channel, vector: i32) -> ibv_cq, destroy_cq;
    4: create_qp(pd: *mut sys::ibv_pd, attr: *mut sys::ibv_qp_init_attr) -> ibv_qp, destroy_qp;
}

//! Devices by one string.

use core::ffi::c_char;

use doorbell::ProtectionDomain;

use crate::argument::{end, optional_text, store};
use crate::status::doorbell_status::DOORBELL_NO_DEVICE;
use crate::status::{Failure, doorbell_status, run};

/// An open device. Ended by doorbell_close().
pub struct doorbell_device {
    pub(crate) pd: ProtectionDomain,
}

/// Opens a device by its name:
///
/// - "soft0": the userspace RoCEv2 device, with the address of DOORBELL_SOFT_ADDR or 127.0.0.1;
/// - "soft", or with options as in "soft?drop=0.01&seed=7": a userspace device of its own;
/// - "mlx5_0" and all others: a device of the system's libibverbs;
/// - NULL: what the variable DOORBELL_DEVICE names, or else "soft0".
///
/// DOORBELL_NO_DEVICE if there is none or it cannot be opened, DOORBELL_INVALID_ARGUMENT if it does
/// not have such an option.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_open(name: *const c_char, device: *mut *mut doorbell_device) -> doorbell_status {
    let open = || {
        // SAFETY: a string or null, by contract.
        let context = match unsafe { optional_text(name, "name") }? {
            Some(name) => doorbell::open(name),
            None => doorbell::open_from_env(),
        };
        let pd = context?.protection_domain();
        let pd = pd.map_err(|error| Failure::new(DOORBELL_NO_DEVICE, error))?;
        Ok(doorbell_device { pd })
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(device, "device", open) })
}

/// Ends the handle of a device, which is closed when the last object that uses it is ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_close(device: *mut doorbell_device) -> doorbell_status {
    run(|| {
        // SAFETY: a handle that ends here, by contract.
        drop(unsafe { end(device) });
        Ok(())
    })
}

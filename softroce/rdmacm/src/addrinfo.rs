//! rdma_getaddrinfo(3) by getaddrinfo(3): IPv4 and IPv6, one result, no route or connection data.

use core::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::ptr;

use doorbell_verbs_sys::rdmacm::{
    RAI_FAMILY, RAI_NOROUTE, RAI_NUMERICHOST, RAI_PASSIVE, RDMA_PS_IB, RDMA_PS_TCP, RDMA_PS_UDP, rdma_addrinfo,
};
use doorbell_verbs_sys::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
use libc::{addrinfo, sockaddr, socklen_t};

/// rdma_getaddrinfo(3): 0, or an error of gai_strerror(3).
///
/// # Safety
/// `node` and `service` are null or strings; `hints` is null or live; `result` is writable.
pub unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    result: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: the same contract.
    match unsafe { resolve_info(node, service, hints.as_ref()) } {
        Ok(found) => {
            // SAFETY: writable by contract.
            unsafe { result.write(Box::into_raw(found)) };
            0
        }
        Err(code) => code,
    }
}

unsafe fn resolve_info(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<Box<rdma_addrinfo>, c_int> {
    if node.is_null() && service.is_null() && hints.is_none() {
        return Err(libc::EAI_NONAME);
    }
    let mut info = from_hints(hints)?;
    let flags = info.ai_flags as u32;
    let passive = flags & RAI_PASSIVE != 0;
    if !node.is_null() || !service.is_null() {
        // SAFETY: by contract.
        let (address, len) = unsafe { resolve(node, service, flags, info.ai_family) }?;
        // SAFETY: it came from malloc(3).
        info.ai_family = c_int::from(unsafe { (*address).sa_family });
        if passive {
            (info.ai_src_addr, info.ai_src_len) = (address, len);
        } else {
            (info.ai_dst_addr, info.ai_dst_len) = (address, len);
        }
    }
    // The hints' address of an end that was not resolved.
    if let Some(hints) = hints {
        // SAFETY: the hints' addresses are as long as they say (man page).
        unsafe {
            if info.ai_src_addr.is_null() {
                (info.ai_src_addr, info.ai_src_len) = copied(hints.ai_src_addr, hints.ai_src_len)?;
            }
            if info.ai_dst_addr.is_null() && !passive {
                (info.ai_dst_addr, info.ai_dst_len) = copied(hints.ai_dst_addr, hints.ai_dst_len)?;
            }
        }
    }
    Ok(Box::new(core::mem::replace(&mut *info, empty())))
}

/// A result that frees its addresses on error.
struct PartialInfo(rdma_addrinfo);

impl core::ops::Deref for PartialInfo {
    type Target = rdma_addrinfo;
    fn deref(&self) -> &rdma_addrinfo {
        &self.0
    }
}

impl core::ops::DerefMut for PartialInfo {
    fn deref_mut(&mut self) -> &mut rdma_addrinfo {
        &mut self.0
    }
}

impl Drop for PartialInfo {
    fn drop(&mut self) {
        // SAFETY: from malloc(3), or null.
        unsafe {
            libc::free(self.0.ai_src_addr.cast());
            libc::free(self.0.ai_dst_addr.cast());
        }
    }
}

/// The kind of communication by the hints; reliable connections by default.
fn from_hints(hints: Option<&rdma_addrinfo>) -> Result<PartialInfo, c_int> {
    let mut info = empty();
    info.ai_qp_type = IBV_QPT_RC as c_int;
    info.ai_port_space = RDMA_PS_TCP as c_int;
    let Some(hints) = hints else {
        return Ok(PartialInfo(info));
    };
    if hints.ai_flags as u32 & !(RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY) != 0 {
        return Err(libc::EAI_BADFLAGS);
    }
    if !matches!(hints.ai_family, 0 | libc::AF_INET | libc::AF_INET6) {
        return Err(libc::EAI_FAMILY);
    }
    info.ai_flags = hints.ai_flags;
    info.ai_family = hints.ai_family;
    (info.ai_qp_type, info.ai_port_space) = match (hints.ai_qp_type as u32, hints.ai_port_space as u32) {
        (0, 0) => (info.ai_qp_type, info.ai_port_space),
        (0, RDMA_PS_UDP) | (IBV_QPT_UD, 0) => (IBV_QPT_UD as c_int, RDMA_PS_UDP as c_int),
        (0, RDMA_PS_TCP | RDMA_PS_IB) => (IBV_QPT_RC as c_int, hints.ai_port_space),
        (IBV_QPT_RC, 0) => (hints.ai_qp_type, RDMA_PS_TCP as c_int),
        (IBV_QPT_UC, 0) => (hints.ai_qp_type, RDMA_PS_IB as c_int),
        (IBV_QPT_RC, RDMA_PS_TCP | RDMA_PS_IB) | (IBV_QPT_UC, RDMA_PS_IB) | (IBV_QPT_UD, RDMA_PS_UDP) => {
            (hints.ai_qp_type, hints.ai_port_space)
        }
        _ => return Err(libc::EAI_SOCKTYPE),
    };
    Ok(PartialInfo(info))
}

fn empty() -> rdma_addrinfo {
    // SAFETY: integers and pointers only.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The first address of getaddrinfo(3), in memory of malloc(3).
unsafe fn resolve(
    node: *const c_char,
    service: *const c_char,
    flags: u32,
    family: c_int,
) -> Result<(*mut sockaddr, socklen_t), c_int> {
    // SAFETY: integers and pointers only.
    let mut hints: addrinfo = unsafe { MaybeUninit::zeroed().assume_init() };
    hints.ai_socktype = libc::SOCK_STREAM;
    hints.ai_family = family;
    if flags & RAI_NUMERICHOST != 0 {
        hints.ai_flags |= libc::AI_NUMERICHOST;
    }
    if flags & RAI_PASSIVE != 0 {
        hints.ai_flags |= libc::AI_PASSIVE;
    }
    let mut found: *mut addrinfo = ptr::null_mut();
    // SAFETY: strings by contract, or null.
    let code = unsafe { libc::getaddrinfo(node, service, &hints, &mut found) };
    if code != 0 {
        return Err(code);
    }
    // SAFETY: there is at least one result, with an address of the given length; freed here, once.
    unsafe {
        let address = copied((*found).ai_addr, (*found).ai_addrlen);
        libc::freeaddrinfo(found);
        address
    }
}

/// A copy in memory of malloc(3); null for null.
unsafe fn copied(address: *const sockaddr, len: socklen_t) -> Result<(*mut sockaddr, socklen_t), c_int> {
    if address.is_null() || len == 0 {
        return Ok((ptr::null_mut(), 0));
    }
    // SAFETY: malloc(3) has no preconditions; `len` bytes are there by contract.
    unsafe {
        let copy = libc::malloc(len as usize);
        if copy.is_null() {
            return Err(libc::EAI_MEMORY);
        }
        copy.cast::<u8>().copy_from_nonoverlapping(address.cast(), len as usize);
        Ok((copy.cast(), len))
    }
}

/// rdma_getaddrinfo(3).
///
/// # Safety
/// `info` came from [`rdma_getaddrinfo`], or is null, and is not used again.
pub unsafe extern "C" fn rdma_freeaddrinfo(info: *mut rdma_addrinfo) {
    if !info.is_null() {
        // SAFETY: from a Box by contract.
        drop(PartialInfo(*unsafe { Box::from_raw(info) }));
    }
}

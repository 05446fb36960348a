//! NCCL's types, as far as the functions need them.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;

use doorbell_collectives::DataType;

use crate::failure::Failure;

/// `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    Success = 0,
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    InProgress = 7,
}

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [c_char; 128]);

/// `ncclTeam_t` of the device API, of which this library returns only empty ones.
#[repr(C)]
pub(crate) struct Team {
    ranks: c_int,
    rank: c_int,
    stride: c_int,
}

impl Team {
    pub(crate) const EMPTY: Self = Self {
        ranks: 0,
        rank: 0,
        stride: 0,
    };
}

/// `ncclComm_t`, `cudaStream_t`, and pointers to GPU memory.
pub(crate) type Opaque = *mut c_void;

/// The start of `ncclConfig_t`, which grows at its end: how much of it there is says `size`.
#[repr(C)]
struct ConfigStart {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cluster_size: c_int,
    min_blocks: c_int,
    max_blocks: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
/// Of a number that is not set.
const UNSET: c_int = c_int::MIN;

/// What a communicator takes of `ncclConfig_t`; the other fields are hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) blocking: bool,
    pub(crate) max_blocks: Option<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            blocking: true,
            max_blocks: None,
        }
    }
}

impl Config {
    /// # Safety
    /// `config` is null, or there are as many bytes as its first field says, of at least its first
    /// three fields.
    pub(crate) unsafe fn read(config: *const c_void) -> Result<Self, Failure> {
        if config.is_null() {
            return Ok(Self::default());
        }
        let at = |offset: usize| config.wrapping_byte_add(offset);
        // SAFETY: the caller's promise for the first fields.
        let (size, magic) = unsafe {
            (
                at(offset_of!(ConfigStart, size)).cast::<usize>().read_unaligned(),
                at(offset_of!(ConfigStart, magic)).cast::<c_uint>().read_unaligned(),
            )
        };
        if magic != MAGIC {
            return Err(Failure::invalid_argument(
                "the configuration was not initialised with NCCL_CONFIG_INITIALIZER",
            ));
        }
        let number = |offset: usize| {
            if offset + size_of::<c_int>() > size {
                return None;
            }
            // SAFETY: the caller's promise, as the field is within the size.
            let value = unsafe { at(offset).cast::<c_int>().read_unaligned() };
            (value != UNSET).then_some(value)
        };
        let blocking = match number(offset_of!(ConfigStart, blocking)) {
            None | Some(1) => true,
            Some(0) => false,
            Some(other) => {
                return Err(Failure::invalid_argument(format!(
                    "blocking is {other} in the configuration: it is 0 or 1"
                )));
            }
        };
        let max_blocks = number(offset_of!(ConfigStart, max_blocks)).map(|blocks| {
            let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks > 0);
            blocks.ok_or_else(|| Failure::invalid_argument("maxCTAs in the configuration is not positive"))
        });
        Ok(Self {
            blocking,
            max_blocks: max_blocks.transpose()?,
        })
    }
}

/// `ncclDataType_t`, by number.
pub(crate) fn data_type(number: c_int) -> Result<DataType, Failure> {
    const TYPES: [DataType; 12] = [
        DataType::I8,
        DataType::U8,
        DataType::I32,
        DataType::U32,
        DataType::I64,
        DataType::U64,
        DataType::F16,
        DataType::F32,
        DataType::F64,
        DataType::Bf16,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ];
    let known = usize::try_from(number).ok().and_then(|number| TYPES.get(number));
    known
        .copied()
        .ok_or_else(|| Failure::invalid_argument(format!("there is no data type {number}")))
}

/// Stores a result through a pointer of the caller.
///
/// # Safety
/// `into` is null or may be written.
pub(crate) unsafe fn store<T>(into: *mut T, value: T, name: &str) -> Result<(), Failure> {
    present(into, name)?;
    // SAFETY: it is not null; the caller's promise.
    unsafe { into.write(value) };
    Ok(())
}

/// Fails for a null pointer.
pub(crate) fn present<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    match pointer.is_null() {
        true => Err(Failure::invalid_argument(format!("{name} is NULL"))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> ConfigStart {
        ConfigStart {
            size: size_of::<ConfigStart>(),
            magic: MAGIC,
            version: 0,
            blocking: UNSET,
            cluster_size: UNSET,
            min_blocks: UNSET,
            max_blocks: UNSET,
        }
    }

    fn read(config: &ConfigStart) -> Result<Config, Failure> {
        // SAFETY: a whole one, whose size is no larger than it.
        unsafe { Config::read((&raw const *config).cast()) }
    }

    #[test]
    fn configurations_are_read_as_far_as_they_go() {
        assert_eq!(read(&start()).unwrap(), Config::default());
        let mut set = ConfigStart {
            blocking: 0,
            max_blocks: 8,
            ..start()
        };
        let whole = Config {
            blocking: false,
            max_blocks: Some(8),
        };
        assert_eq!(read(&set).unwrap(), whole);
        set.size = offset_of!(ConfigStart, max_blocks);
        assert_eq!(
            read(&set).unwrap().max_blocks,
            None,
            "a shorter one of an older release"
        );
        for wrong in [
            ConfigStart { magic: 0, ..start() },
            ConfigStart { blocking: 2, ..start() },
            ConfigStart {
                max_blocks: 0,
                ..start()
            },
        ] {
            assert_eq!(read(&wrong).unwrap_err().status, Status::InvalidArgument);
        }
    }
}

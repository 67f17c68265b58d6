//! Provides memory tokens to C: `bursar_seal`, `bursar_redeem`, `bursar_verify` and
//! `bursar_is_current`.

use std::ffi::{CStr, c_char};

use bursar_runtime::driver::Driver;
use bursar_runtime::memory::gpu_token::{
    Generations, GpuToken, MAX_TOKEN, MemoryId, NodePublicKey, TokenClient, verify,
};

use crate::last_error::{Failure, Status};
use crate::open_args::{ordinal, path, text};
use crate::{Lease, ffi_call};

/// The bytes for a name, its final zero included.
const NAME_LENGTH: usize = 256;

/// `bursar_token`.
#[derive(Debug)]
#[repr(C)]
pub struct RawToken {
    length: u64,
    bytes: [u8; MAX_TOKEN],
}

/// `bursar_memory`.
#[derive(Debug)]
#[repr(C)]
pub struct RawMemory {
    container: u64,
    gpu_generation: u64,
    process_generation: u64,
    lease: u64,
    block: u64,
    node: [u8; NAME_LENGTH],
    gpu: [u8; NAME_LENGTH],
}

impl RawToken {
    fn new(token: &GpuToken) -> RawToken {
        let mut bytes = [0; MAX_TOKEN];
        for (to, from) in bytes.iter_mut().zip(token.as_bytes()) {
            *to = *from;
        }
        let length = token.as_bytes().len() as u64;
        RawToken { length, bytes }
    }

    fn parse(&self) -> Result<GpuToken, Failure> {
        let length = usize::try_from(self.length).ok();
        let bytes = length.and_then(|length| self.bytes.get(..length));
        let token = bytes.and_then(|bytes| GpuToken::try_from(bytes.to_vec()).ok());
        token.ok_or_else(|| {
            Failure::invalid(format!(
                "failed to read the token: it cannot have {} bytes; set the length of the bytes that were received",
                self.length
            ))
        })
    }
}

impl From<MemoryId> for RawMemory {
    fn from(id: MemoryId) -> RawMemory {
        let MemoryId {
            node,
            gpu,
            container,
            generations:
                Generations {
                    gpu: gpu_generation,
                    process: process_generation,
                    lease,
                },
            block,
        } = id;
        RawMemory {
            container,
            gpu_generation,
            process_generation,
            lease,
            block,
            node: name(&node),
            gpu: name(&gpu),
        }
    }
}

/// A name that ends with a zero. The decoder bounds names to 255 bytes.
fn name(text: &str) -> [u8; NAME_LENGTH] {
    let mut name = [0; NAME_LENGTH];
    for (to, from) in name.iter_mut().take(NAME_LENGTH - 1).zip(text.bytes()) {
        *to = from;
    }
    name
}

/// # Safety
/// The pointer is null, or its text ends with a zero.
unsafe fn client(socket: *const c_char) -> TokenClient {
    // SAFETY: the caller keeps the contract.
    match unsafe { text(socket) } {
        Some(socket) => TokenClient::with_socket(&path(socket)),
        None => TokenClient::in_container(),
    }
}

/// Seals a token.
///
/// # Safety
/// `socket` is null or ends with a zero; `lease` is null or from `bursar_retained_open` and not
/// closed; `token` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_seal(
    socket: *const c_char,
    device: i32,
    lease: *const Lease,
    block: u64,
    token: *mut RawToken,
) -> Status {
    ffi_call(|| {
        if token.is_null() {
            return Err(Failure::null("token"));
        }
        // SAFETY: the caller keeps the contract.
        let (client, lease) = unsafe { (client(socket), lease.as_ref()) };
        let sealed = match lease {
            Some(lease) => lease.seal(&client, block)?,
            None => {
                let device = Driver::get()?.device(ordinal(device)?)?;
                client.seal_allocation(device.uuid()?, block)?
            }
        };
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { token.write(RawToken::new(&sealed)) };
        Ok(())
    })
}

/// Redeems a token.
///
/// # Safety
/// `socket` is null or ends with a zero; `token` is null or valid; `memory` is null or valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_redeem(
    socket: *const c_char,
    token: *const RawToken,
    memory: *mut RawMemory,
) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let (client, token) = unsafe { (client(socket), token.as_ref()) };
        let token = token.ok_or(Failure::null("token"))?.parse()?;
        if memory.is_null() {
            return Err(Failure::null("memory"));
        }
        let id = client.redeem(&token)?;
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { memory.write(id.into()) };
        Ok(())
    })
}

/// Verifies a token.
///
/// # Safety
/// `token` is null or valid; `public_key` is null or has 32 bytes; `memory` is null or valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_verify(
    token: *const RawToken,
    public_key: *const [u8; 32],
    memory: *mut RawMemory,
) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let (token, key) = unsafe { (token.as_ref(), public_key.as_ref()) };
        let token = token.ok_or(Failure::null("token"))?.parse()?;
        let key = NodePublicKey(*key.ok_or(Failure::null("public_key"))?);
        if memory.is_null() {
            return Err(Failure::null("memory"));
        }
        let id = verify(&token, &key)?;
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { memory.write(id.into()) };
        Ok(())
    })
}

/// Says whether the GPU still has memory.
///
/// # Safety
/// `memory` is null or valid; `gpu` is null or ends with a zero; `current` is null or valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_is_current(
    memory: *const RawMemory,
    gpu: *const c_char,
    generation: u64,
    current: *mut i32,
) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let (memory, gpu) = unsafe { (memory.as_ref(), text(gpu)) };
        let memory = memory.ok_or(Failure::null("memory"))?;
        let gpu = gpu.ok_or(Failure::null("gpu"))?;
        if current.is_null() {
            return Err(Failure::null("current"));
        }
        if CStr::from_bytes_until_nul(&memory.gpu) != Ok(gpu) {
            return Err(Failure::invalid(
                "failed to compare the generations: the GPU is not the memory's; pass the GPU of \
                 status.gpus that the memory names"
                    .to_owned(),
            ));
        }
        let is_current = memory.gpu_generation == generation;
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { current.write(i32::from(is_current)) };
        Ok(())
    })
}

//! Provides retained memory and memory tokens to C: the functions of `bursar.h`, which documents
//! them.
//!
//! Each function reads its arguments, calls the runtime, and converts a failure to a number and a
//! text. A panic ends at the function as `BURSAR_INTERNAL`.
//!
//! * `last_error` stores a thread's last failure.
//! * `open_args` reads the arguments of `bursar_retained_open`.
//! * `tokens` has the functions of memory tokens.

mod last_error;
mod open_args;
pub mod tokens;

use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use bursar_runtime::driver::Driver;
use bursar_runtime::memory::gpu_token::{GpuToken, TokenClient};
use bursar_runtime::retained::{LeaseClient, LeaseError, LeaseState, LeaseWriter, RetainedLease};
use last_error::{Failure, Status};
use open_args::{OpenArgs, RawOpenArgs};

/// `bursar_lease`.
#[derive(Debug)]
pub struct Lease(Mutex<State>);

#[derive(Debug)]
enum State {
    Writing(LeaseWriter),
    Ready(RetainedLease),
    /// A commit failed, and the lease was discarded.
    Ended,
}

/// `bursar_lease_state`.
#[derive(Debug)]
#[repr(C)]
pub struct View {
    address: u64,
    bytes: u64,
    lease: u64,
    generation: u64,
    ready: i32,
}

impl Lease {
    fn open(args: &OpenArgs) -> Result<Lease, LeaseError> {
        let device = Driver::get()?.device(args.device)?;
        let context = device.primary_context()?;
        let client = match &args.socket {
            Some(socket) => LeaseClient::with_socket(&context, socket),
            None => LeaseClient::new(&context),
        };
        let (name, key, timeout) = (&args.name, &args.key, args.timeout);
        let opened = match args.bytes {
            0 => client.find(name, key, timeout).map(LeaseState::Ready),
            bytes => client.open(name, key, bytes, timeout),
        };
        Ok(Lease(Mutex::new(match opened? {
            LeaseState::Ready(retained) => State::Ready(retained),
            LeaseState::Writing(writer) => State::Writing(writer),
        })))
    }

    fn view(&self) -> Result<View, Failure> {
        match &*self.state() {
            State::Ready(retained) => Ok(View {
                address: retained.address(),
                bytes: retained.bytes(),
                lease: retained.lease(),
                generation: retained.generation(),
                ready: 1,
            }),
            State::Writing(writer) => Ok(View {
                address: writer.address(),
                bytes: writer.bytes(),
                lease: writer.lease(),
                generation: writer.generation(),
                ready: 0,
            }),
            State::Ended => Err(Failure::ended()),
        }
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<(), Failure> {
        match &*self.state() {
            State::Ready(retained) => Ok(retained.read(at, to)?),
            State::Writing(_) => Err(Failure::invalid(
                "failed to read the lease: it is not committed; commit it first".to_owned(),
            )),
            State::Ended => Err(Failure::ended()),
        }
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Failure> {
        match &*self.state() {
            State::Writing(writer) => Ok(writer.write(at, from)?),
            State::Ready(_) => Err(Failure::invalid(
                "failed to write the lease: it is committed and read-only; open a new lease"
                    .to_owned(),
            )),
            State::Ended => Err(Failure::ended()),
        }
    }

    /// Seals a token for the lease.
    fn seal(&self, client: &TokenClient, block: u64) -> Result<GpuToken, Failure> {
        match &*self.state() {
            State::Ready(retained) => Ok(client.seal_retained(retained, block)?),
            State::Writing(_) => Err(Failure::invalid(
                "failed to seal a token for the lease: it is not committed; commit it first"
                    .to_owned(),
            )),
            State::Ended => Err(Failure::ended()),
        }
    }

    fn commit(&self) -> Result<(), Failure> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Ended) {
            State::Writing(writer) => *state = State::Ready(writer.commit()?),
            State::Ready(retained) => *state = State::Ready(retained),
            State::Ended => return Err(Failure::ended()),
        }
        Ok(())
    }

    fn discard(self) -> Result<(), Failure> {
        match self.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            State::Writing(writer) => writer.discard()?,
            State::Ready(retained) => retained.discard()?,
            State::Ended => {}
        }
        Ok(())
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the body of a function and stores its failure as the thread's last one.
fn ffi_call(run: impl FnOnce() -> Result<(), Failure>) -> Status {
    let done = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err(Failure::panicked()));
    match done {
        Ok(()) => Status::Ok,
        Err(failure) => last_error::set(failure),
    }
}

/// Opens a lease, or creates it.
///
/// # Safety
/// `args` is null or points to a `bursar_open_args` whose texts are null or end with a zero.
/// `lease` is null or valid for a write of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_open(
    args: *const RawOpenArgs,
    lease: *mut *mut Lease,
) -> Status {
    ffi_call(|| {
        if lease.is_null() {
            return Err(Failure::null("lease"));
        }
        // A caller may close the lease without a look at the status.
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { lease.write(std::ptr::null_mut()) };
        // SAFETY: the caller keeps the contract.
        let args = unsafe { args.as_ref() }.ok_or(Failure::null("args"))?;
        // SAFETY: the caller keeps the contract.
        let opened = Lease::open(&unsafe { OpenArgs::read(args) }?)?;
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { lease.write(Box::into_raw(Box::new(opened))) };
        Ok(())
    })
}

/// Returns address, size and identity of an open lease.
///
/// # Safety
/// `lease` is null or from [`bursar_retained_open`] and not closed; `view` is null or valid for a
/// write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_describe(lease: *const Lease, view: *mut View) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let lease = unsafe { lease.as_ref() }.ok_or(Failure::null("lease"))?;
        if view.is_null() {
            return Err(Failure::null("view"));
        }
        // SAFETY: not null, and the caller keeps the contract.
        unsafe { view.write(lease.view()?) };
        Ok(())
    })
}

/// Copies from a lease to the host.
///
/// # Safety
/// `lease` is null or from [`bursar_retained_open`] and not closed; `to` is null or has room for
/// `bytes` bytes, which no other code uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_read(
    lease: *const Lease,
    at: u64,
    to: *mut u8,
    bytes: u64,
) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let lease = unsafe { lease.as_ref() }.ok_or(Failure::null("lease"))?;
        if to.is_null() {
            return Err(Failure::null("to"));
        }
        // SAFETY: not null, and the caller keeps the contract. Every value is valid for a byte.
        lease.read(at, unsafe {
            std::slice::from_raw_parts_mut(to, length(bytes)?)
        })
    })
}

/// Copies from the host to a lease.
///
/// # Safety
/// `lease` is null or from [`bursar_retained_open`] and not closed; `from` is null or has `bytes`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_write(
    lease: *mut Lease,
    at: u64,
    from: *const u8,
    bytes: u64,
) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let lease = unsafe { lease.as_ref() }.ok_or(Failure::null("lease"))?;
        if from.is_null() {
            return Err(Failure::null("from"));
        }
        // SAFETY: not null, and the caller keeps the contract.
        lease.write(at, unsafe {
            std::slice::from_raw_parts(from, length(bytes)?)
        })
    })
}

/// Returns a length that a slice may have.
fn length(bytes: u64) -> Result<usize, Failure> {
    isize::try_from(bytes)
        .map(isize::cast_unsigned)
        .map_err(|_| {
            Failure::invalid(format!(
                "failed to copy {bytes} bytes: too many; copy in parts"
            ))
        })
}

/// Commits a lease.
///
/// # Safety
/// `lease` is null or from [`bursar_retained_open`] and not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_commit(lease: *mut Lease) -> Status {
    ffi_call(|| {
        // SAFETY: the caller keeps the contract.
        let lease = unsafe { lease.as_ref() }.ok_or(Failure::null("lease"))?;
        lease.commit()
    })
}

/// Discards a lease and closes it.
///
/// # Safety
/// `lease` is null or from [`bursar_retained_open`] and not closed. The call closes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_discard(lease: *mut Lease) -> Status {
    ffi_call(|| {
        if lease.is_null() {
            return Err(Failure::null("lease"));
        }
        // SAFETY: `Box::into_raw` in `bursar_retained_open` returned the pointer, and no other code
        // has it.
        unsafe { Box::from_raw(lease) }.discard()
    })
}

/// Closes a lease.
///
/// # Safety
/// `lease` is null or from [`bursar_retained_open`] and not closed. The call closes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bursar_retained_close(lease: *mut Lease) {
    ffi_call(|| {
        if !lease.is_null() {
            // SAFETY: `Box::into_raw` in `bursar_retained_open` returned the pointer, and no other
            // code has it.
            drop(unsafe { Box::from_raw(lease) });
        }
        Ok(())
    });
}

/// Returns the text of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn bursar_error() -> *const c_char {
    last_error::text()
}

/// Returns the `CUresult` of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn bursar_cuda() -> i32 {
    last_error::cuda()
}

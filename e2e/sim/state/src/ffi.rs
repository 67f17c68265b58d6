//! Pointer arguments of the two C interfaces: a null one is an error (`E`, the library's own), not a crash.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

/// An argument is null that must not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a pointer is null")]
pub struct NullPointer;

/// A pointer argument that the library writes through (and may read first).
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T, E>(*mut T, PhantomData<E>);

impl<T, E: From<NullPointer>> Out<T, E> {
    /// A pointer that the caller put into memory.
    pub fn at_address(address: u64) -> Out<T, E> {
        Out(address as *mut T, PhantomData)
    }

    /// Whether the caller did not ask.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn set(&self, value: T) -> Result<(), E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        // SAFETY: the C interface's contract: a pointer that is not null points to a `T` of the caller's.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes unless the caller did not ask.
    pub fn set_if_not_null(&self, value: T) {
        let _ = self.set(value);
    }

    /// Writes several in a row; the caller has checked that they fit.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn set_all(&self, values: impl IntoIterator<Item = T>) -> Result<(), E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        values
            .into_iter()
            .enumerate()
            .try_for_each(|(place, value)| {
                Out::<T, E>(self.0.wrapping_add(place), PhantomData).set(value)
            })
    }

    /// The same pointer to another type, for arguments that C leaves as `void *`.
    pub fn cast<U>(&self) -> Out<U, E> {
        Out(self.0.cast(), PhantomData)
    }
}

impl<T: Copy, E: From<NullPointer>> Out<T, E> {
    /// Reads what the caller put there.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn get(&self) -> Result<T, E> {
        In(self.0.cast_const(), PhantomData).get()
    }
}

/// A pointer argument that the library reads through.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct In<T, E>(*const T, PhantomData<E>);

impl<T: Copy, E: From<NullPointer>> In<T, E> {
    /// A pointer that the caller put into memory.
    pub fn at_address(address: u64) -> In<T, E> {
        In(address as *const T, PhantomData)
    }

    /// Reads.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn get(&self) -> Result<T, E> {
        self.at(0)
    }

    /// The `place`th of an array.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn at(&self, place: usize) -> Result<T, E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        // SAFETY: as for `Out::set`; the caller says how long an array is.
        Ok(unsafe { self.0.add(place).read_unaligned() })
    }
}

/// A C string argument.
#[repr(transparent)]
#[derive(Debug)]
pub struct Text<E>(*const c_char, PhantomData<E>);

impl<E: From<NullPointer>> Text<E> {
    /// A pointer that the caller put into memory.
    pub fn at_address(address: u64) -> Text<E> {
        Text(address as *const c_char, PhantomData)
    }

    /// The string.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn get(&self) -> Result<String, E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        // SAFETY: the C interface's contract: a NUL-terminated string.
        Ok(unsafe { CStr::from_ptr(self.0) }
            .to_string_lossy()
            .into_owned())
    }
}

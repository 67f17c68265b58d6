//! Wraps pointer arguments of the CUDA and NVML interfaces.
//!
//! A null pointer becomes an error of the library (the type parameter `E`) instead of a crash.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

/// A required pointer argument was null.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a pointer is null")]
pub struct NullPointer;

/// A pointer argument that the library writes through and may read first.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T, E>(*mut T, PhantomData<E>);

impl<T, E: From<NullPointer>> Out<T, E> {
    /// Wraps an address that the caller stored in memory.
    pub fn at_address(address: u64) -> Out<T, E> {
        Out(address as *mut T, PhantomData)
    }

    /// Whether the caller passed a null pointer.
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes the value.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn set(&self, value: T) -> Result<(), E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        // SAFETY: by contract of the C interface, a non-null pointer points to a `T` of the caller.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the value if the pointer is not null.
    pub fn set_if_not_null(&self, value: T) {
        let _ = self.set(value);
    }

    /// Writes consecutive values; the caller has checked that they fit.
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

    /// Casts the pointer, for arguments that C declares as `void *`.
    pub fn cast<U>(&self) -> Out<U, E> {
        Out(self.0.cast(), PhantomData)
    }
}

impl<T: Copy, E: From<NullPointer>> Out<T, E> {
    /// Reads the caller's value.
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
    /// Wraps an address that the caller stored in memory.
    pub fn at_address(address: u64) -> In<T, E> {
        In(address as *const T, PhantomData)
    }

    /// Reads the value.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn get(&self) -> Result<T, E> {
        self.at(0)
    }

    /// Reads the array element with index `place`.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn at(&self, place: usize) -> Result<T, E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        // SAFETY: by contract of the C interface, the array of the caller has more than `place`
        // elements.
        Ok(unsafe { self.0.add(place).read_unaligned() })
    }
}

/// A C string argument.
#[repr(transparent)]
#[derive(Debug)]
pub struct Text<E>(*const c_char, PhantomData<E>);

impl<E: From<NullPointer>> Text<E> {
    /// Wraps an address that the caller stored in memory.
    pub fn at_address(address: u64) -> Text<E> {
        Text(address as *const c_char, PhantomData)
    }

    /// Copies the string; bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// The pointer is null.
    pub fn get(&self) -> Result<String, E> {
        if self.0.is_null() {
            return Err(NullPointer.into());
        }
        // SAFETY: by contract of the C interface, the pointer points to a NUL-terminated string.
        Ok(unsafe { CStr::from_ptr(self.0) }
            .to_string_lossy()
            .into_owned())
    }
}

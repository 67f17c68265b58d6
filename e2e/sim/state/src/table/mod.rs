//! Shares the table between processes: a mapped file behind a robust mutex.

mod raw;

use crate::config::Config;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

pub use raw::{MAX_IMAGES, MAX_OBJECTS, MAX_RUNS, MAX_UNITS, MAX_XIDS};
pub(crate) use raw::{RawImage, RawManaged, RawObject, RawRun, RawTable};

/// The shared mapping of `state/table`.
#[derive(Debug)]
pub struct Table {
    raw: *mut RawTable,
}

// SAFETY: the mapping lives as long as the value; each of its fields is atomic or the mutex.
unsafe impl Send for Table {}
// SAFETY: threads share only atomics and the mutex.
unsafe impl Sync for Table {}

/// Reasons why the table is not usable.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The file could not be created, opened or mapped.
    #[error("failed to {step} {path}")]
    Io {
        /// The step that failed.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another version of `simgpu init` wrote the file.
    #[error("{0} was laid out by another version; run `simgpu init` again")]
    Version(PathBuf),
}

impl Table {
    /// Creates an empty table and renames it into place.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, config: &Config) -> Result<(), TableError> {
        let at = |step| {
            move |source| TableError::Io {
                step,
                path: path.to_owned(),
                source,
            }
        };
        let fresh = path.with_extension("new");
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&fresh);
        let file = file.map_err(at("create"))?;
        file.set_len(size_of::<RawTable>() as u64)
            .map_err(at("resize"))?;
        file.set_permissions(std::fs::Permissions::from_mode(0o666))
            .map_err(at("set the mode of"))?;
        let table = Table::map(&file).map_err(at("map"))?;
        table.init_mutex().map_err(at("initialise the mutex of"))?;
        let namespace = crate::lock::pid_namespace().map_err(at("read the pid namespace for"))?;
        table.raw().host_namespace.store(namespace, Relaxed);
        table.raw().scrub.store(u32::from(config.scrub), Relaxed);
        let delay = &table.raw().eviction_delay;
        delay.store(config.uvm_delay, Relaxed);
        table.raw().magic.store(raw::MAGIC, Relaxed);
        std::fs::rename(&fresh, path).map_err(at("rename to"))
    }

    /// Maps an existing table.
    ///
    /// # Errors
    /// The file does not exist, or another version wrote it.
    pub fn open(path: &Path) -> Result<Table, TableError> {
        let at = |step| {
            move |source| TableError::Io {
                step,
                path: path.to_owned(),
                source,
            }
        };
        let file = crate::lock::open(path).map_err(at("open"))?;
        let len = file.metadata().map_err(at("read the size of"))?.len();
        if len != size_of::<RawTable>() as u64 {
            return Err(TableError::Version(path.to_owned()));
        }
        let table = Table::map(&file).map_err(at("map"))?;
        match table.raw().magic.load(Relaxed) {
            raw::MAGIC => Ok(table),
            _ => Err(TableError::Version(path.to_owned())),
        }
    }

    fn map(file: &File) -> io::Result<Table> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address; the file is open and has that size.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<RawTable>(),
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Table { raw: raw.cast() })
    }

    pub(crate) fn raw(&self) -> &RawTable {
        // SAFETY: mapped with this size and alignment until `self` is dropped. Every field is
        // atomic or in an `UnsafeCell`, and all-zero bytes are valid for each.
        unsafe { &*self.raw }
    }

    fn init_mutex(&self) -> io::Result<()> {
        // SAFETY: `pthread_mutexattr_init` overwrites the zeroed attributes before they are used.
        let mut attributes: libc::pthread_mutexattr_t = unsafe { std::mem::zeroed() };
        // SAFETY: the attributes are local, and no other process has mapped the new file yet.
        let codes = unsafe {
            [
                libc::pthread_mutexattr_init(&mut attributes),
                libc::pthread_mutexattr_setpshared(&mut attributes, libc::PTHREAD_PROCESS_SHARED),
                libc::pthread_mutexattr_setrobust(&mut attributes, libc::PTHREAD_MUTEX_ROBUST),
                libc::pthread_mutex_init(self.raw().mutex.get(), &attributes),
            ]
        };
        match codes.into_iter().find(|code| *code != 0) {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => Ok(()),
        }
    }

    /// Locks the table. If the last owner died with the lock, recomputes the units' sums.
    ///
    /// # Panics
    /// The mutex is invalid, because a program overwrote the table.
    pub(crate) fn lock(&self) -> TableGuard<'_> {
        // SAFETY: `create` initialised the mutex, and it lives in this mapping.
        match unsafe { libc::pthread_mutex_lock(self.raw().mutex.get()) } {
            0 => TableGuard { table: self },
            libc::EOWNERDEAD => {
                // SAFETY: this thread owns the mutex, as `pthread_mutex_consistent` requires.
                unsafe { libc::pthread_mutex_consistent(self.raw().mutex.get()) };
                let table = TableGuard { table: self };
                table.recompute_usage();
                table
            }
            code => panic!("the table's mutex answers {code}: the table is damaged"),
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: `map` mapped it with this size, and no reference outlives `self`.
        unsafe { libc::munmap(self.raw.cast(), size_of::<RawTable>()) };
    }
}

/// The locked table.
pub(crate) struct TableGuard<'a> {
    table: &'a Table,
}

impl TableGuard<'_> {
    pub(crate) fn raw(&self) -> &RawTable {
        self.table.raw()
    }

    /// Registered images with their slots.
    ///
    /// An image gets the lowest free slot, so that iteration can stop at the high-water mark. Each
    /// row has 9 KiB, and each charge reads all rows.
    pub(crate) fn images(&self) -> impl Iterator<Item = (usize, &RawImage)> {
        let high = self.raw().images_high_water.load(Relaxed) as usize;
        let images = &self.raw().images[..high.min(MAX_IMAGES)];
        images
            .iter()
            .enumerate()
            .filter(|(_, image)| image.used.load(Relaxed) != 0)
    }

    /// Live objects with their slots.
    ///
    /// An object gets the lowest free slot, so that iteration can stop at the high-water mark.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (usize, &RawObject)> {
        let high = self.raw().objects_high_water.load(Relaxed) as usize;
        let objects = &self.raw().objects[..high.min(MAX_OBJECTS)];
        objects
            .iter()
            .enumerate()
            .filter(|(_, object)| object.used.load(Relaxed) != 0)
    }

    /// Recomputes each unit's used bytes from the images and objects.
    pub(crate) fn recompute_usage(&self) {
        let mut sums = [0u64; MAX_UNITS];
        for (_, image) in self.images() {
            for (sum, charge) in sums.iter_mut().zip(&image.charges) {
                *sum += charge.iter().map(|part| part.load(Relaxed)).sum::<u64>();
            }
        }
        for (_, object) in self.objects() {
            sums[object.unit.load(Relaxed) as usize % MAX_UNITS] += object.size.load(Relaxed);
        }
        for (unit, sum) in self.raw().units.iter().zip(sums) {
            unit.used.store(sum, Relaxed);
        }
    }
}

impl Drop for TableGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the thread that creates a `TableGuard` owns the mutex and drops the guard in the
        // same function; a guard is not `Send`.
        unsafe { libc::pthread_mutex_unlock(self.table.raw().mutex.get()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_recovers_when_lock_owner_dies() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        Table::create(&path, &Config::parse("").unwrap()).unwrap();
        let table = Table::open(&path).unwrap();
        // SAFETY: the child calls nothing that depends on another thread of its parent.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let table = table.lock();
            table.raw().units[0].used.store(12345, Relaxed);
            // SAFETY: ends the child while it holds the mutex.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: waits for this process's own child; a null status pointer is allowed.
        let waited = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(waited, child);
        assert_eq!(table.lock().raw().units[0].used.load(Relaxed), 0);
    }
}

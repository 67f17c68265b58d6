//! The shared books: a mapped file behind a mutex that survives the death of its owner.

mod raw;

use crate::config::Config;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

pub use raw::{MAX_IMAGES, MAX_OBJECTS, MAX_UNITS, MAX_XIDS};
pub(crate) use raw::{RawImage, RawObject, RawTable};

/// The shared mapping of `state/table`.
#[derive(Debug)]
pub struct Table {
    raw: *mut RawTable,
}

// SAFETY: the mapping lives as long as the value, and everything in it is atomic or the mutex itself.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// Why the table is not usable.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The file could not be made, opened or mapped.
    #[error("{step} {path}")]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file was not written by this version of `simgpu init`.
    #[error("{0} was laid out by another version; run `simgpu init` again")]
    Version(PathBuf),
}

impl Table {
    /// Makes an empty table, in one rename.
    ///
    /// # Errors
    /// A file that cannot be written.
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
        let file = file.map_err(at("creating"))?;
        file.set_len(size_of::<RawTable>() as u64)
            .map_err(at("sizing"))?;
        file.set_permissions(std::fs::Permissions::from_mode(0o666))
            .map_err(at("opening to all"))?;
        let table = Table::map(&file).map_err(at("mapping"))?;
        table.init_mutex().map_err(at("making the mutex of"))?;
        let namespace =
            crate::lock::pid_namespace().map_err(at("finding the pid namespace for"))?;
        table.raw().host_namespace.store(namespace, Relaxed);
        table.raw().scrub.store(u32::from(config.scrub), Relaxed);
        table.raw().magic.store(raw::MAGIC, Relaxed);
        std::fs::rename(&fresh, path).map_err(at("renaming to"))
    }

    /// Maps an existing table.
    ///
    /// # Errors
    /// It is not there, or another version's.
    pub fn open(path: &Path) -> Result<Table, TableError> {
        let at = |step| {
            move |source| TableError::Io {
                step,
                path: path.to_owned(),
                source,
            }
        };
        let file = crate::lock::open(path).map_err(at("opening"))?;
        let len = file.metadata().map_err(at("sizing"))?.len();
        if len != size_of::<RawTable>() as u64 {
            return Err(TableError::Version(path.to_owned()));
        }
        let table = Table::map(&file).map_err(at("mapping"))?;
        match table.raw().magic.load(Relaxed) {
            raw::MAGIC => Ok(table),
            _ => Err(TableError::Version(path.to_owned())),
        }
    }

    fn map(file: &File) -> io::Result<Table> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of an open file of that size.
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
        // SAFETY: mapped, of the right size and alignment, until `self` is dropped; every field is
        // atomic or in an `UnsafeCell`, and all-zero bytes are valid for each.
        unsafe { &*self.raw }
    }

    fn init_mutex(&self) -> io::Result<()> {
        // SAFETY: zero is a valid start for attributes that `init` then fills in.
        let mut attributes: libc::pthread_mutexattr_t = unsafe { std::mem::zeroed() };
        // SAFETY: the attributes are ours, the mutex is in a mapping that nobody else has yet.
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

    /// Takes the books. When the last owner died inside, the sums are made again from their parts.
    ///
    /// # Panics
    /// The mutex is not one: somebody overwrote the table.
    pub(crate) fn lock(&self) -> TableGuard<'_> {
        // SAFETY: the mutex was initialised by `create` and lives in our mapping.
        match unsafe { libc::pthread_mutex_lock(self.raw().mutex.get()) } {
            0 => TableGuard { table: self },
            libc::EOWNERDEAD => {
                // SAFETY: we own the mutex, which is what `consistent` asks for.
                unsafe { libc::pthread_mutex_consistent(self.raw().mutex.get()) };
                let books = TableGuard { table: self };
                books.recompute_usage();
                books
            }
            code => panic!("the table's mutex answers {code}: the table is damaged"),
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size, and no reference outlives `self`.
        unsafe { libc::munmap(self.raw.cast(), size_of::<RawTable>()) };
    }
}

/// The books, held.
pub(crate) struct TableGuard<'a> {
    table: &'a Table,
}

impl TableGuard<'_> {
    pub(crate) fn raw(&self) -> &RawTable {
        self.table.raw()
    }

    /// Used images with their numbers.
    pub(crate) fn images(&self) -> impl Iterator<Item = (usize, &RawImage)> {
        self.raw()
            .images
            .iter()
            .enumerate()
            .filter(|(_, image)| image.used.load(Relaxed) != 0)
    }

    /// Used objects with their numbers. Objects are given the lowest free place, so that a walk ends at
    /// the highest place that was ever used.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (usize, &RawObject)> {
        let high = self.raw().objects_high_water.load(Relaxed) as usize;
        let objects = &self.raw().objects[..high.min(MAX_OBJECTS)];
        objects
            .iter()
            .enumerate()
            .filter(|(_, object)| object.used.load(Relaxed) != 0)
    }

    /// Makes the sum of each unit again from the images and objects.
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
        // SAFETY: a `Books` exists only while its thread owns the mutex, and is not `Send`: it holds a
        // reference, and is dropped in the function that made it.
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
        // SAFETY: the child calls nothing that needs another thread of the parent's.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let books = table.lock();
            books.raw().units[0].used.store(12345, Relaxed);
            // SAFETY: ends the child in the middle of a change.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: waits for our own child; the status is not asked for.
        let waited = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(waited, child);
        assert_eq!(table.lock().raw().units[0].used.load(Relaxed), 0);
    }
}

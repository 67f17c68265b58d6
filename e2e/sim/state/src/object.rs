//! Stores a shared allocation as a sparse file that lives while anything refers to it.
//!
//! Every reference is an open file description that locks one byte of the file:
//!
//! - byte 0: the process that created the allocation,
//! - byte 1: an exported descriptor, in any process or in a socket's queue,
//! - byte 2 + n: an importer, which is image n.
//!
//! A handle or mapping refers to its description by a mapping and so needs no descriptor. The
//! kernel drops the lock with the last reference to the description (F4 in
//! docs/internals/facts.md).

use crate::image::Image;
use crate::sim::{Sim, SimError};
use crate::table::{MAX_OBJECTS, RawObject, TableGuard};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::atomic::Ordering::Relaxed;

const CREATOR_BYTE: u64 = 0;
const EXPORT_BYTE: u64 = 1;
const FIRST_IMPORTER_BYTE: u64 = 2;

/// A shared allocation. Dropping the value frees nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// Identifies the allocation; no other one ever has the same id.
    pub id: u64,
    /// The unit whose memory is charged.
    pub unit: usize,
    /// The size in bytes.
    pub size: u64,
    /// Whether this process created it.
    pub is_creator: bool,
}

/// Keeps an object alive by a mapped page, without a descriptor.
#[derive(Debug)]
pub struct ObjectPin(*mut libc::c_void);

// SAFETY: only `drop` uses the address.
unsafe impl Send for ObjectPin {}
// SAFETY: no method takes `&ObjectPin` and reads the address.
unsafe impl Sync for ObjectPin {}

impl Drop for ObjectPin {
    fn drop(&mut self) {
        // SAFETY: `pin_description` mapped one page there, and no other value has its address.
        unsafe { libc::munmap(self.0, PAGE) };
    }
}

const PAGE: usize = 4096;

/// References to an object, other than the caller's own.
#[derive(Debug, Default)]
pub(crate) struct References {
    creator: Option<usize>,
    has_creator: bool,
    is_exported: bool,
    importers: Vec<usize>,
}

impl References {
    pub(crate) fn of(sim: &Sim, object: &RawObject) -> References {
        let path = sim.folder.object(object.id.load(Relaxed));
        let Ok(file) = crate::lock::open(&path) else {
            return References::default();
        };
        let locked = |start, len| {
            crate::lock::find_locked_byte(&file, start, len)
                .ok()
                .flatten()
        };
        let number = object.creator.load(Relaxed) as usize;
        let same = sim.table.raw().images[number].serial.load(Relaxed)
            == object.creator_serial.load(Relaxed);
        let has_creator = locked(CREATOR_BYTE, 1).is_some();
        let mut importers = Vec::new();
        let mut ranges = vec![(FIRST_IMPORTER_BYTE, crate::table::MAX_IMAGES as u64)];
        while let Some((start, len)) = ranges.pop() {
            let Some(byte) = (len > 0).then(|| locked(start, len)).flatten() else {
                continue;
            };
            importers.push((byte - FIRST_IMPORTER_BYTE) as usize);
            ranges.push((start, byte - start));
            ranges.push((byte + 1, start + len - byte - 1));
        }
        References {
            creator: same.then_some(number),
            has_creator,
            is_exported: locked(EXPORT_BYTE, 1).is_some(),
            importers,
        }
    }

    /// The image that NVML charges, as measured on an H200 (F5, F13 in docs/internals/facts.md).
    ///
    /// NVML charges the creator while the creator itself refers to the object. Otherwise it charges
    /// an importer if that one is the only reference.
    pub(crate) fn charged_image(&self) -> Option<usize> {
        match (
            self.has_creator,
            self.is_exported,
            self.importers.as_slice(),
        ) {
            (true, ..) => self.creator,
            (false, false, [importer]) => Some(*importer),
            _ => None,
        }
    }
}

impl Object {
    /// Creates an object and charges its memory to the unit.
    ///
    /// # Errors
    /// [`SimError::OutOfMemory`], or the file cannot be created.
    pub fn create(
        sim: &Sim,
        image: &Image,
        unit: usize,
        size: u64,
    ) -> Result<(Object, ObjectPin), SimError> {
        let table = sim.table.lock();
        let free = table
            .raw()
            .objects
            .iter()
            .position(|place| place.used.load(Relaxed) == 0);
        let number = free.ok_or(SimError::TableFull(MAX_OBJECTS))?;
        let evicted = table.reserve(sim, unit, size)?;
        let id = table.raw().next_id.fetch_add(1, Relaxed) + 1;
        let object = Object {
            id,
            unit,
            size,
            is_creator: true,
        };
        match object.create_file(sim, image) {
            Ok((pin, inode)) => {
                object.insert_row(&table, number, image, inode);
                drop(table);
                sim.wait_for_eviction(evicted);
                Ok((object, pin))
            }
            Err(error) => {
                table.raw().units[unit].used.fetch_sub(size, Relaxed);
                Err(error)
            }
        }
    }

    fn create_file(&self, sim: &Sim, image: &Image) -> Result<(ObjectPin, u64), SimError> {
        let path = sim.folder.object(self.id);
        let at = |step| {
            let path = path.clone();
            move |source| SimError::Io { step, path, source }
        };
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(at("create"))?;
        // Containers with other users import the object.
        file.set_permissions(std::fs::Permissions::from_mode(0o666))
            .map_err(at("set the mode of"))?;
        file.write_all(&crate::residue::load(sim, self.unit, self.size))
            .map_err(at("write"))?;
        file.set_len(self.size).map_err(at("resize"))?;
        let inode = file.metadata().map_err(at("read the metadata of"))?.ino();
        crate::lock::lock_shared(&file, self.lock_byte(image)).map_err(at("lock"))?;
        Ok((pin_description(&file).map_err(at("map"))?, inode))
    }

    fn insert_row(&self, table: &TableGuard<'_>, number: usize, image: &Image, inode: u64) {
        let place = &table.raw().objects[number];
        place.unit.store(self.unit as u32, Relaxed);
        place.id.store(self.id, Relaxed);
        place.size.store(self.size, Relaxed);
        place.inode.store(inode, Relaxed);
        place.creator.store(image.slot() as u32, Relaxed);
        place.creator_serial.store(image.serial(), Relaxed);
        place.used.store(1, Relaxed);
        let high = &table.raw().objects_high_water;
        high.fetch_max(number as u32 + 1, Relaxed);
    }

    fn lock_byte(&self, image: &Image) -> u64 {
        if self.is_creator {
            CREATOR_BYTE
        } else {
            FIRST_IMPORTER_BYTE + image.slot() as u64
        }
    }

    /// Finds the object of an exported descriptor.
    ///
    /// # Errors
    /// [`SimError::NotAnObject`].
    pub fn from_descriptor(sim: &Sim, file: &File) -> Result<Object, SimError> {
        let inode = file.metadata().map_err(|_| SimError::NotAnObject)?.ino();
        let table = sim.table.lock();
        let found = table
            .objects()
            .find(|(_, place)| place.inode.load(Relaxed) == inode);
        let (_, place) = found.ok_or(SimError::NotAnObject)?;
        let object = read_row(place);
        // A file of another file system may have the same inode number.
        let path = sim.folder.object(object.id);
        let same = std::fs::metadata(path)
            .is_ok_and(|there| file.metadata().is_ok_and(|here| here.dev() == there.dev()));
        if same {
            Ok(object)
        } else {
            Err(SimError::NotAnObject)
        }
    }

    /// Finds an object by its id, which an IPC handle carries.
    ///
    /// # Errors
    /// [`SimError::NotAnObject`] if the object no longer exists.
    pub fn find(sim: &Sim, id: u64) -> Result<Object, SimError> {
        let table = sim.table.lock();
        table.collect(sim);
        let found = table
            .objects()
            .find(|(_, place)| place.id.load(Relaxed) == id);
        found
            .map(|(_, place)| read_row(place))
            .ok_or(SimError::NotAnObject)
    }

    /// Adds a reference of this image to the object.
    ///
    /// # Errors
    /// The file is gone or cannot be locked.
    pub fn pin(&self, sim: &Sim, image: &Image) -> Result<ObjectPin, SimError> {
        let file = self.open_locked(sim, self.lock_byte(image))?;
        pin_description(&file).map_err(|source| SimError::Io {
            step: "map",
            path: sim.folder.object(self.id),
            source,
        })
    }

    /// Opens a descriptor for export, which alone keeps the memory (F4 in docs/internals/facts.md).
    ///
    /// # Errors
    /// The file is gone or cannot be locked.
    pub fn export(&self, sim: &Sim) -> Result<OwnedFd, SimError> {
        self.open_locked(sim, EXPORT_BYTE).map(OwnedFd::from)
    }

    /// Maps `len` bytes from `offset` over address space of the caller, with protection `access`.
    ///
    /// The mapping is a reference to the object.
    ///
    /// # Safety
    /// The caller owns `address..address + len` and may replace what is mapped there.
    ///
    /// # Errors
    /// The file is gone, or the kernel refuses the mapping.
    pub unsafe fn map_over(
        &self,
        sim: &Sim,
        image: &Image,
        address: u64,
        len: u64,
        offset: u64,
        access: i32,
    ) -> Result<(), SimError> {
        let file = self.open_locked(sim, self.lock_byte(image))?;
        let (flags, at) = (
            libc::MAP_SHARED | libc::MAP_FIXED,
            address as *mut libc::c_void,
        );
        // SAFETY: by the function's contract the caller owns the range; the file is open and long
        // enough.
        let mapped = unsafe {
            libc::mmap(
                at,
                len as usize,
                access,
                flags,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if mapped == libc::MAP_FAILED {
            let source = std::io::Error::last_os_error();
            return Err(SimError::Io {
                step: "map",
                path: sim.folder.object(self.id),
                source,
            });
        }
        Ok(())
    }

    /// Frees the object now if the caller's reference was the last one.
    pub fn free_if_unreferenced(&self, sim: &Sim) {
        let table = sim.table.lock();
        if let Some((_, place)) = table
            .objects()
            .find(|(_, place)| place.id.load(Relaxed) == self.id)
        {
            table.collect_object(sim, place);
        }
    }

    /// Opens the file and locks a byte while it holds the table's lock.
    ///
    /// Without that lock, a collector could find the file unlocked and remove it before the byte is
    /// locked.
    fn open_locked(&self, sim: &Sim, byte: u64) -> Result<File, SimError> {
        let path = sim.folder.object(self.id);
        let at = |step| {
            let path = path.clone();
            move |source| SimError::Io { step, path, source }
        };
        let _table = sim.table.lock();
        let file = crate::lock::open(&path).map_err(at("open"))?;
        crate::lock::lock_shared(&file, byte).map_err(at("lock"))?;
        Ok(file)
    }
}

fn read_row(place: &RawObject) -> Object {
    Object {
        id: place.id.load(Relaxed),
        unit: place.unit.load(Relaxed) as usize,
        size: place.size.load(Relaxed),
        is_creator: false,
    }
}

fn pin_description(file: &File) -> std::io::Result<ObjectPin> {
    // SAFETY: the kernel chooses the address of the new mapping, which permits no access.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_NONE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    Ok(ObjectPin(page))
}
